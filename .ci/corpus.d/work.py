"""Python code that keeps its interpreter busy: calls, strings, dicts, sorting, regular expressions."""
import json
import re
import time


def down(left, x):
    if left == 0:
        for i in range(300):
            x = (x * 1103515245 + i) & 0xFFFFFFF
        return x
    return down(left - 1, x + left) ^ left


def words(n):
    text = " ".join(f"w{i % 97} {i}" for i in range(n))
    found = re.findall(r"w(\d+)", text)
    return len(json.dumps(sorted(found)))


end = time.monotonic() + 14
x = 1
while time.monotonic() < end:
    x ^= down(40, x) + words(500)
