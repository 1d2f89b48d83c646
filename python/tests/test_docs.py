"""The documentation: its examples run as printed, and its schema describes the JSON that is written."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from chance import likely, repeated

import nativeprof
from nativeprof import profile

pytestmark = pytest.mark.few_versions

ROOT = Path(__file__).parents[2]


def blocks(document, language):
    """The fenced blocks of a document in a language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found, f"{document} has no {language} block"
    return found


@pytest.mark.parametrize("example", blocks("docs/guide.md", "python"))
def test_python_examples_run(example, tmp_path):
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    saved = re.findall(r'(?:save|dump_stats|to_chrome)\("([^"]+)"\)', example)
    assert saved or "def test_" in example, "each of them writes a file, but for tests"
    for name in saved:
        assert (tmp_path / name).stat().st_size > 0


def test_notebook_cells_run(tmp_path):
    """In an IPython of its own: the one of test_magics lives in this process."""
    cells = blocks("docs/guide.md", "ipython")
    runner = (
        "import json, sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "for cell in json.loads(sys.argv[1]):\n"
        "    shell.run_cell(cell).raise_error()\n"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-c", runner, json.dumps(cells)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "cell.html").stat().st_size > 0


@pytest.fixture(scope="module")
def schema():
    schema = json.loads((ROOT / "docs/profile.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def strict(schema):
    """The schema without room for keys that it does not name: none may be missing from it."""
    schema = copy.deepcopy(schema)
    for definition in objects(schema["$defs"]):
        # An encoding of the format's own has no properties here.
        if definition.get("type") == "object" and "properties" in definition:
            definition["additionalProperties"] = False
    return schema


def objects(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from objects(item)


def check(tree, schema):
    """Node by node: a tree may be deeper than the validator can go."""
    root = jsonschema.Draft202012Validator(schema)
    below = jsonschema.Draft202012Validator({"$ref": "#/$defs/node", "$defs": schema["$defs"]})
    work = [tree]
    while work:
        node = work.pop()
        children = node["children"]
        (root if node is tree else below).validate({**node, "children": {}})
        for identifier, child in children.items():
            assert child["identifier"] == identifier
            work.append(child)


def command_line_profile(tmp_path):
    """What the command of the package writes."""
    command = [os.path.join(os.path.dirname(sys.executable), "nativeprof"), "record", "--backend", "ptrace", "--threads"]
    program = "sum(i * i for i in range(10_000_000))"
    output = tmp_path / "profile.json"
    subprocess.run([*command, "-o", str(output), "--", sys.executable, "-c", program], check=True, capture_output=True)
    return json.loads(output.read_text(encoding="utf-8"))


def in_process_profile(_):
    with nativeprof.Profiler(mode="wall") as profiler:
        sum(i * i for i in range(10_000_000))
    return profiler.to_dict()


def golden_profile(_):
    return json.loads((ROOT / "fixtures/golden/profile.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("make", [golden_profile, in_process_profile, command_line_profile])
@repeated
def test_schema_describes_what_is_written(schema, make, tmp_path):
    tree = make(tmp_path)
    assert "nativeprof" in tree
    likely(tree["count"] > 0, tree)
    check(tree, schema)
    check(tree, strict(schema))


def test_schema_allows_a_profile_of_dask(schema):
    check(profile.create(), schema)


@pytest.mark.parametrize(
    "path, value",
    [
        (["count"], -1),
        (["count"], "many"),
        (["identifier"], "work;a.py;1"),
        (["description"], {}),
        (["children"], []),
        (["nativeprof", "format"], 2),
        (["nativeprof", "quality"], {}),
        (["nativeprof", "threads"], [{"pid": 1}]),
    ],
)
def test_schema_refuses_what_is_wrong(schema, path, value):
    tree = golden_profile(None)
    check(tree, schema)
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        # Children are checked one by one; of another type they are the validator's.
        if isinstance(tree["children"], dict):
            check(tree, schema)
        else:
            jsonschema.Draft202012Validator(schema).validate(tree)
