"""Budgets: bytes in numbers or words, or a part of the way from the least feasible peak to that of no checkpointing."""

from __future__ import annotations

import re

from ckpt_hooks._core.misuse import described_as

__all__ = ["Budget", "parsed"]

#: Bytes as an integer, or a part as a float.
Budget = int | float | str

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS[f"{_letter}b"], _UNITS[f"{_letter}ib"] = 1000**_power, 1024**_power
_WORDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parsed(budget: Budget) -> int | float:
    """Returns a budget as bytes, or as a part from 0.0 to 1.0.

    Args:
        budget: Bytes, bytes in words as in ``"20GiB"``, or a part.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If the words have no number or another unit, or the number is out of range.

    Example:
        >>> from ckpt_hooks.planner.budgets import parsed
        >>> parsed("1.5 KiB"), parsed("2GB"), parsed(0.5)
        (1536, 2000000000, 0.5)
    """
    if isinstance(budget, str):
        found = _WORDS.fullmatch(budget)
        unit = None if found is None else _UNITS.get(found[2].lower())
        if found is None or unit is None:
            raise ValueError(f"memory_budget={budget!r} has no size. Write a number and a unit, as in '20GiB' or '500MB'.")
        return int(float(found[1]) * unit)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"memory_budget should be bytes, words such as '20GiB', or a part from 0.0 to 1.0, but got {described_as(budget)}. "
            "Pass one of these."
        )
    if isinstance(budget, float) and not 0 <= budget <= 1:
        raise ValueError(f"memory_budget={budget!r} is no part from 0.0 to 1.0. Pass an integer for bytes.")
    if budget < 0:
        raise ValueError(f"memory_budget={budget!r} is negative. Pass the bytes that the step may take.")
    return budget
