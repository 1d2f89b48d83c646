"""Profiles as notebooks and IPython show them: a flame graph, the user's functions, the lines of the cells."""

from __future__ import annotations

import base64
import html
import linecache
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _native

if TYPE_CHECKING:
    from .profiler import Profile, Stats

# Pixels of a flame graph; a taller one scrolls.
_TALLEST = 900
# Cells whose lines are listed, those with most samples; and lines of each.
_CELLS = 3
_LINES = 500


def counted(count: int, plural: str) -> str:
    """A number and what it counts, a noun with the plural in -s."""
    return f"1 {plural.removesuffix('s')}" if count == 1 else f"{count} {plural}"


def page(profile: Profile) -> str:
    """HTML of a profile."""
    stats, native = profile.stats, profile._native
    head = f"<p>{html.escape(_heading(stats))}</p>"
    if not stats["total"]:
        return head + f"<p>{html.escape(_why_empty(stats))}</p>"
    names = _cell_names(_native.cell_files(native))
    view = _native.notebook_view(native, names)
    if view["shown"] < stats["total"]:
        head += f"<p>The graph and the tables have the {view['shown']} of them that belong to the cell. "
        head += "The others belong to what runs cells, and to other threads.</p>"
    graph = base64.b64encode(view["graph"]).decode("ascii")
    # A frame of its own: the graph's script and styles do not affect the page.
    frame = (
        f"<iframe title='flame graph' sandbox='allow-scripts' style='width:100%;height:{_height(view['graph'])}px;border:0' "
        f"src='data:image/svg+xml;base64,{graph}'></iframe>"
    )
    return frame.join((head, _functions(view))) + "".join(_cells(view, names, stats))


def text(profile: Profile) -> str:
    """A profile in a terminal's IPython."""
    stats, native = profile.stats, profile._native
    if not stats["total"]:
        return f"{profile!r}\n{_why_empty(stats)}"
    view = _native.notebook_view(native, _cell_names(_native.cell_files(native)))
    whole = max(view["whole"], 1)
    lines = [repr(profile), "  SELF %  TOTAL %  FUNCTION  LINE"]
    for name, place, amount, _, _, total in view["functions"]:
        lines.append(f"{100 * amount / whole:8.1f} {100 * total / whole:8.1f}  {name}  {place}")
    return "\n".join(lines)


def _heading(stats: Stats) -> str:
    if stats["counts"] != "samples":
        return f"{counted(stats['total'], stats['counts'])} in {stats['duration']:.1f} s"
    return (
        f"{counted(stats['taken'], 'samples')} in {stats['duration']:.1f} s at {stats['rate']} Hz ({stats['event']}): "
        f"{stats['exact'] + stats['repaired']} complete, {stats['partial']} partial, {stats['lost']} lost"
    )


def _why_empty(stats: Stats) -> str:
    if stats["counts"] != "samples":
        return "Nothing was called that is traced."
    if stats["lost"]:
        return f"All {stats['lost']} samples were lost: the threads blocked the signal that interrupts them."
    period = 1000 / max(stats["rate"], 1)
    if stats["event"] == "wall-clock":
        return f"There are no samples: it took less than a period of {period:.4g} ms. Use a higher rate, such as -r 1000."
    return (
        f"There are no samples: it used less CPU time than a period of {period:.4g} ms. Use a higher rate, such as -r 1000; "
        "or --mode wall, if it waits."
    )


def _height(svg: bytes) -> int:
    """Pixels that a flame graph needs, and no more than fits a screen."""
    found = re.search(rb'<svg[^>]* height="(\d+)"', svg[:4096])
    return min(int(found.group(1)) + 8, _TALLEST) if found else _TALLEST


def _cell_names(files: Iterable[str]) -> dict[str, str]:
    """``In [3]`` for the files of cells whose numbers are known: IPython 8 and later knows those of its session, before they are
    in the names of the files."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    names = {}
    for file in files:
        known = format_name(file) if format_name else None
        number = re.fullmatch(r"In\s*\[(\d+)\]", known[1]) if known else re.match(r"<ipython-input-(\d+)-", file)
        if number:
            names[file] = f"In [{number.group(1)}]"
    return names


def _cell(text: str, align: str = "right", more: str = "") -> str:
    return f"<td style='text-align:{align}{more}'>{text}</td>"


def _table(titles: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    head = "".join(f"<th style='text-align:{align}'>{title}</th>" for title, align in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _functions(view: dict[str, Any]) -> str:
    whole = max(view["whole"], 1)
    titles = [(title, "right") for title in ("self", "in libraries", "in C", "total")]
    titles += [("function", "left"), ("line", "left")]
    rows = (
        "<tr>"
        + "".join(_cell(f"{amount / whole:.1%}") for amount in amounts)
        + _cell(f"<code>{html.escape(name)}</code>", "left")
        + _cell(html.escape(place), "left")
        + "</tr>"
        for name, place, *amounts in view["functions"]
    )
    return "<p>Your functions with the libraries and C code that they run, each at its hottest line</p>" + _table(titles, rows)


def _cells(view: dict[str, Any], names: dict[str, str], stats: Stats) -> Iterable[str]:
    """The source of each cell with the time of its lines."""
    files = sorted(view["lines"].items(), key=lambda item: -max(total for _, _, total in item[1]))
    is_timed = stats["counts"] == "samples"
    whole = max(view["shown"], 1)
    for file, lines in files[:_CELLS]:
        source = linecache.getlines(file)
        amounts = {line: (alone, total) for line, alone, total in lines}
        rows = []
        for number in range(1, min(max(len(source), max(amounts)), _LINES) + 1):
            alone, total = amounts.get(number, (0, 0))
            figures = [f"{total / whole:.1%}", f"{alone / whole:.1%}"]
            if is_timed:
                figures.insert(0, _duration(total / stats["rate"]))
            line = source[number - 1].rstrip("\n") if number <= len(source) else ""
            if "._begin_cell(" in line:
                line = "%%nativeprof"
            code = f"<code>{html.escape(line)}</code>"
            shown = "".join(_cell(figure if total else "") for figure in figures)
            rows.append(f"<tr>{shown}{_cell(str(number))}{_cell(code, 'left', ';white-space:pre')}</tr>")
        titles = [("total", "right"), ("self", "right"), ("line", "right"), ("source", "left")]
        if is_timed:
            titles.insert(0, ("time", "right"))
        yield f"<p>{html.escape(names.get(file, file))}: total with all that a line calls</p>" + _table(titles, rows)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
