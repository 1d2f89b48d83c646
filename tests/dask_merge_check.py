"""Merges profiles with the unmodified distributed.profile and compares with what `nativeprof merge` made of them.

Usage: dask_merge_check.py MERGED FILE...
"""

import json
import sys

from distributed import profile


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def same(ours, theirs, path=()):
    assert ours["count"] == theirs["count"], (path, ours["count"], theirs["count"])
    assert set(ours["children"]) == set(theirs["children"]), path
    for name in ("filename", "name", "line_number", "line"):
        assert ours["description"][name] == theirs["description"][name], (path, name)
    for key, child in ours["children"].items():
        same(child, theirs["children"][key], (*path, key))


merged, *files = sys.argv[1:]
same(load(merged), profile.merge(*map(load, files)))
