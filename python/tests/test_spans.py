"""nativeprof.span: what is active when, and what samples of this process get."""

import asyncio
import contextvars
import gzip
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from chance import likely, repeated

import nativeprof
from nativeprof._native import current_labels, spans_are_published


def names():
    return [value for key, value in current_labels() if key == "span"]


def test_spans_nest_and_end():
    assert spans_are_published()
    assert current_labels() == []
    with nativeprof.span("outer", user=7, route="/a") as outer:
        assert repr(outer) == "<nativeprof.span 'outer'>"
        assert current_labels() == [("span", "outer"), ("user", "7"), ("route", "/a")]
        with nativeprof.span("inner", route="/b"):
            assert current_labels() == [("span", "outer"), ("user", "7"), ("span", "inner"), ("route", "/b")]
        assert names() == ["outer"]
    assert current_labels() == []


def test_exceptions_pass_and_end_spans():
    with pytest.raises(ZeroDivisionError), nativeprof.span("outer"), nativeprof.span("inner"):
        1 / 0
    assert names() == []


def test_one_object_is_entered_again():
    span = nativeprof.span("again")

    def down(depth):
        with span:
            assert len(names()) == 5 - depth
            if depth:
                down(depth - 1)

    down(4)
    assert names() == []


def test_decorated_functions():
    @nativeprof.span("work", kind="sync")
    def work(a, *, b):
        """Text."""
        return a, b, names()

    assert work(1, b=2) == (1, 2, ["work"])
    assert (work.__name__, work.__doc__) == ("work", "Text.")

    @nativeprof.span("coroutine")
    async def coroutine():
        await asyncio.sleep(0)
        return names()

    assert asyncio.iscoroutinefunction(coroutine) if sys.version_info < (3, 14) else True
    assert asyncio.run(coroutine()) == ["coroutine"]
    assert names() == []

    def generator():
        yield

    with pytest.raises(TypeError, match="generator function .*generator.* inside"):
        nativeprof.span("no")(generator)
    with pytest.raises(TypeError, match="decorates functions"):
        nativeprof.span("no")(1)


def test_wrong_arguments():
    for wrong in [(), (1,), ("a", "b")]:
        with pytest.raises(TypeError):
            nativeprof.span(*wrong)
    with pytest.raises(TypeError, match="name of the span"):
        nativeprof.span("a", span="b")


def test_tasks_have_spans_of_their_own():
    seen = {}

    async def task(name):
        assert names() == ["parent"]
        with nativeprof.span(name):
            for _ in range(3):
                await asyncio.sleep(0)
                assert names() == ["parent", name]
        seen[name] = names()

    async def main():
        with nativeprof.span("parent"):
            tasks = [asyncio.ensure_future(task(f"task {n}")) for n in range(5)]
            await asyncio.sleep(0)
            assert names() == ["parent"]
        await asyncio.gather(*tasks)
        assert names() == []

    asyncio.run(main())
    assert seen == {f"task {n}": ["parent"] for n in range(5)}


def test_threads_begin_without_spans():
    seen = []
    with nativeprof.span("here"):
        thread = threading.Thread(
            target=lambda: seen.append(names()), **({"context": contextvars.Context()} if sys.version_info >= (3, 14) else {})
        )
        thread.start()
        thread.join()
    assert seen == [[]]


def test_a_span_left_elsewhere_changes_nothing():
    def generator():
        with nativeprof.span("suspended"):
            yield

    suspended = generator()
    with nativeprof.span("outer"):
        next(suspended)
        assert names() == ["outer", "suspended"]
    assert names() == []
    with nativeprof.span("other"):
        suspended.close()
        assert names() == ["other"]


def test_long_and_strange_texts():
    with nativeprof.span("é" * 200, **{"k" * 100: "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace")}):
        assert current_labels()[0] == ("span", "é" * 127)
    spans = [nativeprof.span("s%d" % n, text="x" * 102) for n in range(8)]
    for span in spans:
        span.__enter__()
    # The innermost ones are complete.
    assert current_labels()[-2:] == [("span", "s7"), ("text", "x" * 102)]
    assert names() == ["s3", "s4", "s5", "s6", "s7"]  # 4 * 112 bytes, and the name of another
    for span in reversed(spans):
        span.__exit__(None, None, None)
    assert current_labels() == []


def labels_of(tree):
    samples = tree["nativeprof"]["timeline"]
    labels = samples.get("labels", {"sets": [[]], "set": []})
    return [labels["sets"][number] for number in labels["set"]]


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def check_share(part, whole, expected):
    """Within four standard deviations, and a few percent for what is around."""
    likely(whole > 10, "the machine is too busy")
    likely(abs(part / whole - expected) < 4 * (expected * (1 - expected) / whole) ** 0.5 + 0.04, part, whole)


@pytest.mark.parametrize("mode", ["cpu", "wall", "counts+cpu"])
@repeated
def test_samples_of_this_process_are_labeled(mode):
    with nativeprof.Profiler(rate=1000, mode=mode) as profiler:
        for _ in range(20):
            with nativeprof.span("first", kind="x"):
                burn(0.01)
                with nativeprof.span("second"):
                    burn(0.02)
            burn(0.01)
    outer = [["span", "first"], ["kind", "x"]]
    found = labels_of(profiler.to_dict())
    counts = [found.count(labels) for labels in ([], outer, [*outer, ["span", "second"]])]
    assert sum(counts) == len(found)
    check_share(counts[2], counts[1] + counts[2], 2 / 3)
    if mode != "wall":  # other threads sleep
        check_share(counts[0], len(found), 1 / 4)


def test_a_profile_without_spans_has_no_labels():
    with nativeprof.Profiler(rate=1000) as profiler:
        burn(0.1)
    assert "labels" not in profiler.to_dict()["nativeprof"]["timeline"]


@repeated
def test_tasks_interleave_in_samples():
    async def work(name, seconds):
        for _ in range(20):
            with nativeprof.span(name):
                burn(seconds / 2)
                await asyncio.sleep(0)
                burn(seconds / 2)
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(work("a", 0.01), work("b", 0.03))

    with nativeprof.Profiler(rate=1000) as profiler:
        asyncio.run(main())
    found = [labels[0][1] for labels in labels_of(profiler.to_dict()) if labels]
    check_share(found.count("a"), len(found), 1 / 4)


@repeated
def test_pprof_and_report_have_labels(tmp_path):
    with nativeprof.Profiler(rate=1000) as profiler, nativeprof.span("shown", key="value"):
        burn(0.2)
    likely(profiler.profile.stats["taken"])
    profiler.profile.save(tmp_path / "a.json")
    profiler.profile.save(tmp_path / "a.pb.gz")
    command = [os.path.join(os.path.dirname(sys.executable), "nativeprof")]
    words = ["report", str(tmp_path / "a.json"), "--by", "label", "--json"]
    done = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    rows = {row["name"]: row["total"] for row in json.loads(done.stdout)["rows"]}
    assert rows["shown"] == rows["key=value"] > 0
    assert b"shown" in gzip.decompress((tmp_path / "a.pb.gz").read_bytes())


@repeated
def test_entering_and_leaving_is_cheap():
    """Bounded loosely: the machine may be busy. The figure is in the guide."""
    span = nativeprof.span("cheap")
    best = 1.0
    for _ in range(20):
        start = time.thread_time()
        for _ in range(10_000):
            with span:
                pass
        best = min(best, (time.thread_time() - start) / 10_000)
    likely(best < 5e-6, best)
