"""Frames, the common part of both kinds of region, and the stack of a thread's open frames.

Autograd owns handles, a handle owns its frame, the frame does not own its handles. So a frame lives exactly as long as some
node may still ask for a tensor of it, and what it holds dies with the last such node, by reference counting alone (Rule 9).
"""

from __future__ import annotations

import abc
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from ckpt_hooks.errors import OverlapError

from .descriptions import RegionPath, format_path, region_in_words
from .holdings import Holding, Reason, Saved
from .packed import CallHandle, KeptTensor, TapeHandle
from .scopes import NO_PASSES, Ending, Scope, with_ending

if TYPE_CHECKING:
    from .events import Observer, Watch

R = TypeVar("R")


class Label(NamedTuple):
    """Identifies an external or policy-kept tensor of a nested recorded region, so that a rerun can match it."""

    reason: Reason
    read: tuple[int, str, int]  # the number of tensors saved before, the operator that read the tensor, and its argument
    requires_grad: bool
    kind: Any  # dtype, shape, device

    @property
    def may_be_more(self) -> bool:
        """Whether forward may have made this tensor inside the region, where a rerun finds it outside, as in a filled cache."""
        return not self.requires_grad and self.reason not in (Reason.POLICY, Reason.NAME)


# A nested region's note in its parent frame: the number of tensors that the parent saved before the region, the number that the
# region saves, labels of the saved tensors (recorded regions only), and the region's path.
RegionMark = tuple[int, int, Sequence[Label | None], RegionPath]


