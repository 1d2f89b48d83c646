"""The JSON that commands print is what its schemas in docs/ describe."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.few_versions

ROOT = Path(__file__).resolve().parents[2]
PROFILE = str(ROOT / "fixtures/golden/profile.json")
COMMAND = os.path.join(os.path.dirname(sys.executable), "nativeprof")
BUSY = "import sys, threading; print(threading.get_ident(), flush=True)\nwhile True: sum(range(1000))"

WAITING = {
    "asyncio": """
import asyncio, time
async def inner():
    await asyncio.sleep(1000)
async def main():
    tasks = [asyncio.ensure_future(inner()) for _ in range(2)]
    asyncio.ensure_future(asyncio.wait(tasks))
    await asyncio.sleep(0.01)
    print(1, flush=True)
    time.sleep(1000)
asyncio.run(main())
""",
    "greenlet": """
import time, greenlet
main = greenlet.getcurrent()
new, waiting = greenlet.greenlet(print), greenlet.greenlet(lambda: main.switch())
waiting.switch()
def work():
    print(1, flush=True)
    time.sleep(1000)
running = greenlet.greenlet(work)
running.switch()
""",
    "trio": """
import time, trio, trio.testing
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 1000)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(trio.sleep, 1000)
        print(1, flush=True)
        time.sleep(1000)
trio.run(main)
""",
}


def load(name):
    schema = json.loads((ROOT / f"docs/{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def objects(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from objects(item)


def strict(schema):
    """The schema without room for keys that it does not name: none may be missing from it."""
    schema = copy.deepcopy(schema)
    for definition in objects(schema["$defs"]):
        if definition.get("type") == "object" and "properties" in definition:
            definition["additionalProperties"] = False
    return schema


def check(schema, value):
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    jsonschema.validate(value, strict(schema), cls=jsonschema.Draft202012Validator)


def output(*words, codes=(0,)):
    done = subprocess.run([COMMAND, *words, "--json"], capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode in codes, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def busy():
    """The PID of a Python program that computes."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield str(process.pid)
        process.kill()


@pytest.mark.parametrize(
    "key, words",
    [
        ("rows", []),
        ("rows", ["--by", "function", "--sort", "total"]),
        ("rows", ["--by", "category"]),
        ("rows", ["--by", "line"]),
        ("rows", ["--by", "module"]),
        ("rows", ["--by", "thread"]),
        ("rows", ["--by", "process"]),
        ("callers", ["--callers", "."]),
        ("callees", ["--callees", "."]),
        ("tree", ["--tree"]),
        ("source", ["--source", "main.py"]),
    ],
)
def test_report(key, words):
    value = output("report", PROFILE, *words)
    assert value["version"] == 1 and value[key], value
    check(load("report"), value)


def test_report_of_waits(tmp_path):
    file = str(tmp_path / "wall.json")
    script = "import threading, time\nlock = threading.Lock()\nlock.acquire()\nthreading.Timer(0.2, lock.release).start()\n"
    script += "lock.acquire()\ntime.sleep(0.2)\nsum(range(5_000_000))"
    command = [COMMAND, "record", "--mode", "wall", "--backend", "ebpf", "-r", "1000", "-o", file]
    done = subprocess.run([*command, "--", sys.executable, "-c", script], capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        pytest.skip(f"off-CPU time cannot be sampled here: {done.stderr}")
    value = output("report", file, "--waits")
    assert value["waits"], value
    check(load("report"), value)


def test_report_of_tasks(tmp_path):
    file = str(tmp_path / "tasks.json")
    script = "import asyncio, time\nasync def main():\n    await asyncio.sleep(0.3)\n    time.sleep(1)\n"
    script += "    sum(range(50_000_000))\n    await asyncio.sleep(0.3)\nasyncio.run(main())"
    command = [COMMAND, "record", "--lag", "100ms", "-r", "1000", "-o", file]
    subprocess.run([*command, "--", sys.executable, "-c", script], check=True)
    value = output("report", file, "--lag")
    assert value["lag_events"], value
    check(load("report"), value)
    value = output("report", file, "--tree")
    assert any(row.get("kind") == "task" for row in value["tree"]), value
    check(load("report"), value)
    # Of each node alone: the validator needs many frames of Python for each level of a tree.
    nodes = [node for node in objects(json.loads(Path(file).read_text(encoding="utf-8"))) if "children" in node]
    schema = {"$defs": load("profile")["$defs"], "$ref": "#/$defs/node"}
    validator = jsonschema.Draft202012Validator(strict(schema))
    for node in nodes:
        validator.validate({**node, "children": {}})
    assert any(node["description"].get("kind") == "task" for node in nodes)


@pytest.mark.parametrize("words", [[], ["--by", "module", "--self"], ["--interpreter"]])
def test_diff(words):
    value = output("diff", PROFILE, PROFILE, "--all", *words)
    assert value["version"] == 1 and value["rows"], value
    check(load("diff"), value)


def test_dump(busy):
    value = output("dump", busy, "--locals")
    assert value["version"] == 1 and value["threads"][0]["python_name"] == "MainThread", value
    assert any("locals" in frame for frame in value["threads"][0]["frames"]), value
    check(load("dump"), value)


@pytest.mark.parametrize("kind", WAITING)
def test_dump_of_tasks(kind):
    pytest.importorskip(kind)
    with subprocess.Popen([sys.executable, "-c", WAITING[kind]], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        try:
            value = output("dump", str(process.pid), "--tasks")
        finally:
            process.kill()
    states = {task["state"] for task in value["tasks"] if task["kind"] == kind}
    assert states == {"suspended", "running"} | (set() if kind == "asyncio" else {"new"}), value
    check(load("dump"), value)


def test_doctor(busy):
    for words in [], [busy]:
        value = output("doctor", *words, codes=(0, 1))
        assert value["version"] == 1 and value["machine"], value
        assert bool(words) == (value["process"] is not None)
        check(load("doctor"), value)


@pytest.mark.parametrize(
    "name, words, change",
    [
        ("report", ["report", PROFILE], {"version": 2}),
        ("report", ["report", PROFILE], {"tree": []}),
        ("report", ["report", PROFILE], {"rows": [{"self": 1}]}),
        ("diff", ["diff", PROFILE, PROFILE], {"samples": [1]}),
        ("doctor", ["doctor"], {"machine": [{"subject": 1}]}),
    ],
)
def test_schemas_refuse_what_is_wrong(name, words, change):
    value = {**output(*words, codes=(0, 1)), **change}
    with pytest.raises(jsonschema.ValidationError):
        check(load(name), value)
