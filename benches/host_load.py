#!/usr/bin/env python3
"""Load L for `nativeprof host`, and what it costs and finds under it.

    sudo benches/host_load.py [--seconds 60] [--nativeprof target/release/nativeprof] [--json FILE] [-- OPTIONS of host]

200 processes (CPython of several versions and native code) keep some 1.15 cores busy, and ten short-lived ones a second another
0.35: half `/bin/true`, half `python -c`. They run in a cgroup of their own, and nativeprof in another one, so that the kernel
says what each has used, with all that has exited. Prints a table of what was measured; there are no limits to pass.

CPU time is given with the first two segments and without them: files are read and names found for the first time then.
"""

import argparse
import collections
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = 200
# Of these, so many share a core; the others share half a core.
HEAVY = 10
HEAVY_CORES = 0.75
LIGHT_CORES = 0.4
SHORT_PER_SECOND = 10

WORKER = r"""
import resource, signal, sys, time
share, period, ready = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
stop = False
def end(*_):
    global stop
    stop = True
signal.signal(signal.SIGTERM, end)
def spin(until):
    n = 0
    while time.thread_time() < until:
        n += sum(range(200))
    return n
def request(budget):
    return spin(time.thread_time() + budget)
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
sys.stdout.write("ready\n"); sys.stdout.flush()
sys.stdin.readline()
begin = used()
next = time.monotonic() + period * (hash(str(share) + str(ready)) % 1000) / 1000
while not stop:
    left = next - time.monotonic()
    if left > 0:
        try:
            time.sleep(left)
        except InterruptedError:
            pass
    if not stop:
        request(share * period)
    next += period
    next = max(next, time.monotonic() - 5 * period)
sys.stdout.write(f"{used() - begin}\n"); sys.stdout.flush()
"""

