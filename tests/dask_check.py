"""Reads profiles of ours with the unmodified distributed.profile and checks what it makes of them.

Usage: dask_check.py PROFILE.json FLAMEGRAPH.svg
"""

import copy
import json
import sys
import xml.etree.ElementTree as ET

from distributed import profile
from distributed.protocol import dumps, loads

KEYS = {"identifier", "description", "count", "children"}
OURS = {"lines", "self_lines", "values", "nativeprof"}


def nodes(tree):
    """Every node with its depth; iterative, since stacks may be deep."""
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack += [(child, depth + 1) for child in node["children"].values()]


def four_keys(node):
    """The tree as Dask alone would build it."""
    return {
        "identifier": node["identifier"],
        "description": node["description"],
        "count": node["count"],
        "children": {key: four_keys(child) for key, child in node["children"].items()},
    }


def check_contract(tree):
    assert tree["identifier"] == "root"
    assert tree["description"] == profile.create()["description"]
    for node, depth in nodes(tree):
        assert KEYS <= set(node) <= KEYS | OURS, set(node)
        assert ("nativeprof" in node) == (depth == 0)
        assert type(node["count"]) is int
        assert sum(child["count"] for child in node["children"].values()) <= node["count"]
        assert all(key == child["identifier"] for key, child in node["children"].items())
        description = node["description"]
        types = {"filename": str, "name": str, "line_number": int, "line": str}
        assert all(type(description[key]) is expected for key, expected in types.items()), description
        kind = description.get("kind")
        if kind in ("process", "thread"):
            assert description["filename"] == ""
        elif kind is not None:
            assert description["filename"] == "<low-level>"
            name, address = node["identifier"].rsplit(";<low-level>;", 1)
            module = f" ({description['module']})" if kind in ("native", "inlined") and "module" in description else ""
            assert name == (description["name"] or module and "[unnamed]") + module and int(address, 16) >= 0
            assert description["line_number"] == 0
        elif depth:
            name, first_line = node["identifier"].rsplit(";", 1)
            assert name == f"{description['name']};{description['filename']}" and int(first_line) >= 0


def check_merge(tree):
    plain = four_keys(tree)
    before = copy.deepcopy(tree)
    assert profile.merge(tree) == plain, "merging one profile changes it"
    assert tree == before, "merging changed its argument"
    twice = profile.merge(tree, tree)
    assert [node["identifier"] for node, _ in nodes(twice)] == [node["identifier"] for node, _ in nodes(plain)]
    assert [node["count"] for node, _ in nodes(twice)] == [2 * node["count"] for node, _ in nodes(plain)]
    # With a profile that Dask took itself.
    theirs = profile.create()
    profile.process(sys._getframe(), None, theirs)
    both = profile.merge(tree, theirs)
    assert both["count"] == tree["count"] + theirs["count"]
    assert set(both["children"]) == set(tree["children"]) | set(theirs["children"])


def check_timeline(tree):
    """Follows each sample's stack through the tree, as another program would."""
    samples = tree["nativeprof"]["samples"]
    columns = [samples[key] for key in ("time", "thread", "stack") if key in samples]
    assert columns[0] and len({len(column) for column in columns}) == 1
    threads = samples["threads"]
    assert len(threads["pid"]) == len(threads["tid"])
    assert all(0 <= at < len(threads["tid"]) for at in samples.get("thread", [0]))
    places = []
    stack = [tree]
    while stack:
        node = stack.pop()
        places.append(node)
        stack += reversed(node["children"].values())
    stacks, frames = samples["stacks"], samples["stacks"]["frames"]
    functions = [places[at]["identifier"] if type(at) is int else at["identifier"] for at in stacks["functions"]]
    rows, path = [tree], [tree]
    assert len(stacks["up"]) == len(stacks["frame"])
    for up, frame in zip(stacks["up"], stacks["frame"]):
        del path[len(path) - up :]
        node = path[-1]["children"][functions[frames["function"][frame]]]
        assert frames["line"][frame] == 0 or str(frames["line"][frame]) in node["lines"]
        rows.append(node)
        path.append(node)
    assert "omitted_nodes" not in samples
    for row in samples["stack"]:
        below = sum(child["count"] for child in rows[row]["children"].values())
        assert rows[row]["count"] > below, "a sample at a node where none ended"


def check_plot(tree):
    data = profile.plot_data(tree)
    assert len({len(column) for column in data.values()}) == 1
    assert len(data["name"]) == sum(1 for node, _ in nodes(tree) if node["count"])
    for filename, color in zip(data["filename"], data["color"]):
        assert (color == "lightgray") == (filename == "<low-level>"), (filename, color)
    figure, _ = profile.plot_figure(data)
    assert figure.renderers


def check_transport(tree):
    """Dask's processes send profiles to each other. Lists arrive as tuples, which concerns our own keys only."""
    sent = loads(dumps(tree))
    assert four_keys(sent) == four_keys(tree)
    ours, theirs = sent["nativeprof"]["samples"], tree["nativeprof"]["samples"]
    assert list(ours["time"]) == theirs["time"] and list(ours["stacks"]["up"]) == theirs["stacks"]["up"]


def check_svg(path):
    """Well-formed, no element that a name of the target brought in, and no line of text that a name broke."""
    tags = {element.tag.rsplit("}", 1)[-1] for element in ET.parse(path).iter() if isinstance(element.tag, str)}
    assert tags == {"svg", "defs", "linearGradient", "stop", "style", "script", "rect", "text", "g", "title"}, tags
    scripts = [element for element in ET.parse(path).iter() if element.tag.endswith("}script")]
    assert len(scripts) == 1


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        tree = json.load(file)
    for check in (check_contract, check_merge, check_timeline, check_plot, check_transport):
        check(tree)
        print(f"{check.__name__}: ok")
    check_svg(sys.argv[2])
    print("check_svg: ok")


main()
