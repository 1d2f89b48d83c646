"""gevent: greenlets that compute in turns and wait for each other (`pip install gevent`).

    sudo nativeprof record --tasks --mode wall -o greenlets.html -- python3 examples/greenlets.py

Each greenlet has its own stack, below `[task: NAME]`; one that waits is shown with what it awaits.
"""
import sys

import gevent
from gevent.queue import Queue


def produce(queue):
    while True:
        queue.put(sorted(range(3000), key=str))
        gevent.sleep(0)


def consume(queue):
    while True:
        sum(n * n for n in queue.get())


def main(seconds):
    queue = Queue(4)
    workers = [gevent.spawn(produce, queue), gevent.spawn(consume, queue)]
    for worker, name in zip(workers, ["producer", "consumer"]):
        worker.name = name
    gevent.sleep(seconds)
    gevent.killall(workers)


main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
