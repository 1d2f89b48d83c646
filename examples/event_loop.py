"""asyncio: three tasks, one of which blocks the event loop now and then.

    sudo nativeprof record --tasks --mode wall --lag 50ms -o event_loop.html -- python3 examples/event_loop.py

Samples lie below `[task: NAME]`, suspended ones with what they await; the report lists what blocked the loop.
"""
import asyncio
import sys
import time


async def fetch():
    while True:
        await asyncio.sleep(0.02)


async def compute():
    while True:
        sum(n * n for n in range(20_000))
        await asyncio.sleep(0)


def parse():
    end = time.process_time() + 0.1
    while time.process_time() < end:
        sorted(range(9999), key=str)


async def report():
    while True:
        await asyncio.sleep(0.2)
        parse()


async def main(seconds):
    tasks = []
    for work in [fetch, compute, report]:
        tasks.append(asyncio.create_task(work()))
        tasks[-1].set_name(work.__name__)
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0))
