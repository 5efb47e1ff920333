"""How reports print, as text, as JSON and in errors; and their entries, plain values without tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import check_is

T = TypeVar("T")

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_DIGITS = re.compile(r"(?<![^.\[/])\d+(?![^.\]/])")
_GAP = "  "
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(32), 127)}  # a user's names may have control characters
_LEAST = 16  # no cell is cut to fewer characters


class Table(NamedTuple):
    """A table of a report; without rows it does not print."""

    header: Sequence[str]  # the most important first: on a narrow terminal the last columns are left out
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()  # columns that are aligned on the right
    names: Sequence[int] = ()  # columns of names, which are cut on a narrow terminal
    title: str = ""
    rest: str = ""  # a last line, on what the table leaves out


class Printed:
    """An object that prints as a report, as wide as the terminal: ``repr`` is one line, and notebooks show tables."""

    __slots__ = ()

    def _headline(self) -> str:
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    def __str__(self) -> str:
        # Text for a file keeps all columns, unless COLUMNS is set.
        columns = shutil.get_terminal_size((0, 0)).columns
        lines, width = [self._headline()], columns - 1 if columns else None
        for table in (table for table in self._tables() if table.rows):
            lines += ["", *([table.title] if table.title else [])]
            lines += [f" {line}" for line in _lines_of(table, width)]
            lines += [f" {table.rest}"] if table.rest else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html  # takes 1 ms, and only notebooks need it

        return f"<pre>{html.escape(str(self))}</pre>"


def json_of(entry: Any) -> dict[str, Any]:
    """Returns the entry as values for ``json.dumps``."""
    # A class may list its values in ``_json``, properties included; the default is all public fields.
    cls = type(entry)
    names = getattr(cls, "_json", None) or getattr(cls, "_fields", None) or [field.name for field in dataclasses.fields(entry)]
    return {name: as_json(getattr(entry, name)) for name in names if not name.startswith("_")}


def as_json(value: Any) -> Any:
    """Returns a value of a report as ``json.dumps`` takes it."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return json_of(value)
    if isinstance(value, dict):
        return {key: as_json(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(member) for member in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return value.value if isinstance(value, enum.Enum) else value


def format_bytes(nbytes: int) -> str:
    """Returns a number of bytes in words, as in ``"12.3 MiB"``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, iter(_UNITS)
    unit = next(units)
    while abs(size) >= 1023.95 and unit != _UNITS[-1]:  # a larger size would print as 1024.0
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def count_of(count: int, noun: str) -> str:
    """Returns a number of things in words, as in ``"2 regions"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def alike(values: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Returns groups of values with the same key, in the order of their first values; a group shares a row."""
    groups: dict[object, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def times(group: Sequence[Any]) -> str:
    """Returns the size of a group, as in ``"x12"``; nothing for a single value."""
    return f"x{len(group)}" if len(group) > 1 else ""


def _lines_of(table: Table, max_width: int | None) -> list[str]:
    header, rows, right, names, *_ = table
    columns = [column for column in range(len(header)) if any(row[column] for row in rows)]
    widths = {column: max(len(header[column]), *(len(row[column]) for row in rows)) for column in columns}
    if max_width is not None:
        # Cuts the longest names in their middle; if that is not enough, leaves out the last columns.
        least = {column: min(width, _LEAST) if column in names else width for column, width in widths.items()}
        while len(columns) > 1 and _length(least[column] for column in columns) > max_width:
            columns.pop()
        while _length(widths[column] for column in columns) > max_width:
            longer = [column for column in columns if widths[column] > least[column]]
            if not longer:  # the only column has no names
                break
            widths[max(longer, key=widths.__getitem__)] -= 1
    lines = []
    for row in (header, *rows):
        cells = (cut(row[column], widths[column]) for column in columns)
        aligned = (
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in zip(columns, cells, strict=True)
        )
        lines.append(_GAP.join(aligned).rstrip().translate(_ESCAPES))
    return lines if columns else []


def _length(widths: Iterable[int]) -> int:
    return sum(width + len(_GAP) for width in widths) - len(_GAP)


def cut(cell: str, width: int) -> str:
    """Returns a text cut to at most ``width`` characters, without its middle."""
    if len(cell) <= width:
        return cell
    end = (width - 1) // 2
    return f"{cell[: width - 1 - end]}…{cell[-end:]}"


def name_pattern(name: str) -> str:
    """Returns a name without its numbers: the same for all layers of a list."""
    return _DIGITS.sub("\0", name)


def up_to_number(name: str) -> str | None:
    """Returns the name of a module up to its first part that is a number, as in ``"model.layers.3"``; None without one."""
    parts = name.split(".")
    return next((".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()), None)


def fold_names(names: Iterable[str]) -> str:
    """Returns names with the same pattern as a single name, as in ``"layers.0-11"``."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) < 2:
        return "".join(distinct)
    is_of_one_pattern = len(set(map(name_pattern, distinct))) == 1
    numbers = list(zip(*(map(int, _DIGITS.findall(name)) for name in distinct), strict=True)) if is_of_one_pattern else [()]
    if math.prod(len(set(column)) for column in numbers) != len(distinct):  # some combinations of numbers are missing
        return f"{distinct[0]} ... {distinct[-1]}"
    folded = iter([_ranges(sorted(set(column))) for column in numbers])
    return _DIGITS.sub(lambda _: next(folded), distinct[0])


def _ranges(numbers: Sequence[int]) -> str:
    # In a run of consecutive numbers, a number and its position have a constant difference.
    by_offset = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_offset]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def check_path(path: Any, example: str) -> None:
    """Checks the argument of the file that a report is written to."""
    check_is(path, (str, os.PathLike), "path", "the path of a file", f"Write its name, as in {example!r}.")


@contextlib.contextmanager
def noting_out_of_memory(causes: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Adds a note on the largest causes to a ``torch.OutOfMemoryError`` that leaves the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        lines = causes()
        if lines:
            note = "\n".join(("When memory ran out, most was held by:", *(f"  {line}" for line in lines)))
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                error.args = (f"{error}\n{note}", *error.args[1:])
        raise


class Maker(str, enum.Enum):
    """What made an allocation. Of several, the first in this list counts."""

    #: The recompute of a region.
    RECOMPUTE = "recompute"
    #: Forward of a region.
    REGION = "region"
    #: A node of backward.
    BACKWARD = "backward"
    #: Forward of a module, outside of regions.
    MODULE = "module"
    #: An optimizer.
    OPTIMIZER = "optimizer"
    #: None of these.
    OUTSIDE = "outside"


class Origin(NamedTuple):
    """What made a piece of memory.

    Attributes:
        maker: The kind of maker.
        region: The innermost region by module and name, such as ``"layers.0 Block"``; None outside. In backward, the region in
            whose forward the node was made.
        module: The innermost module by name and class, such as ``"layers.0.mlp Linear"``; None outside. In backward, the module
            in whose forward the node was made.
        operator: The outermost operator, such as ``"aten::linear"``; None outside of operators.
        node: The running node of backward, such as ``"AddmmBackward0"``; None outside of backward.
        optimizer: The running optimizer call, such as ``"AdamW.step"``; None outside.
        line: The line that called into torch, or that entered the region, such as ``"model.py:12"``; None if unknown.
    """

    maker: Maker = Maker.OUTSIDE
    region: str | None = None
    module: str | None = None
    operator: str | None = None
    node: str | None = None
    optimizer: str | None = None
    line: str | None = None


#: The origin of memory of which nothing is known.
NOWHERE = Origin()


class Residual(NamedTuple):
    """A storage that backward holds, shown by one of its tensors.

    Attributes:
        reason: Why backward holds it.
        nbytes: Bytes of the storage; of the tensor for an entry in ``views``; 0 if hooks of the user hide the memory.
        shape: Shape of the tensor; None for nested tensors and if unknown.
        dtype: Dtype; None if unknown.
        device: Device; None if unknown.
        why: More words about the reason, if any.
        name: Name of a parameter or buffer, or place of an argument.
        operator: The operator that made the storage, such as ``"aten.mm.default"``; None if unknown.
        site: The line that ran the operator or entered the region, such as ``"model.py:12"``.
        module: The innermost module around, by its name in the outermost module.
        region: Names of the regions around, outermost first; empty outside of regions.
        saved_by: Names of the nodes that saved the tensor, such as ``"MulBackward0"``.
        views: All tensors in the storage if there are several, each with its own reason.
    """

    reason: Reason
    nbytes: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    why: str = ""
    name: str | None = None
    operator: str | None = None
    site: str | None = None
    module: str | None = None
    region: tuple[str, ...] = ()
    saved_by: tuple[str, ...] = ()
    views: tuple[Residual, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as values for ``json.dumps``."""
        return json_of(self)


#: How to reduce memory held for a reason; under None, memory that only the program holds. Random states have no remedy: regions
#: that draw nothing share a state, and each region that draws needs a state of its own.
REMEDIES: dict[Reason | None, str] = {
    None: "delete it after use, with the list or attribute that has it",
    Reason.SAVED: "checkpoint_region() around the lines that use it",
    Reason.HOOKS: "no saved-tensor hooks around it, or hooks that keep less",
    Reason.CTX: "ctx.save_for_backward in the autograd.Function",
    Reason.NOT_REPLAYED: "a plain checkpoint(function, *args), which calls it again",
    Reason.INPUT: "offload_inputs=True, or one region around several of these",
    Reason.POLICY: "a policy that keeps less, or offloads it",
    Reason.NAME: "a policy without this name, or one that offloads it",
    Reason.STATE: "make it inside of the region, or pass it as an argument",
    Reason.RECOMPUTED: "smaller regions",
    Reason.GRADIENT: "the optimizer's step in hooks of backward, with zero_grad()",
    Reason.BACKWARD: "fewer samples at a time",
}
