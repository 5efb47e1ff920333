"""Whether a rerun that has all it came for may as well return.

A rerun is ended by an exception, thrown through the operator that saves the last value (:mod:`ckpt_hooks._filling`). It passes
a dozen frames of torch's own code, and for each of them tables are searched that are in no cache by then: 7 us after ten small
operators, 20 to 25 us in a transformer block whose whole step takes 600. Where all that is left is to add what the operator
returns to something and to return it, that is quicker done.

Only where nobody can tell, though: what forward does after its last saved tensor must not happen twice, be it a counter, a
``print`` or a write to a cache. So what is left to do is read from the code (:mod:`ckpt_hooks._bytecode`) of the Python frames
between the operator and the rerun, once for each way through them. The operator itself goes on from where it saves, so it has
to be one that writes to nothing. What all that costs is not known beforehand, in memory least of all: tensors have to be small,
those among the arguments as well as those that the operator saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import _getframe
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from ._bytecode import MOST_ELEMENTS, SIMPLE, Reader, is_run_by, is_small
from ._refit import PLAIN
from ._runtime.passes import MISSING
from ._torch import CALL_OF_FORWARD, CALL_OF_MODULES

__all__ = ["MOST_ELEMENTS", "WayOut", "is_all_but_done", "is_small"]

#: How many frames of Python may be between the operator and the rerun.
_MOST_FRAMES = 20

#: Types of what may be among the arguments and the values besides tensors.
_NO_TENSORS = SIMPLE | {type(MISSING)}

#: How many cases are remembered, and how many ways for each.
_MOST_CASES = 1 << 12
_MOST_WAYS = 4


class _Place(NamedTuple):
    """Where a frame is on a way.

    Attributes:
        depth: How deep the frame is in the stack, seen from :func:`is_all_but_done`.
        code: What it runs.
        instruction: Where it is in that, as an offset.
        own: Names among its globals that have to be bound to certain things of torch. The namespace itself is not held: it may
            be somebody's who has done with it.
    """

    depth: int
    code: CodeType
    instruction: int
    own: list[tuple[str, Any]]


class _Way:
    """A way from an operator to the rerun, and whether anything is left to do there.

    Attributes:
        is_done: Whether nothing is, as long as names are bound as they were.
        code: That of the innermost frame, held since another code could have its identity when it is gone.
        own: What the innermost frame's names have to be bound to, as in a place.
        places: Where the others were. Those of ``torch.nn.Module`` that call a module's forward are left out: it takes as long
            to look at a frame as to do all else, and a module is what was called there.
        others: Names in other namespaces, of torch and Python, and what they were bound to.
    """

    __slots__ = ("code", "is_done", "others", "own", "places")

    def __init__(self, frames: Sequence[FrameType], function: Any) -> None:
        """Judges a way.

        Args:
            frames: The frames on it, that of the rerun included.
            function: What the rerun calls.
        """
        self.code = frames[0].f_code
        self.own: list[tuple[str, Any]] = []
        self.places: list[_Place] = []
        self.others: list[tuple[Any, str, Any]] = []
        self.is_done = 1 < len(frames) <= _MOST_FRAMES and is_run_by(frames[-2].f_code, function)
        called: CodeType | None = None
        for depth, frame in enumerate(frames):
            own: list[tuple[str, Any]] = []
            if self.is_done and frame is not frames[-1]:
                reader = Reader(frame, called)
                self.is_done, own = reader.is_done(), reader.own
                self.others += reader.others
            called = frame.f_code
            if depth == 0:
                self.own = own
            elif called is not CALL_OF_MODULES and called is not CALL_OF_FORWARD:
                self.places.append(_Place(depth + 2, called, frame.f_lasti, own))


#: An operator in a kind of function: identities of its code and of the function, with the instruction that it is at.
_Case = tuple[int, int, int]

_ways: dict[_Case, list[_Way]] = {}
#: Those that have been met once, and those where something was left to do when they were looked at for the first time. Should
#: others have their identities by now, no more is lost than the time that it takes to stop.
_met: set[_Case] = set()
_left_to_do: set[_Case] = set()


#: What there is to know of a rerun for it to return: the code that calls the function, what it calls, and with which arguments.
WayOut = tuple[CodeType, Any, Sequence[Any], Mapping[str, Any]]


def is_all_but_done(innermost: FrameType, values: Sequence[torch.Tensor], leaf: torch.Tensor | None, way_out: WayOut) -> bool:
    """Returns whether nothing is left to do in any frame from that of an operator up to that of the rerun.

    Args:
        innermost: The frame that has called the operator that is saving a tensor: that of the caller's caller.
        values: What the rerun has brought back, of which the last one is that tensor, and those before may be of the same
            operator.
        leaf: The latest leaf that was saved, perhaps by it as well.
        way_out: The rerun.
    """
    until, function, args, kwargs = way_out
    kind = id(function.__code__ if type(function) is FunctionType else type(function))
    case = id(innermost.f_code), innermost.f_lasti, kind
    if kwargs or case in _left_to_do:
        return False
    for one in (*values[-2:], leaf, *args):
        if type(one) in PLAIN:  # as is_small, without a call for each
            if one.numel() > MOST_ELEMENTS:
                return False
        elif type(one) not in _NO_TENSORS:
            return False
    for way in _ways.get(case, ()):
        try:
            for depth, code, instruction, own in way.places:
                frame = _getframe(depth)
                if frame.f_code is not code or frame.f_lasti != instruction:
                    break
                for name, value in own:
                    if frame.f_globals.get(name) is not value:
                        return False
            else:
                for name, value in way.own:
                    if innermost.f_globals.get(name) is not value:
                        return False
                for namespace, name, value in way.others:
                    if namespace.get(name) is not value:
                        return False
                return way.is_done
        except ValueError:  # so deep is the stack not
            pass
    return _look_at(innermost, function, until, case)


def _look_at(innermost: FrameType, function: Any, until: CodeType, case: _Case) -> bool:
    """Judges a way, from the second time on that its case is met: code that runs once is not worth to be read."""
    for remembered in (_ways, _met, _left_to_do):
        if len(remembered) >= _MOST_CASES:
            remembered.clear()
    known = _ways.get(case, [])
    if case not in _met or len(known) >= _MOST_WAYS:
        _met.add(case)
        return False
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) <= _MOST_FRAMES:
        frames.append(frame)
        if frame.f_code is until:
            break
        frame = frame.f_back
    way = _Way(frames, function)
    if not (way.is_done or known) or frame is None:  # frame: of another thread
        _left_to_do.add(case)
        return False
    _ways[case] = [*known, way]
    return way.is_done
