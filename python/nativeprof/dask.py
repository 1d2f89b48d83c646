"""Profiles of Dask clusters with Python and native frames in true calling order.

::

    client.register_plugin(nativeprof.dask.WorkerProfiler())
    ...                                                  # compute
    nativeprof.dask.profile(client).save("cluster.svg")  # all workers in one profile

The plugin takes the place of the worker's own sampling: ``client.profile()``, ``performance_report`` and the profile page
of the dashboard show its stacks from then on. Dask carries them; nothing else listens or connects.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, cast

from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import key_split
from tornado.ioloop import PeriodicCallback

from . import _native
from .profile import create, merge
from .profiler import Profile

__all__ = ["WorkerProfiler", "profile"]

logger = logging.getLogger("nativeprof.dask")

Tree = dict[str, Any]
#: A stretch in which a thread ran tasks of a prefix: kernel's thread id, start, end (s since the epoch; None: running).
Span = list[Any]

# Frames of the worker itself end here; the task's own are further in.
_WORKER = "distributed/worker.py"
# The only one of this process.
_profiler: WorkerProfiler | None = None


class _ActiveThreads(dict[int, Any]):
    """``Worker.active_threads``, which keeps in mind when each entry was there. Changed under the worker's lock."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self._seen = seen
        self._spans: list[Span] = []
        self._open: dict[int, Span] = {}

    def __setitem__(self, ident: int, key: Any) -> None:
        super().__setitem__(ident, key)
        # Another key in one thread: a task that left while this one runs inside of it.
        self._close(ident)
        span = [threading.get_native_id(), time.time(), None, key_split(key)]
        self._open[ident] = span
        self._spans.append(span)
        self._seen(ident)

    def __delitem__(self, ident: int) -> None:
        super().__delitem__(ident)
        self._close(ident)

    def _close(self, ident: int) -> None:
        span = self._open.pop(ident, None)
        if span is not None:
            span[2] = time.time()

    def spans(self, since: float) -> list[Span]:
        """Those that ended after ``since``, or continue; earlier ones are forgotten."""
        self._spans = [span for span in self._spans if span[2] is None or span[2] >= since]
        return [list(span) for span in self._spans]


def _task_path(nodes: list[tuple[int, Tree]], place: int) -> list[Tree]:
    """The nodes of a stack from the task's own outermost function inward."""
    path = []
    while place:
        parent, node = nodes[place]
        if node["description"]["filename"].endswith(_WORKER):
            break
        path.append(node)
        place = parent
    return path[::-1]


def _count(tree: Tree, path: list[Tree], count: int) -> None:
    tree["count"] += count
    for node in path:
        identifier = node["identifier"]
        child = tree["children"].get(identifier)
        if child is None:
            child = tree["children"][identifier] = {
                "count": 0,
                "description": node["description"],
                "children": {},
                "identifier": identifier,
            }
        tree = child
        tree["count"] += count


def split(sampled: Tree, began: float, spans: Iterable[Span]) -> tuple[Tree, dict[str, Tree]]:
    """Sorts the samples of a profile by the tasks that ran when they were taken.

    :param sampled: a profile of this process with its timeline, as :meth:`nativeprof.Profile.to_dict` gives it.
    :param began: when it began (s since the epoch).
    :param spans: ``[thread id, start, end or None, prefix]`` (s since the epoch).
    :returns: the tree of all tasks, and one for each prefix; samples taken between tasks are in none.
    """
    nodes: list[tuple[int, Tree]] = []
    work: list[tuple[int, Tree]] = [(0, sampled)]
    while work:
        parent, node = work.pop()
        place = len(nodes)
        nodes.append((parent, node))
        work += [(place, child) for child in reversed(list(node["children"].values()))]
    of_thread: dict[int, list[Span]] = {}
    for span in spans:
        of_thread.setdefault(span[0], []).append(span)
    starts = {tid: [span[1] for span in of_thread[tid]] for tid in of_thread}

    timeline = sampled["nativeprof"]["timeline"]
    samples: Counter[tuple[int, str]] = Counter()
    for at, tid, place in zip(timeline["time"], timeline["tid"], timeline["node"]):
        if tid in starts:
            at = began + at / 1e9
            index = bisect.bisect_right(starts[tid], at) - 1
            if index >= 0:
                _, _, end, prefix = of_thread[tid][index]
                if end is None or at <= end:
                    samples[place, prefix] += 1
    everything = create()
    by_prefix: dict[str, Tree] = {}
    for (place, prefix), count in samples.items():
        path = _task_path(nodes, place)
        _count(everything, path, count)
        _count(by_prefix.setdefault(prefix, create()), path, count)
    return everything, by_prefix


