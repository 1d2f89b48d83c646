#!/usr/bin/env python3
"""Prints the results of .ci/kernels as a table: `table.py DIRECTORY KERNEL=SUITE...`. Fails if one of them is not good."""

import pathlib
import sys


def results(path):
    """Check -> (good, detail), in the order of the run."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        verdict, name, detail = (line.split(" ", 2) + [""])[:3]
        found[name.replace("_", " ")] = (verdict == "ok", detail)
    return found


def main():
    directory = pathlib.Path(sys.argv[1])
    kernels = [arg.split("=") for arg in sys.argv[2:]]
    columns = {kernel: results(directory / suite / "results") for kernel, suite in kernels}
    names = []
    for column in columns.values():
        names += [name for name in column if name not in names]
    bad = []
    width = max(map(len, names), default=0)
    cells = {kernel: {} for kernel in columns}
    for kernel, column in columns.items():
        for name in names:
            good, detail = column.get(name, (False, "did not run"))
            cells[kernel][name] = detail if good else "FAILED"
            if not good:
                bad.append(f"Linux {kernel}, {name}: {detail}")
        if not column:
            bad.append(f"Linux {kernel}: no results")
    widths = {kernel: max([len(cell) for cell in cells[kernel].values()] + [len(kernel)]) for kernel in columns}
    print(" " * width, *(kernel.ljust(widths[kernel]) for kernel in columns), sep="  ")
    for name in names:
        print(name.ljust(width), *(cells[kernel][name].ljust(widths[kernel]) for kernel in columns), sep="  ")
    print("\n".join(bad))
    return 1 if bad else 0


sys.exit(main())
