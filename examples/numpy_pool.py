"""NumPy's pool of native threads, used by two functions (`pip install numpy`).

    sudo nativeprof record --attribute-workers -o numpy_pool.html -- python3 examples/numpy_pool.py

What the threads of OpenBLAS do is below `large` or `small`, after a frame `[worker thread NAME]`.
"""
import sys
import time

import numpy as np


def large(a):
    return a @ a


def small(a):
    return a[:300, :300] @ a[:300, :300]


def main(seconds):
    a = np.random.default_rng(1).random((800, 800))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        large(a)
        for _ in range(4):
            small(a)


main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
