"""The worker plugin on a real cluster: two worker processes that run numpy."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
from distributed import Client, LocalCluster
from distributed import profile as theirs

import nativeprof.dask

pytestmark = pytest.mark.few_versions


def sort_arrays(seed):
    """Runs for a while, nearly all of it in numpy's sort."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        numpy.random.default_rng(seed).random(300_000).sort()
    return seed


def nap(_):
    time.sleep(0.7)


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster:
        with Client(cluster) as client:
            client.register_plugin(nativeprof.dask.WorkerProfiler())
            client.gather(client.map(sort_arrays, range(6), pure=False))
            client.gather(client.map(nap, range(4), pure=False))
            yield client


def walk(tree, path=()):
    for node in tree["children"].values():
        yield path + (node,), node
        yield from walk(node, path + (node,))


def count_of(tree, name):
    return sum(node["count"] for path, node in walk(tree) if node["description"]["name"] == name)


def test_client_profile_shows_native_functions_under_the_task(client):
    tree = client.profile()
    assert set(tree) == {"identifier", "description", "count", "children"}
    assert count_of(tree, "sort_arrays") and count_of(tree, "nap")
    below = [
        path
        for path, node in walk(tree)
        if node["description"]["filename"] == "<low-level>"
        and any(outer["description"]["name"] == "sort_arrays" for outer in path)
    ]
    assert below, "no native frames below the task"
    assert all(not n["description"]["filename"].endswith("distributed/worker.py") for _, n in walk(tree))
    assert len(theirs.plot_data(tree)["left"]) == len(nativeprof.profile.plot_data(tree)["left"])


def test_tasks_are_distinguished(client):
    sort, nap = client.profile(key="sort_arrays"), client.profile(key="nap")
    assert count_of(sort, "sort_arrays") and count_of(nap, "nap")
    assert count_of(sort, "nap") == 0 and count_of(nap, "sort_arrays") == 0
    assert client.profile(key="unknown")["count"] == 0


def test_a_native_function_of_two_processes_is_one_node(client):
    workers = list(client.scheduler_info()["workers"])
    assert len(workers) == 2
    trees = [client.profile(workers=[worker]) for worker in workers]
    natives = [
        {tuple(n["identifier"] for n in path) for path, node in walk(tree) if ";<low-level>;" in node["identifier"]}
        for tree in trees
    ]
    shared = natives[0] & natives[1]
    assert shared, "no native function of both processes"
    merged = client.profile()
    for path in shared:
        node, counts = merged, 0
        for identifier in path:
            node = node["children"][identifier]
        for tree in trees:
            for identifier in path:
                tree = tree["children"][identifier]
            counts += tree["count"]
        assert node["count"] >= counts


def test_the_cluster_profile_is_saved_in_any_format(client, tmp_path):
    profile = nativeprof.dask.profile(client)
    assert any(row.module for row in profile.top(20)), "native functions"
    assert profile.to_dict()["count"] == profile.stats["taken"] > 0
    for name in ("c.svg", "c.json", "c.json.gz", "c.collapsed"):
        profile.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 500
    only = nativeprof.dask.profile(client, key="nap")
    assert 0 < only.stats["taken"] < profile.stats["taken"]


def test_the_worker_goes_on_by_itself_when_the_plugin_is_removed(client):
    client.unregister_worker_plugin("nativeprof")
    before = client.profile()["count"]
    client.gather(client.map(sort_arrays, range(2), pure=False))
    assert client.profile()["count"] > before


class Recorders:
    """Takes the place of the native recorders of a process, and knows which of them run."""

    def __init__(self):
        self.running, self.made = set(), 0
        # While it is not set, a recorder is being stopped.
        self.may_stop = threading.Event()

    def __call__(self, *_):
        recorder = SimpleNamespace(take=self.taken, stop=lambda: self.stop(recorder))
        self.made += 1
        self.running.add(id(recorder))
        return recorder

    def stop(self, recorder):
        assert self.may_stop.wait(60)
        self.running.discard(id(recorder))
        return self.taken()

    def taken(self):
        tree = {"count": 0, "children": {}, "nativeprof": {"start": 0.0, "duration": 0.0}}
        return SimpleNamespace(tree=lambda: json.dumps(tree).encode())


@pytest.fixture
def recorders(monkeypatch):
    recorders = Recorders()
    monkeypatch.setattr(nativeprof.dask._native, "SampleRecorder", recorders)
    return recorders


def worker_for(tasks):
    """What the plugin needs of a worker of this process; what it adds to the event loop is in `tasks`."""
    return SimpleNamespace(
        address="tcp://none",
        active_threads={},
        active_threads_lock=threading.Lock(),
        handlers={"profile": None, "profile_metadata": None},
        loop=SimpleNamespace(add_callback=lambda function: tasks.append(asyncio.ensure_future(function()))),
        periodic_callbacks={},
        status=SimpleNamespace(name="running"),
        cycle_profile=lambda: None,
    )


async def set_up():
    """A plugin in a worker, and what it adds to the event loop."""
    tasks = []
    plugin, worker = nativeprof.dask.WorkerProfiler(rate=100), worker_for(tasks)
    await plugin.setup(worker)
    return plugin, worker, tasks


async def begin_task(plugin, worker, ident):
    """A thread that is not known yet begins a task; returns when the plugin samples it, or waits for the lock to do so."""
    with worker.active_threads_lock:
        worker.active_threads[ident] = "task-1"
    while plugin._requested:
        await asyncio.sleep(0.001)


def test_no_recorder_is_started_while_the_plugin_is_removed(recorders):
    async def run():
        plugin, worker, tasks = await set_up()
        await begin_task(plugin, worker, 1)
        await asyncio.gather(*tasks)
        assert len(recorders.running) == recorders.made == 1
        # The plugin is removed, and a thread begins a task before that is done.
        removed = asyncio.ensure_future(plugin.teardown(worker))
        while not plugin._lock.locked():
            await asyncio.sleep(0)
        await begin_task(plugin, worker, 2)
        cycle = asyncio.ensure_future(plugin._end_cycle())
        await asyncio.sleep(0)
        recorders.may_stop.set()
        await asyncio.gather(removed, cycle, *tasks)
        assert recorders.made == 1

    asyncio.run(run())
    assert not recorders.running


def test_a_recorder_that_starts_before_the_plugin_is_removed_is_stopped(recorders):
    async def run():
        plugin, worker, tasks = await set_up()
        recorders.may_stop.set()
        async with plugin._lock:
            await begin_task(plugin, worker, 1)
            removed = asyncio.ensure_future(plugin.teardown(worker))
            await asyncio.sleep(0)
        await asyncio.gather(removed, *tasks)
        assert recorders.made == 1

    asyncio.run(run())
    assert not recorders.running


def test_a_plugin_whose_recorder_fails_is_removed_all_the_same(recorders):
    async def run():
        plugin, worker, tasks = await set_up()
        await begin_task(plugin, worker, 1)
        await asyncio.gather(*tasks)
        recorders.may_stop.set()
        recorders.taken = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await plugin.teardown(worker)
        assert type(worker.active_threads) is dict and worker.handlers["profile"] is None
        await plugin.teardown(worker)

    asyncio.run(run())
    assert not recorders.running and nativeprof.dask._profiler is None
