"""Two threads: native code that calls back into Python, recursion, compression; for a second and a half."""

import functools
import json
import threading
import time
import zlib

end = time.monotonic() + 1.5


def key(item):
    return -item % 1000


def walk(depth):
    return 0 if depth == 0 else 1 + walk(depth - 1)


def order():
    while time.monotonic() < end:
        sorted(range(20000), key=key)
        functools.reduce(lambda a, b: a + b, range(5000))
        walk(200)


def pack():
    data = [{"name": f"item {i}", "value": i} for i in range(2000)]
    while time.monotonic() < end:
        zlib.compress(json.dumps(data).encode())


threading.Thread(target=pack, name="packer", daemon=True).start()
order()
