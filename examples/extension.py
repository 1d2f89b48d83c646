"""A C extension that calls back into Python: builds extension.c, and uses it for some seconds.

    sudo nativeprof record -o extension.html -- python3 examples/extension.py

The stacks lead from `main` through C's `total` to `weight`, and from `total` to C's `mix`.
"""
import importlib.util
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time


def build(directory):
    source = pathlib.Path(__file__).with_name("extension.c")
    file = pathlib.Path(directory, "extension.so")
    include = "-I" + sysconfig.get_path("include")
    subprocess.run(["cc", "-O2", "-g", "-shared", "-fPIC", include, "-o", str(file), str(source)], check=True)
    spec = importlib.util.spec_from_file_location("extension", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weight(i):
    return sum(x * x % 7 for x in range(i % 10)) + 0.5


def main(seconds):
    with tempfile.TemporaryDirectory() as directory:
        extension = build(directory)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            extension.total(weight, 10_000)


main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
