#!/usr/bin/env python3
"""Do the shares of functions in a history depend on the rate, which a budget lowers and raises?

    sudo benches/host_rates.py [--runs 20] [--seconds 60] [--max-cpu 0.2%] [--nativeprof target/release/nativeprof]

Two recorders sample the same processes: one at 20 Hz, one with the budget. The processes call eight functions in random order, for
less than 2 ms each, so that samples are independent of each other. By run, the numbers of samples below each function are compared
with Pearson's chi-square test (two samples, seven degrees of freedom): a p of less than 0.001 in one of 20 runs would come by
chance in one of 50 trials. Samples x period of the second recorder are compared with the CPU time that the kernel has counted for
the processes' cgroup.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from host_load import Cgroup, History, started

FUNCTIONS = 8
PROGRAM = "\n".join(
    ["import random, sys"]
    + [f"def f{n}(): return sum(range({1000 * (n + 1)}))" for n in range(FUNCTIONS)]
    + [f"all = [{', '.join(f'f{n}' for n in range(FUNCTIONS))}]", "print(flush=True)", "while True: random.choice(all)()"]
)


def survival(x, degrees):
    """The probability that a chi-square of so many (an odd number of) degrees of freedom exceeds x."""
    p = math.erfc(math.sqrt(x / 2))
    term = math.sqrt(2 * x / math.pi) * math.exp(-x / 2)
    for k in range(3, degrees + 1, 2):
        p += term
        term *= x / k
    return p


def chi_square(a, b):
    all_a, all_b = sum(a), sum(b)
    total = 0
    for in_a, in_b in zip(a, b):
        for found, expected in ((in_a, (in_a + in_b) * all_a / (all_a + all_b)), (in_b, (in_a + in_b) * all_b / (all_a + all_b))):
            total += (found - expected) ** 2 / expected if expected else 0
    return survival(total, len(a) - 1)


def counts(args, directory):
    """Samples below each function."""
    command = [args.nativeprof, "report", directory, "--by", "function", "--value", "samples", "--json"]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)["rows"]
    found = {row["name"]: row["total"] for row in rows if re.fullmatch(r"f\d", row["name"])}
    return [found.get(f"f{n}", 0) for n in range(FUNCTIONS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-cpu", default="0.2%")
    parser.add_argument("--nativeprof", default="target/release/nativeprof")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("cgroups and sampling of all processes need root: sudo benches/host_rates.py")
    directory = Path(tempfile.mkdtemp(prefix="host-rates-"))
    group = Cgroup("nativeprof-rates")
    all_p = []
    try:
        for _ in range(2):
            busy = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, preexec_fn=group.enter)
            busy.stdout.readline()
        for run in range(args.runs):
            histories = [directory / f"{run}-{name}" for name in ("full", "budget")]
            logs = [open(f"{history}.log", "w+") for history in histories]
            hosts = []
            for history, log, more in zip(histories, logs, ([], ["--max-cpu", args.max_cpu])):
                command = [args.nativeprof, "host", "--dir", history, "--cgroup", group.path, "--segment", f"{args.seconds / 20}s"]
                hosts.append(started(command + more, log))
            used, began = group.cpu(), time.monotonic()
            time.sleep(args.seconds)
            used, elapsed = group.cpu() - used, time.monotonic() - began
            for host in reversed(hosts):
                host.send_signal(signal.SIGTERM)
            for host in hosts:
                host.wait()
            full, budget = (counts(args, history) for history in histories)
            p = chi_square(full, budget)
            all_p.append(p)
            history = History(histories[1])
            rates = " ".join(map(str, (int(rate) for rate in re.findall(r"rate_hz=(\d+)", Path(logs[1].name).read_text()))))
            print(
                f"run {run + 1}: {sum(full)} and {sum(budget)} samples, p {p:.4f}; "
                f"samples x period / CPU time {sum(history.time.values()) / used:.3f} of {used:.1f} s in {elapsed:.1f} s; rates {rates}",
                flush=True,
            )
    finally:
        group.remove()
        shutil.rmtree(directory)
    print(f"least p of {len(all_p)} runs: {min(all_p):.4f}")


if __name__ == "__main__":
    main()