class WorkerProfiler(WorkerPlugin):
    """Samples the threads that run tasks, Python and native frames in one snapshot, off the worker's event loop.

    :param rate: samples per second of each thread (Hz), by wall-clock time, so blocked tasks are sampled too. None: as often as
        the worker's own profiler (``distributed.worker.profile.interval``, 100 Hz).
    :param native: native frames too.

    There is one in a process: further workers in the same one keep Dask's own profiler, and say so in the log.
    """

    name = "nativeprof"
    idempotent = False

    def __init__(self, rate: int | None = None, native: bool = True) -> None:
        if rate is not None and not (isinstance(rate, int) and 1 <= rate <= 10_000):
            raise ValueError(f"rate must be between 1 and 10000 samples per second, got {rate!r}")
        self._rate, self._native = rate, native
        self._worker: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_rate": self._rate, "_native": self._native, "_worker": None}

    async def setup(self, worker: Any) -> None:
        """Called by Dask on each worker."""
        global _profiler
        if _profiler is not None:
            logger.warning("another worker of this process is sampled: %s keeps Dask's own profiler", worker.address)
            return
        import dask.config
        from dask.utils import parse_timedelta

        cycle = parse_timedelta(dask.config.get("distributed.worker.profile.cycle"), default="ms")
        if self._rate is None:
            interval = parse_timedelta(dask.config.get("distributed.worker.profile.interval"), default="ms")
            self._rate = min(max(round(1 / interval), 1), 10_000)
        _profiler = self
        self._worker = worker
        self._recorder: _native.SampleRecorder | None = None
        self._sampled: tuple[int, ...] = ()
        self._idents: dict[int, None] = {}
        self._lock = asyncio.Lock()
        self._before = time.time()
        self._began: float | None = None
        self._requested = False

        self._stopped = [pc for name in ("profile", "profile-cycle") if (pc := worker.periodic_callbacks.get(name))]
        for callback in self._stopped:
            callback.stop()
        with worker.active_threads_lock:
            worker.active_threads = _ActiveThreads(self._seen)
        self._handlers = {name: worker.handlers[name] for name in ("profile", "profile_metadata")}
        worker.handlers["profile"] = self._get_profile
        worker.handlers["profile_metadata"] = self._get_profile_metadata
        self._cycle = PeriodicCallback(self._end_cycle, cycle * 1000)
        self._cycle.start()

    async def teardown(self, worker: Any) -> None:
        """Called by Dask when the worker closes or the plugin is removed; the worker's own profiler continues."""
        global _profiler
        if self._worker is None:
            return
        self._cycle.stop()
        # To the end with the lock: what waits for it meanwhile sees that there is no worker any more.
        async with self._lock:
            try:
                await self._take(stop=True)
            finally:
                with worker.active_threads_lock:
                    worker.active_threads = dict(worker.active_threads)
                worker.handlers.update(self._handlers)
                if worker.status.name == "running":
                    for callback in self._stopped:
                        callback.start()
                self._worker = _profiler = None

    def _seen(self, ident: int) -> None:
        """A thread begins a task; called in that thread."""
        if ident not in self._idents:
            self._idents[ident] = None
            if not self._requested:
                self._requested = True
                self._worker.loop.add_callback(self._follow)

    async def _follow(self) -> None:
        """Samples the threads that are known by now."""
        await asyncio.sleep(0.02)  # the executor's other threads begin at the same time
        self._requested = False
        if self._worker is not None and self._sampled != tuple(self._idents):
            await self._gather(stop=True, go_on=True)

    async def _gather(self, stop: bool = False, go_on: bool = False) -> None:
        """Puts what was sampled into the worker's current trees; with ``go_on`` samples the threads that are known by now."""
        async with self._lock:
            if self._worker is None:
                return  # the plugin was removed meanwhile: nothing may start any more
            await self._take(stop)
            if go_on:
                idents = tuple(self._idents)
                rate = cast(int, self._rate)  # setup has chosen one
                make = lambda: _native.SampleRecorder(rate, self._native, True, list(idents), False)  # noqa: E731
                try:
                    self._recorder = await asyncio.to_thread(make)
                    self._sampled = idents
                except Exception as error:
                    logger.warning("cannot sample the threads of %s: %s", self._worker.address, error)

    async def _take(self, stop: bool) -> None:
        """As :meth:`_gather`, which holds the lock."""
        worker, recorder = self._worker, self._recorder
        if recorder is None:
            return
        if stop:
            self._recorder = None
        sampled, start, duration = await asyncio.to_thread(_taken, recorder, stop)
        # Each profile of a recording begins where the one before it ended.
        began = start if self._began is None else self._began
        self._began = None if stop else began + duration
        with worker.active_threads_lock:
            spans = worker.active_threads.spans(self._before)
        # Late samples may be in the next profile: spans are kept for a profile more.
        self._before = time.time()
        if sampled is not None:
            everything, by_prefix = split(sampled, began, spans)
            worker.profile_recent = merge(worker.profile_recent, everything)
            for prefix, tree in by_prefix.items():
                worker.profile_keys[prefix] = merge(worker.profile_keys[prefix], tree)

    async def _end_cycle(self) -> None:
        worker = self._worker  # which teardown forgets
        await self._gather()
        worker.cycle_profile()

    async def _get_profile(self, start: Any = None, stop: Any = None, key: Any = None, server: bool = False) -> Tree:
        worker = self._worker  # which teardown forgets
        if not server:
            await self._gather()
            past = worker.profile_history if key is None else [t for _, t in worker.profile_keys_history if key in t]
            if not past:
                # Dask gives the current tree with a history only.
                worker.cycle_profile()
        tree: Tree = await worker.get_profile(start=start, stop=stop, key=key, server=server)
        return tree

    async def _get_profile_metadata(self, start: float = 0, stop: float | None = None) -> dict[str, Any]:
        worker = self._worker  # which teardown forgets
        await self._gather()
        facts: dict[str, Any] = await worker.get_profile_metadata(start=start, stop=stop)
        return facts


