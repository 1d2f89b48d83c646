"""``python -m nativeprof [options] script.py [args]`` or ``-m module [args]``: runs a program and samples it."""

import sys

from ._run import main

if __name__ == "__main__":
    main(sys.argv[1:])
