#!/usr/bin/env python3
"""What .ci/kernels runs in each machine, as root: uses nativeprof as people do and compares with what must come out.

Prints a line `RESULT ok|bad NAME DETAIL` for each check.
"""

import base64
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback

NATIVEPROF = "/test/nativeprof"
TARGET = [sys.executable, "/test/tape_target.py"]
SECONDS = 8
IS_AARCH64 = os.uname().machine == "aarch64"
# The kernel's library of fast system calls has no call frame tables on aarch64: stacks that begin there are repaired, which
# counts as exact here.
NO_VDSO_TABLES = IS_AARCH64
# For a recording that starts it: the profiler waits until its command ends.
ENDING = [
    sys.executable,
    "-c",
    f"""
import os, runpy, sys, threading
sys.path.insert(0, "/test")
threading.Timer({SECONDS}, os._exit, [0]).start()
runpy.run_path("/test/tape_target.py")
""",
]

# Functions of tape_target.py and tapeext.c, and who may call them. Interpreter frames in between are not shown.
CALLERS = {
    "once": {"main", "worker"},
    "nested": {"once"},
    "inner": {"tape_apply"},
    "callback": {"tape_apply"},
    "generators": {"once"},
    "numbers": {"tape_drain", "generators"},
    "exceptions": {"once"},
    "thrower": {"tape_apply"},
    "handler": {"exceptions"},
    "classes": {"once"},
    "recursion": {"once"},
    "down": {"recursion", "down"},
    "leaf": {"callback", "numbers", "thrower", "handler", "__init__", "__lt__", "down"},
    "pure": {"callback", "numbers"},
    "tape_call": {"nested", "inner", "exceptions"},
    "tape_apply": {"tape_call", "tape_apply"},
    "tape_drain": {"generators"},
    "tape_spend": {"leaf"},
    "tape_work": {"tape_spend"},
    "tape_aligned": {"tape_spend"},
    "tape_spin": {"tape_work", "tape_aligned"},
}

KERNEL_TIME = """
with open("/dev/zero", "rb", buffering=0) as zeros:
    room = bytearray(1 << 20)
    while True:
        zeros.readinto(room)
"""

FAMILY = """
import os, time
def in_child():
    end = time.process_time() + 4
    while time.process_time() < end:
        sum(range(1000))
children = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        in_child()
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""

# With NumPy of its wheel, and the OpenBLAS in there; prints the name of the CPU that its kernels are for.
MULTIPLY = """
import ctypes, glob, numpy
library = ctypes.CDLL(glob.glob("/test/numpy/numpy.libs/libscipy_openblas64_*")[0])
core = library.scipy_openblas_get_corename64_
core.restype = ctypes.c_char_p
a = numpy.random.default_rng(1).random((300, 300))
def multiply():
    print(core().decode(), flush=True)
    while True:
        a @ a
