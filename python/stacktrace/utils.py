"""What a stack is made of."""

from typing import NamedTuple

__all__ = ["StackEntry"]


class StackEntry(NamedTuple):
    """A frame of a native stack.

    ``addr`` is the instruction (for a caller: the return address) as the function's file states it, so that it is the
    same in all processes; ``addr - offset`` is the function's start. ``is_python`` is true of the entry that represents
    frames of the interpreter.
    """

    addr: int
    name: str
    offset: int
    is_python: bool

    def __str__(self) -> str:
        offset = f" +{self.offset}" if self.offset else ""
        return f"[0x{self.addr:x}] {self.name}{offset}{' [PY]' if self.is_python else ''}"
