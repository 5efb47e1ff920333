"""Frames and handles: what stands in the graph for a tensor that was not kept.

Who owns whom is the whole of Rule 9. Autograd owns handles, a handle owns its frame, the frame does not own its handles. So a
frame lives exactly as long as some node of the graph may still ask for one of its tensors, and everything the frame holds
(saved inputs, ambient state, recomputed values) dies with the last such node, by reference counting alone.

Which handles are alive is what a frame has to know before it recomputes. A handle is a tuple of its frame and a number, and the
number is an integer object that only the handle and the frame's list of numbers hold: as long as it has a holder besides the
list, its handle is alive. (A weak reference to each handle says the same; it costs a class of handles and a third more for each
saved tensor.)
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import Any

import torch

from ckpt_hooks._torch import graph_exec_group, graph_task_id
from ckpt_hooks.errors import InternalError, MutationError, OverlapError

from .groups import group_scope
from .mutation import mutated
from .passes import MISSING, NO_PASSES, Ending, HandsOut, Pass, Scope, drop_at_end, graph_task_scope
from .paths import RegionPath, format_path, region_in_words
from .patience import patient
from .threads import this_thread

__all__ = ["FIRST", "Frame", "Handle", "Kept", "Mark", "Observer", "mutated_leaf", "overlap_error"]

#: The number of the first tensor that a frame saves. Up here every sum is a new object; small integers are shared by all that
#: use them, and their holders would tell nothing.
FIRST = 1 << 20

# Stands in autograd's graph for one saved tensor: the frame that can bring it back, and how many tensors the frame had saved
# before, counted from FIRST.
Handle = tuple["Frame", int]

# Stands in autograd's graph for a saved tensor that is kept: the tensor, its version when it was saved, and the path of the
# region that saved it. That is a leaf that requires grad, a parameter mostly, which costs nothing since the graph holds it in
# any case; or a tensor that nothing can be compared of, a nested one without a shape.
Kept = list[Any]

# Left by a region inside a frame: how many tensors the frame had saved before, how many the region saves in it, and the region.
Mark = tuple[int, int, RegionPath]

# How many holders of a number in a list of numbers ``getrefcount`` tells of.
_UNHELD = next(map(getrefcount, [FIRST + 1]))


def mutated_leaf(kept: Kept) -> MutationError:
    """Returns the error for a kept leaf that was modified in place since, for which plain autograd raises as well."""
    tensor, version, path = kept
    return mutated(tensor, version, path, f"that {region_in_words(path)} saved")


def overlap_error(path: RegionPath, index: int) -> OverlapError:
    """Returns the error for a saved tensor that two backwards of one group ask for."""
    region = format_path(path)
    return OverlapError(
        f"Performing two backward calls that overlap (i.e. require the same saved tensor) inside one GraphExecGroup is not "
        f"allowed: tensor {index} of region {'/'.join(region)!r} was already unpacked in this group. Run the two backwards in "
        "groups of their own, or without one.",
        region=region,
    )


_NO_ENDINGS: tuple[Ending, ...] = ()


class Observer:
    """Who watches frames (:mod:`.observers`); each method does nothing unless overridden.

    Calls come from whatever thread does the thing, with the frame's lock held during a recompute. An observer that keeps a
    frame or a tensor keeps it alive.
    """

    def entered(self, frame: Frame) -> None:
        """Forward of a region begins."""

    def packed(self, frame: Frame, index: int, tensor: torch.Tensor) -> None:
        """A tensor was dropped for a handle."""

    def exited(self, frame: Frame, error: BaseException | None) -> None:
        """Forward of a region ended, by an exception or not."""

    def recomputing(self, frame: Frame) -> None:
        """A recompute begins."""

    def recomputed(self, frame: Frame, error: BaseException | None) -> None:
        """A recompute ended, by an exception or not."""

    def unpacked(self, frame: Frame, index: int, tensor: torch.Tensor) -> None:
        """A tensor that was brought back is handed to autograd."""


class Frame(abc.ABC):
    """One checkpointed region, of either kind: owns what was packed in it and knows how to bring it back.

    Attributes:
        numbers: One a tensor packed, in order: held by its handle too as long as that is alive, and by nothing else. A tensor
            that was kept has a number without a handle.
        facts: Of each tensor packed in forward, what a recompute is compared with; those of :data:`MISSING` where it was kept.
        fingerprints: Of each tensor packed in forward, what its values are compared by; empty where they are not compared.
        without_grad: Which of them required no grad.
        passes: Values brought back, by the key of the scope that they were brought back for.
        path: The region's name and those around it.
        complete: Whether forward has ended. Backward inside forward meets frames that are not.
        recomputing: Whether a recompute is running, which makes this the outermost frame of its thread meanwhile.
        observer: Who watches this frame, or None.
        current: What was current on accelerators in forward; None where none is in use.
        release: Has the pack hook let go of the frame; set as long as forward runs.
        thread: The thread that runs the outermost region around it.
    """

    __slots__ = (
        "__weakref__",
        "_endings",
        "_lock",
        "complete",
        "current",
        "facts",
        "fingerprints",
        "numbers",
        "observer",
        "parent",
        "passes",
        "path",
        "recomputing",
        "release",
        "thread",
        "without_grad",
    )

    release: Callable[[], None]

    def __init__(self, name: str, parent: Frame | None, observer: Observer | None) -> None:
        self.numbers: list[int] = []
        self.facts: list[Any] = []
        self.fingerprints: Sequence[Any] = ()
        self.without_grad: list[int] = []
        self.passes = NO_PASSES
        self._endings = _NO_ENDINGS
        self.parent = parent
        if parent is None:
            self.thread = this_thread()
            self.path: RegionPath = (name, None)
        else:
            self.thread = parent.thread
            self.path = (name, parent.path)
        self.complete = False
        self.recomputing = False
        self.observer = observer
        # Reentrant, since user code that runs in a recompute may itself call backward over this frame. Locks are taken from
        # a frame towards its parents only, so two threads cannot wait for each other.
        self._lock = threading.RLock()
        self.current: Any = None

    def alive(self) -> list[bool]:
        """Returns of each tensor packed whether its handle is alive."""
        return list(map(_UNHELD.__lt__, map(getrefcount, self.numbers)))

    @abc.abstractmethod
    def recompute(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Brings tensors back.

        Called with the frame's lock held. Leaves the frame as it was, whether it returns or raises.

        Args:
            wanted: Indices of the handles to fill; None for all that are alive.

        Returns:
            One entry a handle, up to the last one wanted: the tensor, detached, or :data:`MISSING` where it was not wanted, or
            where it was modified in the course of the recompute and has to be asked for by itself.
        """

    def note_inside(self, count: int, path: RegionPath) -> None:  # noqa: B027 (frames that replay need not know)
        """Is told that a region inside this one is about to save inputs in it, or has saved what its policy keeps.

        Args:
            count: How many tensors.
            path: That region.
        """

    def made(self) -> HandsOut | None:
        """Returns what hands the values of a recompute to streams of devices; None where no device is in use."""
        return None

    def _bring_back(self, wanted: Collection[int] | None) -> list[torch.Tensor]:
        """Recomputes, and tells the observer."""
        observer = self.observer
        if observer is None:
            return self.recompute(wanted)
        observer.recomputing(self)
        error: BaseException | None = None
        try:
            return self.recompute(wanted)
        except BaseException as found:
            error = found
            raise
        finally:
            observer.recomputed(self, error)
            del error  # its traceback has this call, which would keep it alive in turn

    def keep_pass(self, opened: Any, scope: Scope) -> None:
        """Files a pass until its scope ends."""
        if not self.passes:
            self.passes = {scope.key: opened}
            self._endings = (drop_at_end(scope, self.passes),)
        else:  # of backwards that overlap
            self.passes[scope.key] = opened
            self._endings = (*(ending for ending in self._endings if ending()), drop_at_end(scope, self.passes))

    def open_pass(self, index: int) -> Pass:
        """Returns this frame's pass in the scope that is running on this thread; recomputes if there is none yet (Rule 3).

        Args:
            index: The handle that is being unpacked. Outside of a backward nobody says when values may go, so that handle
                alone is brought back, for the caller alone.
        """
        group = graph_exec_group()
        key = graph_task_id() if group is None else group_scope(group).key
        with self._lock if self.current is None else patient(self._lock, self.path):
            if key == -1:
                return Pass(self._bring_back((index,)), self.made())
            opened = self.passes.get(key)  # a group's, or one that another engine thread has just made (Rule 11)
            if opened is None:
                opened = Pass(self._bring_back(None), self.made())
                self.keep_pass(opened, graph_task_scope(key) if group is None else group_scope(group))
            return opened

    def reopen_pass(self, opened: Pass, index: int) -> torch.Tensor:
        """Brings back a value that a pass does not hold: one that was taken before, or packed after the recompute.

        A node that is asked for its tensors twice asks for all of them again, in order. So everything that was taken after
        this one is brought back with it: one recompute serves the whole node, and nothing lies around that is not about to
        be asked for.

        Raises:
            OverlapError: In a group, whose backwards must not share a tensor.
        """
        with self._lock if self.current is None else patient(self._lock, self.path):
            taken = opened.taken
            wanted = [index]
            if index in taken:
                if graph_exec_group() is not None:
                    raise overlap_error(self.path, index)
                since = taken.index(index)
                wanted += taken[since + 1 :]
                del taken[since:]
            values = self._bring_back(frozenset(wanted))
            if opened.made is not None:
                opened.made.renew()
            opened.values.extend([MISSING] * (len(values) - len(opened.values)))
            for position in wanted:
                if position < len(values):  # handles that are dead by now are not brought back
                    opened.values[position] = values[position]
            value = opened.values[index]
            if value is MISSING and len(wanted) > 1:
                value = self._bring_back((index,))[index]
            opened.values[index] = MISSING
            taken.append(index)
            if value is MISSING:
                raise InternalError(
                    f"a recompute of region {'/'.join(format_path(self.path))!r} did not bring back tensor {index}. This is a "
                    "bug in ckpt_hooks. Please report it with the program.",
                    region=format_path(self.path),
                )
            return value