multiply()
"""
# CPUs whose kernels the emulator can run, by OpenBLAS's names.
CORES = {
    "aarch64": ["ARMV8", "CORTEXA57", "THUNDERX2T99", "NEOVERSEN1", "NEOVERSEV1"],
    "x86_64": ["Haswell"],
}

# Functions of known_waits.py, and the kinds of waits that each has in addition to waits for the GIL.
WAITS = {
    "w_sleep": {"sleep"},
    "w_short": {"sleep"},
    "w_hold": {"sleep", "lock"},
    "w_lock": {"lock"},
    "w_never": {"lock"},
    "w_read": {"read pipe"},
    "w_poll": {"read pipe"},
    "w_feed": {"sleep"},
    "w_spin_one": set(),
    "w_spin_two": set(),
}

MIB = 1 << 20
PAGE = 4096
# Functions of known_memory.py, and what each does, in MiB: grown, of that resident in the end, given back.
MEMORY = {
    "m_kept": (64, 64, 0),
    "m_heap": (32, 16, 16),
    "m_bytes": (48, 32, 16),
    "m_unmapped": (16, 0, 16),
    "m_dropped": (32, 16, 16),
    "m_again": (64, 0, 64),
    "m_shared": (16, 16, 0),
    "m_file": (16, 16, 0),
    "m_copied": (32, 16, 16),
    "m_copied_shared": (32, 16, 16),
    "m_thread": (32, 32, 0),
    "m_child": (16, 16, 0),
}
MEMORY_INTERVAL = 64 << 10
# Sampled blocks that each function of published.c publishes. What these stand for: bytes, blocks, and bytes that are live in
# the end.
PUBLISHED_BLOCKS = 100
PUBLISHED = {
    "kept": (1_004_950, 1004.95, 1_004_950),
    "freed": (600_000, 300, 0),
    "half_freed": (450_000, 1500, 225_000),
    "with_constants": (52_428_800, 819_200, 52_428_800),
    "same_address": (500_000, 10_000, 5000),
    "by_thread": (700_000, 1000, 700_000),
}


def run(*command, expected=0, **more):
    """Runs nativeprof; its output and messages as one text."""
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300, **more
    )
    assert ran.returncode == expected, f"exit code {ran.returncode}: {ran.stdout[-2000:]}"
    return ran.stdout


def numbers(text):
    """Samples, expected samples, lost samples, percent exact of a recording's summary."""
    samples = re.search(r"(\d+) samples in [\d.]+ s \((?:(\d+) expected, )?(\d+) lost", text)
    exact = re.search(r"exact (\d+) \([\d.]+ %\), repaired (\d+)", text)
    assert samples and exact, text[-2000:]
    right = int(exact[1]) + (int(exact[2]) if NO_VDSO_TABLES else 0)
    return int(samples[1]), int(samples[2] or 0), int(samples[3]), round(100 * right / max(1, int(samples[1])), 2)


def until_sampling(profiler):
    """Waits until nativeprof samples; what it has said by then."""
    said = []
    for line in profiler.stderr:
        said.append(line)
        if "sampling" in line:
            return "".join(said)
    raise AssertionError(" ".join("".join(said).split()))


# Least percent exact. Of a command that is sampled from its first instruction on, some ticks pass under emulation before
# nativeprof has read the interpreter.
EXACT, EXACT_FROM_START = 99.5, 99.0


class Unlikely(Exception):
    """What may go wrong by chance: an emulated machine that has to wait for its host's CPU misses ticks and wake-ups."""


# Times that such a check is made.
TRIES = 3


def accuracy(text, least):
    """Are the samples complete and enough of them? Returns the cell of the table."""
    samples, due, lost, exact = numbers(text)
    seen = f"{samples} samples, {due} due, {lost} lost, {exact} % exact"
    if exact < 100:
        print(text, flush=True)
    for names, count in stacks("/tmp/out.json"):
        if any(name.startswith("[truncated") for name in names):
            print("incomplete:", count, *names[-12:], flush=True)
    assert samples >= 50 and exact >= least, f"{seen}: {text}"
    # With a hardware counter it is not known how many are due.
    if due and not 0.5 * due <= samples + lost <= 1.2 * due:
        raise Unlikely(f"{seen}: {text}")
    return f"{exact:.2f} % of {samples}, {lost} lost"


KERNEL_MARK = "_[k]"


def stacks(profile, *options, with_mark=False):
    """Names of the frames of each stack, outermost first, and how often it was seen. `with_mark`: those of the kernel end
    with a mark."""
    text = run(NATIVEPROF, "export", profile, "-f", "collapsed", "-o", "-", *options)
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        if count.isdigit():
            mark = "" if with_mark else KERNEL_MARK
            yield [frame.split(" (")[0].removesuffix(mark) for frame in frames.split(";")], int(count)


def impossible(profile):
    """Samples whose stack is not one that the program can have, and one of these stacks."""
    torn, example = 0, ""
    for names, count in stacks(profile):
        for caller, name in zip(names, names[1:]):
            if name in CALLERS and caller in CALLERS | {"main": 0, "worker": 0, "__init__": 0, "__lt__": 0}:
                if caller not in CALLERS[name]:
                    torn, example = torn + count, f"{caller} > {name}"
                    break
    return torn, example


def verify(text, least, profile="/tmp/out.json"):
    detail = accuracy(text, least)
    torn, example = impossible(profile)
    assert torn == 0, f"{torn} impossible stacks: {example}"
    names = {name for stack, _ in stacks(profile) for name in stack}
    assert {"leaf", "tape_spend", "tape_spin", "down"} <= names, sorted(names)
    return detail


