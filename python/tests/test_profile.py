"""Our functions of trees against the original's, from the installed `distributed`, on made-up frames and trees."""

import copy
import sys
import threading
import time
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
from chance import likely, repeated
from distributed import profile as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from nativeprof import profile as ours

pytestmark = pytest.mark.few_versions

settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("quick")

words = st.sampled_from(["f", "g", "<lambda>", "größe", "a;b", ""])
files = st.sampled_from(["/a/x.py", "/a/worker.py", "x.py", "<string>", "<low-level>", "/ä/y.pyc"])


def identical(a, b):
    """Equal, with types and the order of keys."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            identical(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            identical(x, y)
    else:
        assert a == b


class Code(SimpleNamespace):
    pass


@st.composite
def made_up_frames(draw):
    """A frame and its callers, none of them the interpreter's."""
    frame = None
    for _ in range(draw(st.integers(1, 12))):
        code = Code(co_name=draw(words), co_filename=draw(files), co_firstlineno=draw(st.integers(0, 3)))
        if draw(st.integers(0, 9)) == 0:
            code = Code(__module__=draw(st.sampled_from(["m", None])), __qualname__=draw(words), co_filename="b")
        frame = SimpleNamespace(f_code=code, f_back=frame, f_lineno=draw(st.integers(1, 5)), f_lasti=0, f_globals={})
    return frame


@st.composite
def real_frames(draw):
    """A frame of the interpreter, at the end of a chain of functions with made-up names and files."""
    scope = {"end": sys._getframe}
    inner = "end"
    for at in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(["f", "g", "größe"]))
        lines = "\n" * draw(st.integers(0, 2))
        exec(compile(f"{lines}def {name}():\n  return {inner}()", draw(files), "exec"), scope)
        inner = f"call{at}"
        scope[inner] = scope[name]
    return scope[inner]()


frames = st.one_of(made_up_frames(), real_frames())
suffixes = st.sampled_from(["worker.py", ".py", "nothing", "", "x.py"])


@given(
    st.lists(frames, min_size=1, max_size=6),
    st.booleans(),
    st.one_of(st.none(), suffixes),
    st.one_of(st.just(()), suffixes, st.lists(suffixes, max_size=2)),
    st.one_of(st.none(), st.integers(-1, 4)),
)
def test_process_equals_the_original(stacks, inner, stop, omit, depth):
    a, b = ours.create(), theirs.create()
    for frame in stacks:
        child = frame if inner else None
        got = ours.process(frame, child, a, stop=stop, omit=omit, depth=depth)
        wanted = theirs.process(frame, child, b, stop=stop, omit=omit, depth=depth)
        identical(got, wanted)
    identical(a, b)


class Entry(SimpleNamespace):
    def __str__(self):
        return f"[{self.addr}] {self.name}"


entries = st.builds(
    Entry,
    addr=st.integers(0, 2**64),
    offset=st.integers(0, 2**12),
    name=words,
    is_python=st.booleans(),
)


@given(st.lists(st.lists(entries, max_size=5), max_size=5), st.booleans())
def test_llprocess_equals_the_original(stacks, inner):
    a, b = ours.create(), theirs.create()
    for stack in stacks:
        first, second = list(stack), list(stack)
        child = True if inner else None
        identical(ours.llprocess(first, child, a), theirs.llprocess(second, child, b))
        assert first == second == []
    identical(a, b)
    assert ours.llprocess(None, None, None) is None
    with_deque = ours.create()
    for stack in stacks:
        ours.llprocess(deque(stack), True if inner else None, with_deque)
    identical(with_deque, a)


@st.composite
def trees(draw, identifier="root", depth=4, counts=st.integers(0, 50)):
    keys = draw(st.lists(st.sampled_from("abcdefgh"), max_size=4 if depth else 0, unique=True))
    filename = draw(files)
    return {
        "count": draw(counts),
        "children": {key: draw(trees(key, depth - 1, counts)) for key in keys},
        "identifier": identifier,
        "description": {"filename": filename, "name": identifier, "line_number": draw(st.integers(0, 9)), "line": "x\n"},
    }


