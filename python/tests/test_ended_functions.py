"""Code objects that end while they are traced: they are given up, and their figures stay."""

import gc
import sys
import threading
import weakref

import pytest

import nativeprof
from nativeprof import tasks, tracing
from nativeprof.events import EventProfiler

pytestmark = pytest.mark.every_version

#: Code objects that are made: so many that those which have ended are given up several times.
MADE = 3600
NAMES = ("ant", "bee", "c\udce9", "dog", "elk", "fox", "gnu")
FILES = ("<first>", "<second \udce8>", "<third>")


@pytest.fixture(autouse=True)
def no_calls_of_others():
    """Functions that the garbage collector calls for others would be in the figures: Hypothesis's, and callbacks of weak
    references to what earlier tests have left.
    """
    gc.collect()
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


def inner():
    pass


class Made:
    """Runs code that is made for each call, and knows which of it is alive."""

    def __init__(self):
        self.codes = []
        self.addresses = set()

    def run(self, at):
        # A function in a module. (Names of seven lengths, and three files: a code object hardly ever follows an equal one.)
        name, file = NAMES[at % len(NAMES)], FILES[at % len(FILES)]
        module = compile("def f():\n    inner()\nf()\n", file, "exec")
        (code,) = (c for c in module.co_consts if hasattr(c, "co_code"))
        more = {"co_qualname": name} if sys.version_info >= (3, 11) else {}
        constants = tuple(c.replace(co_name=name, **more) if c is code else c for c in module.co_consts)
        module = module.replace(co_consts=constants)
        code = next(c for c in constants if hasattr(c, "co_code"))
        self.codes += [weakref.ref(module), weakref.ref(code)]
        self.addresses |= {id(module), id(code)}
        names = {"inner": inner}
        exec(module, names)
        # Not to be left to the garbage collector.
        names.clear()

    def run_many(self, count=MADE // 2):
        for at in range(count):
            self.run(at)

    @property
    def alive(self):
        return sum(code() is not None for code in self.codes)

    @staticmethod
    def calls(count=MADE // 2):
        """(file, name) of what was made -> how often it ran."""
        expected = {}
        for at in range(count):
            for key in ((FILES[at % len(FILES)], NAMES[at % len(NAMES)]), (FILES[at % len(FILES)], "<module>")):
                expected[key] = expected.get(key, 0) + 1
        return expected

    def check(self):
        assert self.alive < MADE // 3
        assert len(self.addresses) < len(self.codes), "no address was that of several code objects"


@pytest.mark.parametrize("subcalls, in_threads", [(True, True), (False, False)])
def test_figures_stay(subcalls, in_threads):
    made = Made()
    profile = tracing.Profile(subcalls=subcalls)

    def in_thread(at):
        thread = threading.Thread(target=made.run, args=(at,))
        thread.start()
        thread.join()

    profile.enable()
    if in_threads:
        # What threads have left behind that have ended.
        for at in range(100):
            in_thread(at)
    made.run_many()
    profile.disable()
    made.check()
    expected = made.calls()
    if in_threads:
        for key, count in made.calls(100).items():
            expected[key] += count
    found, pairs = {}, {}
    of_files = [e for e in profile.getstats() if not isinstance(e.code, str) and e.code.co_filename in FILES]
    # Those that have ended are few, however many there were.
    assert len(of_files) < MADE // 3
    for entry in of_files:
        key = entry.code.co_filename, entry.code.co_name
        found[key] = found.get(key, 0) + entry.callcount
        assert entry.code.co_firstlineno == 1 and entry.totaltime >= entry.inlinetime > 0
        if sys.version_info >= (3, 11):
            assert entry.code.co_qualname == entry.code.co_name
        for callee in entry.calls or ():
            pair = entry.code.co_name, getattr(callee.code, "co_name", callee.code)
            pairs[pair] = pairs.get(pair, 0) + callee.callcount
    assert found == expected
    profile.create_stats()
    (of_inner,) = [row for key, row in profile.stats.items() if key[2] == "inner"]
    total = sum(count for (_, name), count in expected.items() if name == "<module>")
    assert of_inner[1] == total
    if subcalls:
        assert {(file, name): figures[0] for (file, _, name), figures in of_inner[4].items()} == {
            key: count for key, count in expected.items() if key[1] != "<module>"
        }
        names = {name: sum(n for (_, other), n in expected.items() if other == name) for name in NAMES}
        assert pairs == {
            **{("<module>", name): count for name, count in names.items()},
            **{(name, "inner"): count for name, count in names.items()},
        }


@pytest.mark.parametrize("mode", ["calls", "counts"])
def test_profiles_have_all_calls(mode):
    made = Made()
    profiler = nativeprof.Profiler(mode=mode)
    profiler.start()
    made.run_many(MADE // 4)
    first = profiler.take()
    made.run_many(MADE // 4)
    second = profiler.stop()
    made.check()
    spelled = {file: file.encode("utf-8", "backslashreplace").decode() for file in FILES}
    spelled.update((name, name.encode("utf-8", "backslashreplace").decode()) for name in NAMES)
    spelled["<module>"] = "<module>"
    expected = {(spelled[file], spelled[name]): count for (file, name), count in made.calls(MADE // 4).items()}
    for profile in (first, second):
        rows = profile.top(10_000, value="calls")
        assert {(row.filename, row.name): row.self_ for row in rows if row.filename in spelled.values()} == expected


@pytest.mark.parametrize("polled", [False, True])
def test_tasks_have_all_calls(polled):
    made = Made()
    profiler = tasks.new_profiler()
    profiler.start()
    for at in range(MADE // 2):
        made.run(at)
        if polled and at % 500 == 0:
            assert any(isinstance(f, tasks.python_function) for f in profiler.charges)
    profiler.stop()
    made.check()
    found = {}
    for function, bench in profiler.charges.items():
        if isinstance(function, tasks.python_function) and function.code.co_filename in FILES:
            key = function.code.co_filename, function.code.co_name
            found[key] = found.get(key, 0) + bench.calls
    assert found == made.calls()
    callees = {}
    for caller, counts in profiler.call_counts.items():
        if isinstance(caller, tasks.python_function) and caller.code.co_name in NAMES:
            for callee, count in counts.get():
                callees[callee.code.co_name] = callees.get(callee.code.co_name, 0) + count
    assert callees == {"inner": MADE // 2}


def test_a_timeline_has_the_names_of_its_time():
    made = Made()
    profilers = [EventProfiler(python=False, native=False) for _ in range(2)]
    for profiler in profilers:
        profiler.start()
    made.run_many(MADE // 8)
    profilers[0].stop()
    made.run_many(MADE // 8)
    # Functions that are new in the second half, and rows while it runs.
    during = profilers[1]._columns()
    profilers[0].start()
    made.run_many(MADE // 8)
    for profiler in profilers:
        profiler.stop()
    made.check()
    for columns, count in ((during, 2), (profilers[0]._columns(), 2), (profilers[1]._columns(), 3)):
        found, opened = {}, []
        for event, mod, name, caller in zip(columns["event"], columns["mod"], columns["name"], columns["from_name"]):
            if mod not in FILES:
                continue
            if event == "call":
                found[mod, name] = found.get((mod, name), 0) + 1
                opened.append((mod, name))
                assert caller == ("<module>" if name in NAMES else "run")
            elif event == "return":
                assert opened.pop() == (mod, name)
        assert found == {key: n * count for key, n in made.calls(MADE // 8).items()}
        assert opened == []


@pytest.mark.parametrize("kind", ["open", "suspended"])
def test_what_has_not_ended_keeps_its_name(kind):
    """Nothing but their frames refers to these code objects."""
    source = {
        "open": "def outer(run):\n    run()\nouter(run)",
        "suspended": "def outer(run):\n    yield\n    run()\n    yield\nmade.append(outer(run))",
    }
    made, generators = Made(), []
    profile = tracing.Profile()
    profile.enable()
    names = {"run": made.run_many, "made": generators}
    code = compile(source[kind], "<own>", "exec")
    exec(code, names)
    del code
    names.clear()
    for generator in generators:
        next(generator)
        made.run_many()
        next(generator)
    profile.disable()
    made.check()
    (outer,) = [e for e in profile.getstats() if getattr(e.code, "co_name", "") == "outer"]
    assert (outer.code.co_filename, outer.callcount) == ("<own>", 2 if generators else 1)
    assert [(c.code.co_name, c.callcount) for c in outer.calls if not isinstance(c.code, str)] == [("run_many", 1)]


@pytest.mark.parametrize("what", ["disable", "clear", "getstats"])
def test_the_end_of_a_code_object_may_run_python_code(what):
    made, called = Made(), []
    profile = tracing.Profile()

    def end(_):
        if not called:
            called.append(getattr(profile, what)())

    def watched():
        code = compile("0", "<watched>", "exec")
        exec(code)
        return weakref.ref(code, end)

    profile.enable()
    watch = watched()
    made.run_many()
    profile.disable()
    assert called and watch() is None
    modules = [e for e in profile.getstats() if getattr(e.code, "co_name", "") == "<module>"]
    counted = sum(e.callcount for e in modules)
    if what == "getstats":
        assert counted == MADE // 2 + 1
        assert sum(e.callcount for e in called[0] if getattr(e.code, "co_filename", "") == "<watched>") == 1
    else:
        assert 0 < counted < MADE // 2


def test_functions_that_are_left_out_are_given_up():
    made = Made()
    profile = tracing.Profile(skip=["skipped"])
    profile.enable()
    for at in range(MADE // 2):
        code = compile("0", f"<{at}>", "exec")
        made.codes.append(weakref.ref(code))
        exec(code, {"__name__": "skipped"})
    del code
    profile.disable()
    assert made.alive < MADE // 3
    assert not [e for e in profile.getstats() if getattr(e.code, "co_name", "") == "<module>"]