def places_of(wanted: Sequence[Label | None], labels: Sequence[Label | None]) -> Sequence[int] | None:
    """Returns the position in ``labels`` of each wanted label, in order; None if a match is missing or ambiguous."""
    if labels == wanted:
        return range(len(labels))
    left = Counter(labels)
    left.subtract(wanted)
    if any(count and (label is None or count < 0 or label in wanted or not label.may_be_more) for label, count in left.items()):
        return None
    places: dict[Label | None, deque[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label, deque()).append(place)
    return [places[label].popleft() for label in wanted]


def overlap_error(path: RegionPath, index: int) -> OverlapError:
    region = format_path(path)
    return OverlapError(
        f"Performing two backward calls that overlap (i.e. require the same saved tensor) inside one GraphExecGroup is not "
        f"allowed: tensor {index} of {region_in_words(region)} was already unpacked in this group. Run each of the two "
        "backwards in a group of its own, or without a group.",
        region=region,
    )


_NO_ENDINGS: tuple[Ending, ...] = ()


class Frame(abc.ABC):
    """One checkpointed region, of either kind: owns the tensors packed in the region, and brings them back."""

    __slots__ = (
        "__weakref__",
        "_endings",
        "_lock",
        "complete",
        "current",
        "late",
        "parent",
        "passes",
        "path",
        "recomputing",
        "release",
        "watch",
    )

    kind: ClassVar[str]  # "function" or "recorded"
    draws_anew: bool  # whether a recompute draws other random numbers than forward
    release: Callable[[], None]  # makes the pack hook let go of the frame; set during forward

    def __init__(
        self, name: str, parent: Frame | None, observers: tuple[Observer, ...], module: torch.nn.Module | None = None
    ) -> None:
        self.passes = NO_PASSES  # recomputed values, by the key of the scope that asked for them
        self._endings = _NO_ENDINGS
        self.parent = parent
        self.path: RegionPath = (name, None if parent is None else parent.path)
        self.complete = False  # whether forward has ended: backward inside forward meets incomplete frames
        self.recomputing = False  # whether a recompute of this frame is running
        # Ends this region once its inner regions have ended; set if the program left this region before them.
        self.late: Callable[[], None] | None = None
        self.watch: Watch | None = None
        # Reentrant, since user code that runs in a recompute may itself call backward over this frame. Locks are taken from
        # a frame towards its parents only, so two threads cannot wait for each other.
        self._lock = threading.RLock()
        self.current: Any = None  # devices and streams of forward; None without an accelerator in use
        if observers:
            from .events import Watch

            outer = None if parent is None else parent.watch
            self.watch = Watch(self, self.path, outer, observers, module, in_recompute=is_in_recompute(parent))

    @abc.abstractmethod
    def saved(self) -> list[Saved]:
        """Returns the saved tensors which backward may still ask for, in the order of saving, without recomputing."""

    @abc.abstractmethod
    def held(self) -> list[Holding]:
        """Returns each tensor kept alive by this frame, with the reason; leaves which require grad are left out."""

    def policy_in_words(self) -> str | None:
        return None

    @abc.abstractmethod
    def owners(self) -> list[Frame]:
        """Returns the frames that this frame keeps alive because it needs their tensors."""

    @abc.abstractmethod
    def describe(self, packed: Any) -> Saved:
        """Describes the saved tensor of a handle of this frame."""

    def note_inside(self, labels: Sequence[Label | None], path: RegionPath) -> Sequence[int]:
        """Notes tensors that a nested region hands to this frame; returns the positions of the tensors to save, in order."""
        return range(len(labels))

    def observed(self, recompute: Callable[..., R], *args: Any, in_order: bool = True) -> R:
        """Runs a recompute and tells observers; ``in_order``: it runs all of forward's operators in their order."""
        watch = self.watch
        assert watch is not None
        watch.tell("recomputing", in_order=in_order)
        error: BaseException | None = None
        try:
            return recompute(*args)
        except BaseException as raised:
            error = raised
            raise
        finally:
            watch.tell("recomputed", error)
            del error  # or a cycle stays: the error's traceback refers to this call

    def keep_pass(self, opened: Any, scope: Scope) -> None:
        """Stores a pass, which is dropped when its scope ends."""
        if not self.passes:
            self.passes = {scope.key: opened}
            self._endings = (weakref.ref(scope, partial(self.passes.pop, scope.key)),)
        else:  # backwards overlap: each has its own pass
            self.passes[scope.key] = opened
            self._endings = with_ending(self._endings, scope, self.passes)


def is_in_recompute(frame: Frame | None) -> bool:
    while frame is not None and not frame.recomputing:
        frame = frame.parent
    return frame is not None


def packed_in(held: Any) -> KeptTensor | CallHandle | TapeHandle | None:
    """Returns the kept tensor or handle that the graph holds for a region, also inside a wrapper; None for other objects."""
    held = getattr(held, "packed", held)
    if type(held) is tuple and len(held) == 2 and isinstance(held[0], Frame):
        return CallHandle(held)
    return held if isinstance(held, (KeptTensor, CallHandle, TapeHandle)) else None


# Autograd's stack of hooks gives each saved tensor to the innermost frame (Rule 1); this stack has the frame's parents. A
# recompute replaces the stack, and runs as if no frame were active (Rule 3).
class FrameStack(threading.local):
    """A thread's open frames: the innermost frame, which links to the frame around, and so on."""

    innermost: Frame | None = None  # the frame whose forward or recompute is running


stack = FrameStack()


def is_drawn_anew(frame: Frame | None) -> bool:
    """Whether recomputes of a frame, or of a frame around, draw other random numbers than forward."""
    while frame is not None:
        if frame.draws_anew:
            return True
        frame = frame.parent
    return False


def is_recomputing() -> bool:
    """Says whether this thread is inside the recompute of a region.

    Use it around code that must not run twice, such as a log line, a counter or an auxiliary loss.
    :func:`ckpt_hooks.checkpoint` runs the whole function again in backward. A recorded region runs only the forward of a custom
    ``autograd.Function`` again.

    Returns:
        True inside a recompute, at any depth. False in forward and outside of regions.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, is_recomputing
        >>> def block(x):
        ...     if not is_recomputing():
        ...         print("forward")
        ...     return x.sin().cos()
        >>> checkpoint(block, torch.ones(2, requires_grad=True)).sum().backward()
        forward
    """
    return is_in_recompute(stack.innermost)