@given(st.lists(trees(), max_size=4))
def test_merge_equals_the_original(many):
    before = copy.deepcopy(many)
    got = ours.merge(*many)
    identical(got, theirs.merge(*many))
    assert many == before
    if many:
        assert got["description"] is many[0]["description"] and got["children"] is not many[0]["children"]


@given(st.lists(trees(counts=st.one_of(st.integers(), st.floats(0, 9), st.booleans())), min_size=1, max_size=3))
def test_merge_adds_whatever_python_adds(many):
    identical(ours.merge(*many), theirs.merge(*many))


def test_merge_adds_fractions_as_python_does():
    many = [{**theirs.create(), "count": 0.1} for _ in range(10)]
    assert ours.merge(*many)["count"] == sum([0.1] * 10)
    identical(ours.merge(*many), theirs.merge(*many))


def test_merge_refuses_different_functions():
    a, b = ours.create(), {**ours.create(), "identifier": "b"}
    with pytest.raises(ValueError) as got:
        ours.merge(a, b)
    with pytest.raises(ValueError) as wanted:
        theirs.merge(a, b)
    assert str(got.value) == str(wanted.value)
    nested = [{**ours.create(), "children": {"k": tree}} for tree in (a, b)]
    with pytest.raises(ValueError):
        ours.merge(*nested)


def test_merge_loses_nothing_of_a_deep_tree():
    tree = leaf = ours.create()
    for _ in range(50_000):
        leaf["children"]["root"] = leaf = {**ours.create(), "count": 1}
    merged, depth = ours.merge(tree, tree), 0
    while merged["children"]:
        merged, depth = merged["children"]["root"], depth + 1
        assert merged["count"] == 2
    assert depth == 50_000
    assert len(ours.plot_data({**tree, "count": 1})["left"]) == 50_001


def test_wrong_arguments_are_errors_of_python():
    for call in (
        lambda: ours.merge({}),
        lambda: ours.process(sys._getframe(), None, {}),
        lambda: ours.plot_data({}),
        lambda: ours.llprocess([Entry(addr=1, offset=0, name="n")], None, {}),
    ):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(AttributeError):
        ours.process(None, None, ours.create())
    with pytest.raises(AttributeError):
        ours.llprocess([1], None, ours.create())
    with pytest.raises(TypeError):
        ours.merge(1)


times = st.one_of(st.none(), st.integers(0, 8), st.floats(0, 8))


@given(st.lists(trees(depth=2), max_size=6), st.one_of(st.none(), trees(depth=2)), times, times, st.booleans())
def test_get_profile_equals_the_original(states, recent, start, stop, as_deque):
    history = list(enumerate(states, 1))
    if as_deque:
        history = deque(history)
    identical(
        ours.get_profile(history, recent, start, stop, key="ignored"),
        theirs.get_profile(history, recent, start, stop, key="ignored"),
    )


@pytest.mark.parametrize(
    "start, stop, theirs_count, exact_count",
    [
        (None, None, 21, 121),
        (3, None, 18, 118),
        (None, 3, 10, 6),
        (2, 4, 14, 9),
        (None, 0, 1, 0),
        (3.5, 3.6, 4, 0),
        (10, None, 0, 100),
    ],
)
def test_get_profile_exactly(start, stop, theirs_count, exact_count):
    history = [(t, {**ours.create(), "count": t}) for t in range(1, 7)]
    recent = {**ours.create(), "count": 100}
    assert ours.get_profile(history, None, start, stop)["count"] == theirs.get_profile(history, None, start, stop)["count"]
    assert ours.get_profile(history, recent, start, stop, exact=True)["count"] == exact_count


@given(trees(), st.sampled_from([0.01, 0.001, 1, 100, 1e5, 1e-7]))
def test_plot_data_equals_the_original(tree, interval):
    identical(ours.plot_data(tree, interval), theirs.plot_data(tree, interval))


@given(st.floats(0, 1e7))
def test_times_are_written_as_the_original_does(seconds):
    tree = {**ours.create(), "count": 1}
    assert ours.plot_data(tree, seconds)["time"] == theirs.plot_data(tree, seconds)["time"]


