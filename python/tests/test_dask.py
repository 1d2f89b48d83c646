"""The worker plugin on a real cluster: two worker processes that run numpy."""

import time

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