NATIVE = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
static volatile sig_atomic_t stop;
static void end(int signal) { (void)signal; stop = 1; }
static double now(clockid_t clock) { struct timespec t; clock_gettime(clock, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static double used(void)
{
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}
static __attribute__((noinline)) unsigned long spin(double until)
{
	volatile unsigned long n = 0;
	while (now(CLOCK_THREAD_CPUTIME_ID) < until)
		for (int i = 0; i < 1000; i++)
			n += i * n;
	return n;
}
static __attribute__((noinline)) unsigned long request(double budget) { return spin(now(CLOCK_THREAD_CPUTIME_ID) + budget) + 1; }
int main(int argc, char **argv)
{
	double share = atof(argv[1]), period = atof(argv[2]), begin, next;
	char line[16];
	if (argc < 4)
		return 2;
	signal(SIGTERM, end);
	puts("ready");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return 1;
	begin = used();
	next = now(CLOCK_MONOTONIC) + period * (atoi(argv[3]) * 37 % 1000) / 1000;
	while (!stop) {
		double left = next - now(CLOCK_MONOTONIC);
		if (left > 0) {
			struct timespec t = { left, (left - (long)left) * 1e9 };
			nanosleep(&t, 0);
		}
		if (!stop)
			request(share * period);
		next += period;
		if (next < now(CLOCK_MONOTONIC) - 5 * period)
			next = now(CLOCK_MONOTONIC) - 5 * period;
	}
	printf("%f\n", used() - begin);
	return 0;
}
"""


class Cgroup:
    """A cgroup of version 2."""

    def __init__(self, name):
        for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            if os.path.exists(f"{mount}/cgroup.procs") and os.path.exists(f"{mount}/cgroup.controllers"):
                self.path = Path(mount) / name
                self.path.mkdir(exist_ok=True)
                return
        sys.exit("there is no cgroup v2 hierarchy: mount one at /sys/fs/cgroup/unified")

    def enter(self):
        """For `preexec_fn`."""
        (self.path / "cgroup.procs").write_text("0")

    def cpu(self):
        """CPU seconds of all its processes so far."""
        words = dict(line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        return int(words["usage_usec"]) * 1e-6

    def pids(self):
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def remove(self):
        for _ in range(100):
            for pid in self.pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def interpreters():
    """Pythons of 3.11 to 3.13, or the one that runs this."""
    found = [path for minor in (11, 12, 13) for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}*/bin/python"))[:1]]
    return [str(path) for path in found] or [sys.executable]


class Load:
    """The processes of the load, in their cgroup."""

    def __init__(self, group, directory):
        self.group, self.directory, self.workers, self.short = group, directory, [], []
        source, native = directory / "native.c", directory / "native"
        source.write_text(NATIVE)
        subprocess.run(["cc", "-O1", "-g", "-o", native, source], check=True)
        script = directory / "worker.py"
        script.write_text(WORKER)
        self.pythons = interpreters()
        kinds = [[python, str(script)] for python in self.pythons] + [[str(native)]]
        for at in range(PROCESSES):
            share = HEAVY_CORES / HEAVY if at < HEAVY else LIGHT_CORES / (PROCESSES - HEAVY)
            period = 0.1 if at < HEAVY else 2.0
            self.workers.append(self.start(kinds[at % len(kinds)] + [str(share), str(period), str(at)], subprocess.PIPE))
        for worker in self.workers:
            worker.stdout.readline()

    def start(self, command, pipe):
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, preexec_fn=self.group.enter, text=bool(pipe)
        )

    def begin(self):
        for worker in self.workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()

    def start_short(self, at):
        code = "import json; sum(len(json.dumps(list(range(n)))) for n in range(100))"
        python = self.pythons[at % len(self.pythons)]
        self.short.append(self.start(["/bin/true"] if at % 2 else [python, "-c", code], subprocess.DEVNULL))
        self.short = [process for process in self.short if process.poll() is None]

    def end(self):
        """CPU seconds by pid of the long-lived processes."""
        for process in self.short:
            process.wait()
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        return {worker.pid: float(worker.stdout.readline() or 0) for worker in self.workers}


def started(command, log, **more):
    """The process of `nativeprof host` once it samples, with its messages in the file `log`. `more`: for `Popen`."""
    host = subprocess.Popen(command, stderr=log, **more)
    while "event=started" not in Path(log.name).read_text():
        if host.poll() is not None:
            sys.exit("nativeprof has ended:\n" + Path(log.name).read_text())
        time.sleep(0.01)
    return host


def memory(pids):
    """PSS of processes, bytes."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            pass
    return total


def maps_of_bpf(pid):
    """Bytes that BPF maps and rings of a process have locked."""
    total = 0
    for fd in Path(f"/proc/{pid}/fdinfo").glob("*"):
        try:
            for line in fd.read_text().splitlines():
                if line.startswith("memlock:"):
                    total += int(line.split()[1])
        except OSError:
            pass
    return total


def fields(data):
    """Numbers and values of the fields of a protocol buffer message: integers, or bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            yield key >> 3, int.from_bytes(data[at : at + size], "little")
            at += size
        else:
            size = varint()
            yield key >> 3, data[at : at + size]
            at += size


def one(data, number, default=0):
    return next((value for field, value in fields(data) if field == number), default)


def packed(data, number):
    """A repeated integer field."""
    numbers = []
    for field, value in fields(data):
        if field == number:
            if isinstance(value, int):
                numbers.append(value)
            else:
                numbers += [v for _, v in fields(b"".join(b"\x08" + part for part in varints(value)))]
    return numbers


def varints(data):
    begin = 0
    for at, byte in enumerate(data):
        if byte < 128:
            yield data[begin : at + 1]
            begin = at + 1


class History:
    """What the segments of a history say, read without nativeprof: opentelemetry-proto 1.11.0, profiles.proto."""

    def __init__(self, directory):
        self.samples = collections.Counter()  # by pid
        self.time = collections.Counter()  # by pid, seconds
        self.quality = collections.Counter()  # samples by quality
        self.rates = collections.Counter()
        for path in sorted(directory.glob("*.otlp.gz")):
            self.add(gzip.decompress(path.read_bytes()))

    def add(self, data):
        dictionary = one(data, 2, b"")
        strings = [value.decode() for field, value in fields(dictionary) if field == 5]
        pids, numbers = {}, {}
        for at, attribute in enumerate(value for field, value in fields(dictionary) if field == 6):
            key, value = strings[one(attribute, 1)], one(attribute, 2, b"")
            if key == "process.pid":
                pids[at] = one(value, 3)
            elif key.startswith("nativeprof.quality.") and not key.endswith(".reasons"):
                numbers[at] = (key.removeprefix("nativeprof.quality."), one(value, 3))
        for field, resource in fields(data):
            if field != 1:
                continue
            for field, scope in fields(resource):
                if field == 2:
                    for field, profile in fields(scope):
                        if field == 2:
                            self.add_profile(profile, strings, pids, numbers)

    def add_profile(self, profile, strings, pids, numbers):
        for at in packed(profile, 11):
            if at in numbers:
                self.quality[numbers[at][0]] += numbers[at][1]
        if strings[one(one(profile, 1, b""), 1)] != "samples":
            return
        period = one(profile, 6) * 1e-9
        self.rates[round(1 / period, 2) if period else 0] += 1
        for field, sample in fields(profile):
            if field == 2:
                values = packed(sample, 4)
                times = sum(len(value) // 8 for field, value in fields(sample) if field == 5 and not isinstance(value, int))
                count = sum(values) if values else times
                pid = next((pids[at] for at in packed(sample, 2) if at in pids), 0)
                self.samples[pid] += count
                self.time[pid] += count * period


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--segment", type=float, default=None, help="length of a segment [default: 60, less in short runs]")
    parser.add_argument("--nativeprof", default="target/release/nativeprof")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--keep", type=Path, help="keep the history here")
    parser.add_argument("host", nargs="*", help="further options of `nativeprof host`")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("cgroups and sampling of all processes need root: sudo benches/host_load.py")
    segment = args.segment or min(60, args.seconds / 6)
    directory = Path(tempfile.mkdtemp(prefix="host-load-"))
    directory.chmod(0o755)
    history = directory / "history"
    load_group, own_group = Cgroup("nativeprof-load"), Cgroup("nativeprof-own")
    host = None
    try:
        load = Load(load_group, directory)
        command = [args.nativeprof, "host", "--dir", str(history), "--cgroup", str(load_group.path), "--segment", f"{segment}s"]
        log = open(directory / "log", "w")
        host = started(command + args.host, log, preexec_fn=own_group.enter)
        load.begin()
        load_before, own_before, began = load_group.cpu(), own_group.cpu(), time.monotonic()
        warm = None
        pss, short = [], 0
        while (elapsed := time.monotonic() - began) < args.seconds:
            while short < elapsed * SHORT_PER_SECOND:
                load.start_short(short)
                short += 1
            if warm is None and elapsed > 2 * segment:
                warm = (elapsed, own_group.cpu())
            if not pss or elapsed - pss[-1][0] > max(1, args.seconds / 60):
                pss.append((elapsed, memory(own_group.pids())))
            time.sleep(0.02)
        elapsed = time.monotonic() - began
        own = own_group.cpu()
        bpf = maps_of_bpf(host.pid)
        used_by = load.end()
        load_used = load_group.cpu() - load_before
        host.send_signal(signal.SIGTERM)
        host.wait()
        log_text = (directory / "log").read_text()
        judge(args, History(history), dict(
            elapsed=elapsed, own=own - own_before, load=load_used, pss=pss, bpf_maps=bpf, used_by=used_by, short=short,
            warm_share=(own - warm[1]) / (elapsed - warm[0]) if warm else None,
            size=sum(f.stat().st_size for f in history.glob("*.gz")), log=log_text,
        ))
    finally:
        if host and host.poll() is None:
            host.kill()
        load_group.remove()
        own_group.remove()
        if args.keep:
            shutil.copytree(history, args.keep, dirs_exist_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def judge(args, history, seen):
    taken, time_taken = sum(history.samples.values()), sum(history.time.values())
    used_by = seen["used_by"]
    short_cpu = seen["load"] - sum(used_by.values())
    short_time = time_taken - sum(history.time[pid] for pid in used_by)
    deviation = lambda pid: abs(history.time[pid] / used_by[pid] - 1) * history.samples[pid] ** 0.5
    worst = max((deviation(pid) for pid in used_by if history.samples[pid] >= 1000), default=None)
    figures = {
        "seconds": seen["elapsed"],
        "own CPU, % of a core": 100 * seen["own"] / seen["elapsed"],
        "own CPU after two segments, % of a core": seen["warm_share"] and 100 * seen["warm_share"],
        "CPU per sample, us": 1e6 * seen["own"] / max(taken, 1),
        "PSS at the end, MB": seen["pss"][-1][1] / 1e6,
        "PSS at most, MB": max(size for _, size in seen["pss"]) / 1e6,
        "PSS growth in the second half, MB": (seen["pss"][-1][1] - seen["pss"][len(seen["pss"]) // 2][1]) / 1e6,
        "BPF maps and rings, MB": seen["bpf_maps"] / 1e6,
        "load, cores": seen["load"] / seen["elapsed"],
        "samples": taken,
        "samples x period / CPU time of the load": time_taken / seen["load"],
        "short-lived processes": seen["short"],
        "their samples x period / CPU time": short_time / max(short_cpu, 1e-9),
        "worst process with 1,000 samples, standard deviations": worst,
        **{f"{key}, % of samples": 100 * value / max(taken, 1) for key, value in sorted(history.quality.items())},
        "rates of profiles, Hz": dict(history.rates),
        "history, KB": seen["size"] / 1e3,
    }
    for name, value in figures.items():
        print(f"{name:<56} {value:.3f}" if isinstance(value, float) else f"{name:<56} {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
