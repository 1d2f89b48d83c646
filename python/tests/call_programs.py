"""Random programs of calls, and what a reference in pure Python says of them."""

import random
import sys


def program(seed):
    """Source of functions that call one another, builtins and generators, raise and catch; `main()` runs it."""
    rng = random.Random(seed)
    functions = [f"f{i}" for i in range(rng.randint(3, 7))]
    generators = [f"g{i}" for i in range(rng.randint(1, 3))]
    lines = ["class Wrong(Exception):", "    pass", ""]

    def call():
        return f"{rng.choice(functions)}(depth - 1)"

    def statement():
        kind = rng.randrange(12)
        g = rng.choice(generators)
        if kind == 0:
            return [call()]
        if kind == 1:
            return [f"for x in {g}(depth - 1):", f"    {call()}"]
        if kind == 2:
            return ["try:", f"    {call()}", "    raise Wrong", "except Wrong:", f"    {call()}"]
        if kind == 3:
            return ["try:", f"    {call()}", "finally:", "    len(items)"]
        if kind == 4:
            return [f"sorted([2, 1], key=lambda x: {call()} or x)"]
        if kind == 5:
            return [f"it = {g}(depth - 1)", "next(it, None)", "it.close()"]
        if kind == 6:
            caught = "except (Wrong, StopIteration):"
            return [f"it = {g}(depth - 1)", "next(it, None)", "try:", "    it.throw(Wrong)", caught, "    pass"]
        if kind == 7:
            return ["items.append(depth)", "items.pop()", "max(1, 2)"]
        if kind == 8:
            return [f"Thing(depth - 1).method({rng.choice(functions)})"]
        if kind == 9:
            return [f"run(coroutine(depth - 1, {rng.choice(functions)}))"]
        if kind == 10:
            return [f"sum([{call()} or 0 for _ in range(2)])"]
        return ["if depth % 2:", "    raise Wrong"]

    def body(count, indent):
        return [" " * indent + line for _ in range(count) for line in statement()]

    for name in functions:
        lines += [f"def {name}(depth):", "    if depth <= 0:", "        return 0", "    items = []"]
        lines += body(rng.randint(1, 3), 4) + ["    return depth", ""]
    for name in generators:
        lines += [f"def {name}(depth):", "    items = []", "    yield 1", "    if depth <= 0:", "        return"]
        lines += ["    try:"] + body(rng.randint(1, 2), 8) + ["        yield 2", "    except Wrong:", "        yield 3", ""]
    lines += [
        "class Thing:",
        "    def __init__(self, depth):",
        "        self.depth = depth",
        "    def method(self, function):",
        "        return function(self.depth)",
        "class Step:",
        "    def __await__(self):",
        "        yield 1",
        "async def coroutine(depth, function):",
        "    await Step()",
        "    return await inner(depth, function)",
        "async def inner(depth, function):",
        "    await Step()",
        "    return function(depth)",
        "def run(c):",
        "    try:",
        "        while True:",
        "            c.send(None)",
        "    except StopIteration as stop:",
        "        return stop.value",
        "def main():",
    ]
    for name in functions:
        lines += ["    try:", f"        {name}({rng.randint(2, 4)})", "    except Wrong:", "        pass"]
    return "\n".join(lines) + "\n"


def place(code):
    """`name:line`: lambdas and comprehensions share their names."""
    return f"{code.co_name}:{code.co_firstlineno}"


class Reference:
    """Counts calls by `sys.setprofile`: {function: calls}, {function: recursive calls}, {(caller, callee): calls}."""

    def __init__(self):
        self.calls, self.recursive, self.pairs = {}, {}, {}
        self.stack = []

    def _name(self, frame, event, argument):
        if not event.startswith("c_"):
            return place(frame.f_code)
        return f"{argument.__name__}()"

    def __call__(self, frame, event, argument):
        name = self._name(frame, event, argument)
        if event.endswith("call"):
            self.stack.append(name)
            return
        if not self.stack:
            return  # a frame from before the start
        assert self.stack.pop() == name
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.stack:
            self.recursive[name] = self.recursive.get(name, 0) + 1
        if self.stack:
            pair = self.stack[-1], name
            self.pairs[pair] = self.pairs.get(pair, 0) + 1

    def run(self, function):
        sys.setprofile(self)
        try:
            function()
        finally:
            sys.setprofile(None)
        # The call that ended it.
        self.stack.clear()
        return self


def found(entries):
    """The same three tables from `getstats()`."""

    def name(code):
        if not isinstance(code, str):
            return place(code)
        word = code.split("'")[1] if "'" in code else code.rstrip(">").split()[-1].split(".")[-1]
        return word + "()"

    calls, recursive, pairs = {}, {}, {}
    for entry in entries:
        if isinstance(entry.code, str) and "'disable'" in entry.code:
            continue
        key = name(entry.code)
        calls[key] = calls.get(key, 0) + entry.callcount
        if entry.reccallcount:
            recursive[key] = recursive.get(key, 0) + entry.reccallcount
        for callee in entry.calls or ():
            pair = key, name(callee.code)
            pairs[pair] = pairs.get(pair, 0) + callee.callcount
    return calls, recursive, pairs
