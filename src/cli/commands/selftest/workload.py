"""What the self-test samples: parts whose CPU time is measured by the thread's own clock.

Each line read is a number of seconds to work for; each line written says what was done.
"""
import json
import sys
import time


def clock():
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def self_python(count):
    total = 0
    for i in range(count):
        total += i * i % 7
    return total


def self_sort(numbers):
    return sorted(numbers)


def self_key(number):
    return -number


def self_callback(numbers):
    return sorted(numbers, key=self_key)


def self_power(exponent):
    return pow(7, exponent, (1 << 1279) - 1)


def self_main(seconds, numbers):
    parts = [0.0] * 4
    rounds = 0
    began, began_cpu = time.perf_counter(), clock()
    end = began + seconds
    while time.perf_counter() < end:
        a = clock()
        self_python(30000)
        b = clock()
        self_sort(numbers)
        c = clock()
        self_callback(numbers)
        d = clock()
        self_power((1 << 700) - 1)
        e = clock()
        for i, spent in enumerate((b - a, c - b, d - c, e - d)):
            parts[i] += spent
        rounds += 1
    return {
        "rounds": rounds,
        "wall": time.perf_counter() - began,
        "cpu": clock() - began_cpu,
        "parts": dict(zip(("self_python", "self_sort", "self_callback", "self_power"), parts)),
    }


try:  # Where only ancestors may trace a process (yama), allow it to all others of this user.
    import ctypes

    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
state, numbers = 1, []
for _ in range(8000):
    state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
    numbers.append(state >> 40)
print(json.dumps({"python": sys.version.split()[0], "program": sys.executable}), flush=True)
for line in iter(sys.stdin.readline, ""):
    print(json.dumps(self_main(float(line), numbers)), flush=True)
