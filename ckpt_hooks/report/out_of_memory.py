"""Notes on errors of an accelerator which has run out of memory: what holds most."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["noting_out_of_memory"]


@contextlib.contextmanager
def noting_out_of_memory(holders: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Adds a note to a ``torch.OutOfMemoryError`` which leaves the block; on Python 3.10 the message has it.

    Args:
        holders: Returns lines on what holds most, the largest first; none for no note.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        lines = holders()
        if lines:
            note = "\n".join(("When memory ran out, most was held by:", *(f"  {line}" for line in lines)))
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                error.args = (f"{error}\n{note}", *error.args[1:])
        raise