def started(code):
    return subprocess.Popen(code if isinstance(code, list) else [sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def doctor():
    text = run(NATIVEPROF, "doctor")
    assert "Sampling works." in text, text
    old = "the BPF program for Linux 5.8" in text
    print(text, flush=True)
    return "older BPF program" if old else "current BPF program"


def doctor_as_user():
    text = run("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", NATIVEPROF, "doctor")
    assert "does not have CAP_BPF" in text and "Sampling works with ptrace only." in text, text
    return "says what is missing"


def launch():
    text = run(NATIVEPROF, "record", "--backend", "ebpf", "-o", "/tmp/out.json", "--", *ENDING)
    return verify(text, EXACT_FROM_START)


def attached(*options):
    target = started(TARGET)
    try:
        time.sleep(1)
        command = [NATIVEPROF, "attach", str(target.pid), "--backend", "ebpf", "-d", str(SECONDS), "-o", "/tmp/out.json"]
        text = run(*command, *options)
    finally:
        target.kill()
        target.wait()
    return verify(text, EXACT)


def attach():
    # On aarch64 return addresses of the extension are signed, where the CPU does that.
    assert not IS_AARCH64 or "paca" in open("/proc/cpuinfo").read(), "the CPU signs no return addresses"
    return attached()


def clock():
    return attached("--event", "cpu-clock")


def cycles():
    """Of the emulated CPUs only that of aarch64 counts cycles."""
    if IS_AARCH64:
        return attached("--event", "cycles")
    text = run(NATIVEPROF, "record", "--event", "cycles", "-o", "/tmp/out.json", "--", "true", expected=125)
    assert "hardware event `cycles` is not available" in text, text
    return "no hardware counters, says so"


def numpy():
    """Multiplies matrices by the kernels, mostly assembler without tables, that OpenBLAS has for several CPUs."""
    found = []
    for core in CORES[os.uname().machine]:
        environment = {"PYTHONPATH": "/test/numpy", "OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": core}
        target = subprocess.Popen([sys.executable, "-c", MULTIPLY], stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        try:
            chosen = target.stdout.readline().strip()
            assert chosen.lower() == core.lower(), f"OpenBLAS runs the kernels for {chosen}, not for {core}"
            command = [NATIVEPROF, "attach", str(target.pid), "--backend", "ebpf", "-r", "199", "-d", "5"]
            text = run(*command, "-o", "/tmp/out.json")
        finally:
            target.kill()
            target.wait()
        summary = re.search(r"exact (\d+) \([\d.]+ %\), repaired (\d+)", text)
        samples, complete = numbers(text)[0], int(summary[1]) + int(summary[2])
        whole = 0
        for names, count in stacks("/tmp/out.json"):
            good = names[0] == "_start" and "multiply" in names and not any(name.startswith("[truncated") for name in names)
            whole += count if good else 0
            print("numpy:", core, count, *names, flush=True)
        assert samples >= 50 and complete >= 0.995 * samples and whole >= 0.995 * samples, (
            f"{core}: {complete} complete, {whole} from the start through `multiply`, of {samples}: {text}"
        )
        found.append(f"{core} {100 * min(complete, whole) / samples:.1f} % of {samples}")
    return "; ".join(found)


def wheel():
    """The command of the wheel, and its package in a program."""
    command = glob.glob("/test/wheel/*.data/scripts/nativeprof")
    if not command:
        return "none was built"
    environment = os.environ | {"PYTHONPATH": "/test/wheel"}
    run(command[0], "record", "-o", "/tmp/out.json", "--", sys.executable, "-c", "sum(i * i for i in range(3_000_000))")
    assert any("<genexpr>" in names for names, _ in stacks("/tmp/out.json"))
    code = """
import nativeprof
with nativeprof.Profiler() as profiler:
    sum(i * i for i in range(3_000_000))
profiler.profile.save("/tmp/inside.json")
"""
    run(sys.executable, "-c", code, env=environment)
    assert any("<genexpr>" in names for names, _ in stacks("/tmp/inside.json"))
    return "command and package"


def kernel():
    target = started(KERNEL_TIME)
    try:
        time.sleep(1)
        command = [NATIVEPROF, "attach", str(target.pid), "--backend", "ebpf", "--kernel", "-d", str(SECONDS)]
        text = run(*command, "-o", "/tmp/out.json")
    finally:
        target.kill()
        target.wait()
    samples, _, _, exact = numbers(text)
    assert samples >= 50 and exact >= EXACT, f"{samples} samples, {exact} % exact: {text}"
    # How many are within the kernel is a matter of the emulated machine: an interrupt by a counter may come when the call
    # has returned.
    inside = named = 0
    for names, count in stacks("/tmp/out.json", with_mark=True):
        inside += count if names[-1].endswith(KERNEL_MARK) else 0
        if "vfs_read" + KERNEL_MARK in names:
            named += count
        else:
            print("not below vfs_read:", count, *names[-12:], flush=True)
    assert inside >= 0.5 * samples and named >= 0.95 * inside, f"{inside} of {samples} in the kernel, {named} below vfs_read: {text}"
    return f"{100 * named // inside} % of {inside} below vfs_read"


def subprocesses():
    command = [NATIVEPROF, "record", "--backend", "ebpf", "--subprocesses", "-o", "/tmp/out.json"]
    text = run(*command, "--", sys.executable, "-c", FAMILY)
    detail = accuracy(text, EXACT_FROM_START)
    samples = numbers(text)[0]
    found = sum(count for names, count in stacks("/tmp/out.json") if "in_child" in names)
    assert found >= 0.5 * samples, f"{found} of {samples} in children: {text}"
    return detail


def ptrace():
    text = run(NATIVEPROF, "record", "--backend", "ptrace", "-o", "/tmp/out.json", "--", *ENDING)
    samples, _, _, exact = numbers(text)
    assert samples >= 50 and exact >= EXACT, f"{samples} samples, {exact} % exact: {text}"
    torn, example = impossible("/tmp/out.json")
    assert torn == 0, f"{torn} impossible stacks: {example}"
    return f"{exact:.2f} % of {samples}"


def times(profile, role):
    """Wall time below a function of the profile by what its thread did, ns: cpu, runnable, or the kind of wait."""
    found = {}
    for names, spent in stacks(profile, "--value", "wall"):
        if role in names:
            inner = names[names.index(role) + 1 :]
            states = [name.strip("[]").removeprefix("waiting: ") for name in inner if re.match(r"\[(runnable|waiting)", name)]
            state = states[0] if states else "cpu"
            found[state] = found.get(state, 0) + spent
    return found


def wall():
    """Does the account of each thread agree with the kernel's, and is each wait below the function that waits?"""
    command = [NATIVEPROF, "record", "--backend", "ebpf", "--mode", "wall", "-r", "49", "-o", "/tmp/out.json", "--"]
    text = run(*command, sys.executable, "/test/known_waits.py", str(SECONDS), "3")
    truth = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    worst, wrong = {"wall": 0, "cpu": 0, "runnable": 0, "waiting": 0}, []
    for role, kinds in WAITS.items():
        found, true = times("/tmp/out.json", role), truth[role]
        parts = {part: found.get(part, 0) for part in ("cpu", "runnable")}
        parts["wall"] = sum(found.values())
        parts["waiting"] = parts["wall"] - parts["cpu"] - parts["runnable"]
        for part, spent in parts.items():
            worst[part] = max(worst[part], abs(spent - true[part]) / true["wall"])
        percent = {kind: f"{100 * spent / true['wall']:.1f}" for kind, spent in sorted((found | parts).items())}
        print("account:", role, percent, "kernel:", true, flush=True)
        other = sum(spent for kind, spent in found.items() if kind not in kinds | {"cpu", "runnable", "gil"})
        if other > 0.01 * true["wall"] or (kinds and not kinds & found.keys()):
            wrong.append(f"{role}: {percent}")
    detail = ", ".join(f"{part} {100 * error:.1f} %" for part, error in worst.items())
    if wrong:
        raise Unlikely(f"kinds of waits: {wrong}")
    if worst["wall"] >= 0.03 or max(worst.values()) >= 0.06:
        raise Unlikely(f"the account is off by: {detail}")
    hook = re.search(r"taken at switch-in, by an? (kprobe|task work)", run(NATIVEPROF, "doctor"))
    return f"{hook[1]}; off by {detail}"


def rss():
    """Is growth less what was given back what the kernel says of the process, and does it belong to the functions that did so?"""
    found = re.search(r"resident memory +(.*)", run(NATIVEPROF, "doctor"))
    assert found and "kmem:rss_stat" in found[1], f"resident memory: {found[1] if found else 'doctor does not mention it'}"
    # What is in memory in place of a disk holds pages that the kernel does not count as those of files; this does.
    os.makedirs("/mnt/files", exist_ok=True)
    subprocess.run(["mount", "-t", "ramfs", "files", "/mnt/files"], check=True)
    try:
        detail = memory_of_process()
        return f"{detail}; {memory_from_start()}"
    finally:
        subprocess.run(["umount", "/mnt/files"], check=True)


def recorded_work(command, ready, *words):
    """Records a process from when it says that it is ready until it has answered a line, into /tmp/out.json. The words for
    nativeprof go on with its PID. What nativeprof has said, and the answer."""
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout.readline() == f"{ready}\n"
        ours = [NATIVEPROF, *words, str(target.pid), "-o", "/tmp/out.json"]
        profiler = subprocess.Popen(ours, stderr=subprocess.PIPE, text=True)
        text = until_sampling(profiler)
        target.stdin.write("go\n")
        target.stdin.flush()
        answer = target.stdout.readline()
        profiler.send_signal(signal.SIGINT)
        text += profiler.stderr.read()
        assert profiler.wait() == 0, text
        return text, answer
    finally:
        target.kill()
        target.wait()


KNOWN_MEMORY = [sys.executable, "-W", "ignore", "/test/known_memory.py", "/mnt/files", "/tmp"]
RECORD_MEMORY = ["record", "--mode", "rss", "--interval", str(MEMORY_INTERVAL), "--max-overhead", "100"]


def memory_of_process():
    """Records a process and its child, which say what they have while they rest before and after."""
    text, said = recorded_work(KNOWN_MEMORY, "ready", *RECORD_MEMORY, "--subprocesses", "--pid")
    truth = json.loads(said)
    print(text, flush=True)
    accounts = memory_accounts("/tmp/out.json")
    own, child = accounts[truth["pid"]], accounts[truth["child_pid"]]
    before, after = truth["before"], truth["after"]
    worst = 0
    for kinds, name in [
        (["anonymous", "file", "shared"], "Rss"),
        (["anonymous"], "Anonymous"),
        (["file"], "RssFile"),
        (["shared"], "RssShmem"),
    ]:
        worst = max(worst, compare_memory(f"process {name}", own, kinds, after[name] - before[name]))
    for key, measured in [("rss_start_bytes", before["Rss"]), ("rss_end_bytes", after["Rss"])]:
        assert abs(own[key] - measured) <= 64 * PAGE, f"{key} {own[key]}, not {measured}"
    # How much the child has at its start, only the account says.
    began = sum(child[kind]["start_bytes"] for kind in ("anonymous", "file", "shared"))
    compare_memory("child", child, ["anonymous", "file", "shared"], truth["child"]["Rss"] - began)
    return f"{worst:.2f} % off, {memory_by_function('/tmp/out.json')}"


def memory_from_start():
    """The same of a command, from its first instruction to its end."""
    text = run(NATIVEPROF, *RECORD_MEMORY, "-o", "/tmp/now.json", "--", *KNOWN_MEMORY, "now")
    print(text, flush=True)
    truth = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    # The last program that the process has executed.
    account = memory_accounts("/tmp/now.json")[truth["pid"]]
    began = sum(account[kind]["start_bytes"] for kind in ("anonymous", "file", "shared"))
    off = compare_memory("command", account, ["anonymous", "file", "shared"], truth["after"]["Rss"] - began)
    return f"from its start {off:.2f} %"


def memory_accounts(profile):
    """The account of each process."""
    with open(profile) as file:
        return {account["pid"]: account for account in json.load(file)["nativeprof"]["memory"]}


def compare_memory(what, account, kinds, change):
    """Compares an account with the change that was measured; returns by how much it is off, in percent of that."""
    grown, returned = (
        sum(account[kind][f"{way}_bytes"] + account[kind][f"{way}_by_others_bytes"] for kind in kinds)
        for way in ("grown", "returned")
    )
    off = grown - returned - change
    percent = 100 * abs(off) / max(PAGE, abs(change))
    print(
        f"account: {what}: grown {grown}, returned {returned}, change {change}: off by {off // PAGE} pages, {percent:.3f} %",
        flush=True,
    )
    assert abs(off) <= 0.01 * abs(change) + 64 * PAGE, (
        f"{what}: {grown} grown, {returned} given back, but {change} more: {off // PAGE} pages"
    )
    return percent


def memory_by_function(profile):
    """Compares each value of each function with what is known of it."""
    wrong = []
    for at, value in enumerate(["rss_grown_bytes", "rss_bytes", "rss_returned_bytes"]):
        seen = {}
        for names, amount in stacks(profile, "--value", value):
            for name in MEMORY.keys() & set(names):
                seen[name] = seen.get(name, 0) + amount
        print(value, {name: f"{amount / MIB:.1f}" for name, amount in sorted(seen.items())}, flush=True)
        for name, known in MEMORY.items():
            off, band = abs(seen.get(name, 0) - known[at] * MIB), 4 * (known[at] * MIB * MEMORY_INTERVAL) ** 0.5 + MIB
            if off > (0.15 * known[at] * MIB if name == "m_kept" and known[at] else band):
                wrong.append(f"{name} has {seen.get(name, 0) / MIB:.1f} MiB of {value}, not {known[at]}")
        if value == "rss_bytes":
            kept = seen.get("m_kept", 0) / MIB
    assert not wrong, "; ".join(wrong)
    return f"{kept:.1f} of {MEMORY['m_kept'][1]} MiB below its function"


def published():
    """Are the blocks that a program publishes at its probes those of its functions, of a process and of a command?"""
    found = re.search(r"published allocations +(.*)", run(NATIVEPROF, "doctor"))
    said = found[1] if found else "doctor does not mention it"
    if not os.path.exists("/sys/bus/event_source/devices/uprobe/format/ref_ctr_offset"):
        assert "not available" in said and "uprobes" in said, said
        return "no uprobes with counters of observers, says so"
    assert "are read at uprobes" in said, said
    text, said = recorded_work(["/test/published"], "READY", "attach", "--mode", "alloc")
    assert said == "DONE\n", said
    of_process = verify_published(text)
    text = run(NATIVEPROF, "record", "--mode", "alloc", "-o", "/tmp/out.json", "--", "/test/published", "observed")
    return f"{of_process}; from its start {verify_published(text)}"


def verify_published(text):
    """Compares each value of each function with what is known of it."""
    print(text, flush=True)
    wrong = []
    for at, value in enumerate(["alloc_bytes", "allocs", "live_bytes"]):
        seen = {}
        for names, amount in stacks("/tmp/out.json", "--value", value):
            seen[names[-1]] = seen.get(names[-1], 0) + amount
        print(value, seen, flush=True)
        for name, known in PUBLISHED.items():
            # Fractions of blocks carry over to the next one, which may be of another function.
            if abs(seen.get(name, 0) - known[at]) > (1 if value == "allocs" else 0):
                wrong.append(f"{name} has {seen.get(name, 0)} {value}, not {known[at]}")
    assert not wrong and "limit:" not in text, f"{'; '.join(wrong)}: {text}"
    with open("/tmp/out.json") as file:
        quality = json.load(file)["nativeprof"]["quality"]
    taken, lost, exact = (quality[key] for key in ("taken", "lost", "exact"))
    assert (taken, lost) == (PUBLISHED_BLOCKS * len(PUBLISHED), 0) and exact >= 0.99 * taken, f"{quality}: {text}"
    return f"all values known, {exact} of {taken} exact"


def dump():
    target = started(TARGET)
    try:
        time.sleep(1)
        text = run(NATIVEPROF, "dump", str(target.pid))
    finally:
        target.kill()
        target.wait()
    assert "once" in text and "worker" in text, text
    return "both threads"


def kill():
    """What nativeprof leaves behind when it is killed does no harm."""
    target = subprocess.Popen(TARGET, stdout=subprocess.PIPE)
    assert target.stdout.readline() == b"ready\n"

    def used():
        fields = open(f"/proc/{target.pid}/stat").read().rsplit(") ", 1)[1].split()
        return fields[0], int(fields[11])

    try:
        for backend in ("ebpf", "ptrace"):
            command = [NATIVEPROF, "attach", str(target.pid), "--backend", backend, "-o", "/tmp/killed.json"]
            profiler = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            for line in profiler.stderr:
                if "sampling" in line:
                    break
            time.sleep(1)
            profiler.send_signal(signal.SIGKILL)
            profiler.wait()
            before = used()[1]
            time.sleep(1)
            state, after = used()
            assert target.poll() is None, f"the target is gone after {backend}"
            assert state in "RS" and after > before, f"after {backend}: state {state}, CPU time {before} to {after}"
    finally:
        target.kill()
        target.wait()
    return "the program continues"


def selftest():
    """Its stacks; its times mean nothing under emulation."""
    command = [NATIVEPROF, "selftest", "--backend", "ebpf", "-r", "99", "--pairs", "2", "--window", "3", "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)
    found = json.loads(ran.stdout)["backends"][0]
    assert found["impossible_stacks"] == 0, found
    right = found["exact"] + (found["repaired"] if NO_VDSO_TABLES else 0)
    assert right >= 0.995 * found["taken"] > 0, found
    return f"{found['exact']} of {found['taken']} exact"


def tape():
    """Records a tape as .ci/make-tapes does, for fixtures/tapes, and prints it."""
    # A kernel that finds its ticks too slow lowers the highest rate.
    with open("/proc/sys/kernel/perf_event_max_sample_rate", "w") as highest:
        highest.write("10000")
    os.makedirs("/mnt/prog")
    for name in ("tape_target.py", "tapeext.so"):
        shutil.copy(f"/test/{name}", "/mnt/prog")
    target = subprocess.Popen(
        [os.path.realpath(sys.executable), "/mnt/prog/tape_target.py"],
        stdout=subprocess.PIPE,
        cwd="/mnt/prog",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/mnt/prog", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        assert target.stdout.readline() == b"ready\n"
        command = [NATIVEPROF, "record", "--pid", str(target.pid), "-r", "499", "-d", "8", "-f", "collapsed", "-o", "/tmp/out"]
        print(run(*command, "--save-tape", "/tmp/out.tape", "--tape-samples", "22"), flush=True)
    finally:
        target.kill()
        target.wait()
    with open("/tmp/out.tape", "rb") as file:
        print("TAPE", base64.b64encode(file.read()).decode(), flush=True)
    return "printed"


# Only when it is requested by its name.
ON_REQUEST = [tape]
CHECKS = [doctor, doctor_as_user, launch, attach, clock, cycles, kernel, subprocesses, ptrace, wall, rss, published, numpy, wheel]
CHECKS += [dump, kill, selftest]


def main():
    chosen = os.environ.get("CHECKS", "").replace(",", " ").split()
    print(f"RESULT ok Python {sys.version.split()[0]}, Linux {os.uname().release}", flush=True)
    for check in CHECKS + ON_REQUEST:
        if check.__name__ not in chosen if chosen else check in ON_REQUEST:
            continue
        began = time.monotonic()
        try:
            for left in reversed(range(TRIES)):
                try:
                    verdict, detail = "ok", check()
                    break
                except Unlikely as problem:
                    if not left:
                        raise
                    print(f"{check.__name__}: once more, {problem}", flush=True)
        except Exception as problem:
            traceback.print_exc()
            verdict, detail = "bad", (str(problem).splitlines() or [type(problem).__name__])[0][:200]
        print(f"RESULT {verdict} {check.__name__} {detail}", flush=True)
        print(f"{check.__name__} took {time.monotonic() - began:.1f} s", flush=True)
    print("RESULT ok end reached", flush=True)


main()
