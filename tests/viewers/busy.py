"""Two threads: native code that calls back into Python, recursion, compression; for 1.3 seconds of CPU time."""

import functools
import json
import threading
import time
import zlib

end = time.process_time() + 1.3


def key(item):
    return -item % 1000


def walk(depth):
    return 0 if depth == 0 else 1 + walk(depth - 1)


def order():
    while time.process_time() < end:
        sorted(range(20000), key=key)
        functools.reduce(lambda a, b: a + b, range(5000))
        walk(200)


def pack():
    data = [{"name": f"item {i}", "value": i} for i in range(2000)]
    while time.process_time() < end:
        zlib.compress(json.dumps(data).encode())


threading.Thread(target=pack, name="packer", daemon=True).start()
order()
