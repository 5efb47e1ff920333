"""The names of a region and of the regions around it.

They are a linked list, innermost first: a tuple of all of them would be built by every region and read by hardly any.
"""

from __future__ import annotations

import functools

__all__ = ["RegionPath", "format_path", "region_in_words"]

RegionPath = tuple[str, "RegionPath | None"]


@functools.lru_cache(maxsize=16)  # reports ask for each tensor of a region; 5% of a report
def format_path(path: RegionPath | None) -> tuple[str, ...]:
    """Returns the names of a path, outermost first."""
    names: list[str] = []
    while path is not None:
        name, path = path
        names.append(name)
    return tuple(reversed(names))


def region_in_words(path: RegionPath | None) -> str:
    """Returns the names of a path as messages have them, as in ``"region 'outer/inner'"``."""
    return f"region {'/'.join(format_path(path))!r}"