def test_texts_equal_the_original():
    frame = sys._getframe()
    for name in ("identifier", "repr_frame", "info_frame", "call_stack"):
        assert getattr(ours, name)(frame) == getattr(theirs, name)(frame), name
    assert ours.identifier(None) == theirs.identifier(None) == "None"
    without_line = SimpleNamespace(f_code=frame.f_code, f_lineno=None, f_lasti=0, f_globals={}, f_back=None)
    for at in range(0, 200, 7):
        without_line.f_lasti = at
        assert ours.info_frame(without_line) == theirs.info_frame(without_line)
        assert ours.call_stack(without_line) == theirs.call_stack(without_line)


def test_all_names_are_there():
    public = "create identifier info_frame repr_frame call_stack process merge llprocess ll_get_stack watch get_profile"
    for name in (public + " plot_data plot_figure lock").split():
        assert hasattr(theirs, name) and name in ours.__all__
        assert name == "lock" or getattr(ours, name).__doc__, f"{name} has no docstring"


def test_no_code_object_is_kept_alive_and_none_is_taken_for_another():
    tree = ours.create()
    for at in range(100):
        scope = {"end": sys._getframe}
        exec(compile(f"def f{at}():\n  return end()", f"/{at}.py", "exec"), scope)
        frame = scope[f"f{at}"]()
        ours.process(frame, None, tree, depth=0)
        code = weakref.ref(frame.f_code)
        # The function and its globals hold each other.
        scope.clear()
        del frame
        assert code() is None
    assert list(tree["children"]) == [f"f{at};/{at}.py;1" for at in range(100)]


def test_add_sample_counts_the_innermost_function():
    native = [Entry(addr=16, offset=0, name="n", is_python=False)]
    for frames, omit in [((), ()), (native, ()), ((), "nothing")]:
        tree = ours.create()
        ours.add_sample(tree, sys._getframe(), frames, omit=omit)
        node = tree
        while node["children"]:
            assert node["count"] == 1
            (node,) = node["children"].values()
        assert node["count"] == 1
        assert (node["description"]["filename"] == "<low-level>") == bool(frames)
    assert len(native) == 1, "the list is left as it is"
    tree = ours.create()
    ours.add_sample(tree, sys._getframe(), omit="test_profile.py")
    assert tree == ours.create()


@pytest.mark.parametrize("every", [False, True])
@repeated
def test_watch(every):
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    log = ours.watch(thread.ident, interval="5ms", cycle="50ms", every_interval=every)
    until = time.time() + 10
    while len(log) < 4 and time.time() < until:
        time.sleep(0.01)
    with ours.lock:
        length = len(log)
        time.sleep(0.15)
        assert len(log) == length, "nothing is written while another holds the lock"
    done.set()
    thread.join()
    assert len(log) >= 4
    counts = [tree["count"] for _, tree in list(log)[:3]]
    if every:
        likely(all(count > 1 for count in counts), counts)
    else:
        assert counts == [1, 1, 1]
    stamps = [stamp for stamp, _ in log]
    assert stamps == sorted(stamps)
    whole = ours.get_profile(log)
    assert whole["count"] == sum(tree["count"] for _, tree in log)
    assert any(d.startswith("wait;") for d in _identifiers(whole))


def _identifiers(tree):
    for key, child in tree["children"].items():
        yield key
        yield from _identifiers(child)


def test_watch_reads_spans_as_dask_does():
    from dask.utils import parse_timedelta

    for span in ["20ms", "2 s", 0.5, 3, "1h", "2 minutes", "1.5us", "10 NS", "day"]:
        assert ours._seconds(span) == pytest.approx(parse_timedelta(span)), span
    for span in ["20 parsecs", "", "ms 20"]:
        with pytest.raises(ValueError):
            ours._seconds(span or "x")


def test_plot_figure():
    tree = ours.create()
    ours.add_sample(tree, sys._getframe())
    data = ours.plot_data(tree)
    figure, source = ours.plot_figure(data, title="t")
    theirs_figure, theirs_source = theirs.plot_figure(data, title="t")
    assert source.data == theirs_source.data and "states" in data
    assert [type(tool) for tool in figure.tools] == [type(tool) for tool in theirs_figure.tools]
    assert figure.title.text == "t"
