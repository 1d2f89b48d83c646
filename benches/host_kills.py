#!/usr/bin/env python3
"""Kills `nativeprof host` at random moments, and checks what it has left each time.

    sudo benches/host_kills.py [--times 100] [--nativeprof target/release/nativeprof] [--seed 1]

Segments are of 0.2 s, so that most kills come while names are read or a segment is written. After each kill, the segments that
were closed are the same bytes as before, all can be decompressed, and their sequences have no gap. After a restart there is no
rest of temporary files. Prints how many segments were missing: the time between the last segment's end and the kill.
"""

import argparse
import gzip
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from host_load import started

SEGMENT = 0.2
NAME = re.compile(r"(\d{10})-.*-(\d+)\.otlp\.gz")


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.otlp.gz"))}


def start(args, directory, pid, log):
    log.truncate(0)
    command = [args.nativeprof, "host", "--dir", directory, "--pid", str(pid), "-r", "200", "--segment", f"{SEGMENT}s"]
    return started(command, log)


def temporary(directory):
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


def check(holds, *message):
    if not holds:
        sys.exit(" ".join(map(str, message)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--nativeprof", default="target/release/nativeprof")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("sampling of other processes needs root: sudo benches/host_kills.py")
    moments = random.Random(args.seed)
    directory = Path(tempfile.mkdtemp(prefix="host-kills-"))
    history = directory / "history"
    busy = subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"])
    left, missing, before = 0, [], {}
    try:
        with open(directory / "log", "a") as log:
            for at in range(args.times):
                host = start(args, history, busy.pid, log)
                check(not temporary(history), "temporary files after restart", at, temporary(history))
                time.sleep(moments.uniform(0, 10 * SEGMENT))
                host.send_signal(signal.SIGKILL)
                killed = time.time()
                host.wait()
                left += bool(temporary(history))
                after = contents(history)
                for name, content in before.items():
                    check(after.get(name) == content, "changed:", name)
                for name in after.keys() - before.keys():
                    gzip.decompress(after[name])
                sequences = [int(NAME.fullmatch(name)[1]) for name in after]
                check(sequences == list(range(1, len(after) + 1)), "sequences:", sequences)
                if after.keys() - before.keys():
                    last = max(after)
                    missing.append(killed - (history / last).stat().st_mtime)
                before = after
    finally:
        busy.kill()
        shutil.rmtree(directory)
    print(f"kills                                    {args.times}")
    print(f"closed segments, none of them changed    {len(before)}")
    print(f"kills that left temporary files          {left}")
    print(f"time from the last segment to the kill   {max(missing, default=0):.2f} s at most, segments of {SEGMENT} s")


if __name__ == "__main__":
    main()
