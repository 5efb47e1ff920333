"""Reports in plain text: bytes in words, tables, and names that differ by numbers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

__all__ = ["fold_names", "format_bytes", "format_table", "name_pattern"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_DIGITS = re.compile(r"(?<![^.\[/])\d+(?![^.\]/])")


def format_bytes(nbytes: int) -> str:
    """Returns a number of bytes in words, as in ``"12.3 MiB"``.

    Args:
        nbytes: The number.

    Example:
        >>> from ckpt_hooks.report.formatting import format_bytes
        >>> format_bytes(1023), format_bytes(12_900_000)
        ('1023 B', '12.3 MiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size, units = nbytes / 1024, iter(_UNITS)
    unit = next(units)
    while abs(size) >= 1023.95 and unit != _UNITS[-1]:  # which would be rounded up to 1024.0
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    r"""Returns the lines of a table. Empty columns are left out.

    Args:
        header: The titles of the columns.
        rows: The cells of each row.
        right: The columns which are aligned on the right.

    Example:
        >>> from ckpt_hooks.report.formatting import format_table
        >>> print(*format_table(["bytes", "reason"], [["12 B", "saved"], ["3 B", "policy"]], right=[0]), sep="\n")
        bytes  reason
         12 B  saved
          3 B  policy
    """
    columns = [column for column in range(len(header)) if any(row[column] for row in rows)]
    widths = [max(len(header[column]), *(len(row[column]) for row in rows)) for column in columns]
    form = "  ".join(
        f"{{{column}:{'>' if column in right else '<'}{width}}}" for column, width in zip(columns, widths, strict=True)
    )
    return [form.format(*row).rstrip() for row in (header, *rows)] if columns else []


def name_pattern(name: str) -> str:
    """Returns a name with ``*`` for each part that is a number, the same for all layers of a list."""
    return _DIGITS.sub("*", name)


def fold_names(names: Iterable[str]) -> str:
    """Returns names of one pattern as one, as in ``"layers.0-11"``.

    Args:
        names: The names.

    Example:
        >>> from ckpt_hooks.report.formatting import fold_names
        >>> fold_names(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.5.mlp"])
        'layers.0-2,5.mlp'
    """
    distinct = list(dict.fromkeys(names))
    if len(distinct) < 2:
        return "".join(distinct)
    numbers = list(zip(*(map(int, _DIGITS.findall(name)) for name in distinct), strict=True))
    if math.prod(len(set(column)) for column in numbers) != len(distinct):  # not all combinations are there
        return f"{distinct[0]} ... {distinct[-1]}"
    folded = iter([_ranges(sorted(set(column))) for column in numbers])
    return _DIGITS.sub(lambda _: next(folded), distinct[0])


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
