"""Handles of function frames, which stand in the graph for dropped tensors, and the values brought back by one backward."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import Any

import torch

from ckpt_hooks._ambient.current import Made
from ckpt_hooks._ambient.positions import Position
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import Frame, Mark, overlap_error
from ckpt_hooks._core.holdings import Reason, Saved, nbytes_of
from ckpt_hooks._core.scopes import MISSING, SPLIT, Uses, graph_task_scope, group_scope
from ckpt_hooks._torch.autograd import graph_exec_group, graph_task_id
from ckpt_hooks.errors import InternalError

#: The number of a frame's first saved tensor. Up here every sum is a new object; small integers are shared by all their
#: users, and the count of their holders would tell nothing.
FIRST = 1 << 20

# Stands in autograd's graph for one saved tensor: the frame which can bring the tensor back, and the number of tensors saved
# before by the frame, counted from FIRST. The number is an object held only by the handle and the frame's list of numbers:
# while it has a holder besides the list, its handle is alive. (A weak reference to each handle does the same, at the cost of a
# class of handles and a third more time for each saved tensor.)
Handle = tuple["HandleFrame", int]

# The result of ``getrefcount`` for a number held by a list of numbers alone.
_UNHELD = next(map(getrefcount, [FIRST + 1]))


class Pass:
    """The values which a recompute brought back for one frame in one scope."""

    __slots__ = ("made", "taken", "values")

    def __init__(self, values: list[torch.Tensor] | dict[int, torch.Tensor], made: Made | None = None) -> None:
        # An entry for each handle, in the order of saving: the tensor, or MISSING. A dictionary in a pass for one handle.
        self.values: Any = values
        self.made = made
        self.taken: list[int] = []  # indices in the order of their taking


class SplitPass(Pass):
    """The values of one frame for the two parts of a backward, which lie apart from the values handed out."""

    __slots__ = ("uses",)

    def __init__(self, values: list[torch.Tensor], made: Made | None) -> None:
        Pass.__init__(self, values, made)
        self.uses = Uses()

    def value_at(self, index: int, alive: Callable[[], list[bool]]) -> torch.Tensor:
        """Returns a value; :data:`MISSING` if it is not there, or a backward has written to its memory."""
        if self.uses.is_next_part():  # once in each backward
            self.values = [value if lives else MISSING for value, lives in zip(self.values, alive(), strict=False)]
        value: torch.Tensor = self.values[index] if index < len(self.values) else MISSING
        return value if value is MISSING or self.uses.is_untouched(index, value) else MISSING


class HandleFrame(Frame):
    __slots__ = (
        "collector",
        "ends_small",
        "facts",
        "fingerprints",
        "is_split",
        "marks",
        "num_nodes",
        "numbers",
        "positions",
        "without_grad",
    )

    kind = "function"
    passes: dict[int, Pass]

    def __init__(
        self, name: str, parent: Frame | None, observers: tuple[Observer, ...], module: torch.nn.Module | None = None
    ) -> None:
        Frame.__init__(self, name, parent, observers, module)
        self.collector: Any = None  # of the running rerun
        self.is_split = False  # whether values stay for a second backward
        self.marks: list[Mark] = []  # of the regions inside, in forward
        # How many nodes of autograd's graph the function has made on this thread, -1 until it returned; and whether it works
        # on small tensors in the end.
        self.num_nodes, self.ends_small = -1, False
        # A number for each packed tensor, in order, held by this list and by a living handle only: a kept tensor has no handle.
        self.numbers: list[int] = []
        # Metadata of each packed tensor, compared on recompute; of kept tensors, the metadata of MISSING.
        self.facts: list[Any] = []
        # How far random streams had moved, by the indices of packed tensors before which they had; at index -1 where they
        # began. None where a rerun draws anew.
        self.positions: dict[int, Position] | None = None
        self.fingerprints: Sequence[Any] = ()  # of values; empty if values are not compared
        self.without_grad: list[int] = []  # the numbers of packed tensors that require no grad

    def saved(self) -> list[Saved]:
        return [self._describe(index) for index, alive in enumerate(self.alive()) if alive]

    def describe(self, packed: Any) -> Saved:
        return self._describe(packed[1] - FIRST)

    def _describe(self, index: int) -> Saved:
        noted = self.facts[index]
        if not isinstance(noted, tuple):  # metadata is not compared
            return Saved(format_path(self.path), index, Reason.DROPPED, None, None, None)
        shape, dtype = noted[:2]
        return Saved(format_path(self.path), index, Reason.DROPPED, shape, dtype, nbytes_of(shape, dtype))

    def alive(self) -> list[bool]:
        return list(map(_UNHELD.__lt__, map(getrefcount, self.numbers)))

    # Under the frame's lock; leaves the frame as it was, whether it returns or raises. MISSING stands for a tensor not wanted,
    # or modified in the course of the recompute, which has to be asked for alone.
    @abc.abstractmethod
    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Brings back tensors, of all living handles if None: an entry for each handle, up to the last one wanted."""

    def made(self) -> Made | None:
        """Returns the devices and streams of a recompute's values, to hand these to other streams; None without a device."""
        return None if self.current is None else Made(self.current)

    def open_pass(self, index: int) -> Pass:
        """Returns this frame's pass in the scope of this thread; recomputes if there is none yet (Rule 3)."""
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        with self._lock:
            if key == -1:  # nothing tells when values may go, so this handle alone is brought back, for the caller alone
                return Pass(self.recompute((index,)), self.made())
            if self.is_split and graph_task_id() != -1:
                return self._open_split_pass(index)
            opened = self.passes.get(key)  # a group's, or one that another engine thread has just made (Rule 11)
            if opened is None:
                opened = Pass(self.recompute(None), self.made())
                self.keep_pass(opened, graph_task_scope(key) if group is None else group_scope(group))
            return opened

    def _open_split_pass(self, index: int) -> Pass:
        """Returns a pass, for the caller alone, with the value of one handle in a backward in two parts."""
        kept = self.passes.get(SPLIT)
        value = kept.value_at(index, self.alive) if isinstance(kept, SplitPass) else MISSING
        if not isinstance(kept, SplitPass) or value is MISSING:
            kept = SplitPass(self.recompute(None), self.made())
            self.passes = {SPLIT: kept}
            value = kept.values[index]
            if value is MISSING:  # modified in the course of the recompute: such a value has to be asked for alone
                return Pass(self.recompute((index,)), self.made())
        if not kept.uses.hand_out(index, value):
            kept.values[index] = MISSING
        return Pass({index: value}, kept.made)

    def reopen_pass(self, opened: Pass, index: int) -> torch.Tensor:
        """Brings back a value missing in a pass: taken before, or packed after the recompute."""
        with self._lock:
            taken = opened.taken
            wanted = [index]
            if index in taken:
                if graph_exec_group() is not None:
                    raise overlap_error(self.path, index)
                # A node asked twice for its tensors asks for all, in order. The values taken after this one come back too: one
                # recompute serves the node, and each value is asked for soon.
                since = taken.index(index)
                wanted += taken[since + 1 :]
                del taken[since:]
            values = self.recompute(frozenset(wanted))
            if opened.made is not None:
                opened.made.renew()
            opened.values.extend([MISSING] * (len(values) - len(opened.values)))
            for position in wanted:
                if position < len(values):  # values of dead handles are not brought back
                    opened.values[position] = values[position]
            value: torch.Tensor = opened.values[index]
            if value is MISSING and len(wanted) > 1:
                value = self.recompute((index,))[index]
            opened.values[index] = MISSING
            taken.append(index)
            if value is MISSING:
                raise InternalError(
                    f"a recompute of region {'/'.join(format_path(self.path))!r} did not bring back tensor {index}. This is a "
                    "bug in ckpt_hooks. Please report it with the program.",
                    region=format_path(self.path),
                )
            return value