def _taken(recorder: _native.SampleRecorder, stop: bool) -> tuple[Tree | None, float, float]:
    """What was sampled since the last time (None if nothing was), when that began, and how long it took."""
    native = recorder.stop() if stop else recorder.take()
    tree = json.loads(native.tree())
    facts = tree["nativeprof"]
    return tree if tree["count"] else None, facts["start"], facts["duration"]


def profile(
    client: Any,
    key: str | None = None,
    start: float | None = None,
    stop: float | None = None,
    workers: Iterable[str] | None = None,
) -> Any:
    """The merged profile of a cluster: a :class:`nativeprof.Profile`, to be saved in any format.

    A native function of several workers is one node: its address is that of its file.

    :param client: a :class:`distributed.Client`; an asynchronous one gives an awaitable.
    :param key: prefix of task names: their samples only.
    :param start: first time (s since the epoch). :param stop: last time.
    :param workers: addresses of workers; None: all.
    """

    async def fetch() -> Profile:
        chosen = None if workers is None else list(workers)
        tree = await client.scheduler.profile(
            key=key, workers=chosen, merge_workers=True, start=start, stop=stop, scheduler=False, server=False
        )
        return Profile(_native.read(json.dumps(_with_facts(tree)).encode()))

    return client.sync(fetch)


def _with_facts(tree: Tree) -> Tree:
    truncated, work = 0, deque([tree])
    while work:
        node = work.pop()
        if node["description"].get("kind") in ("truncated", "cut"):
            truncated += node["count"]
        work.extend(node["children"].values())
    quality = {"expected": tree["count"], "taken": tree["count"], "exact": tree["count"] - truncated, "repaired": 0}
    quality.update(partial=truncated, lost=0, reasons={})
    facts = {"format": 1, "version": _native.__version__, "event": "wall-clock", "backend": "signal", "quality": quality}
    return {**tree, "nativeprof": facts}
