"""Whether a rerun that has all it came for may as well return.

A rerun is ended by an exception, thrown through the operator that saves the last value (:mod:`ckpt_hooks._filling`). It passes
a dozen frames of torch's own code, and for each of them tables are searched that are in no cache by then: 7 us after ten small
operators, 20 to 25 us in a transformer block whose whole step takes 600. Where all that is left is to add what the operator
returns to something and to return it, that is quicker done.

Only where nobody can tell, though: what forward does after its last saved tensor must not happen twice, be it a counter, a
``print`` or a write to a cache. So what is left to do is read from the code (:mod:`ckpt_hooks._bytecode`) of the Python frames
between the operator and the rerun, once for each place in it. The operator itself goes on from where it saves, so it has to be
one that writes to nothing. What it costs is not known beforehand: it must have saved small tensors only.
"""

from __future__ import annotations

from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from ._bytecode import Reader
from ._refit import PLAIN

__all__ = ["MOST_ELEMENTS", "is_all_but_done", "is_small"]

#: How many elements a tensor may have at most that the last operator saves: beyond, the operator may cost more than to stop.
MOST_ELEMENTS = 1 << 13

#: How many frames of Python may be between the operator and the rerun.
_MOST_FRAMES = 20

#: How many places in code are remembered.
_MOST_PLACES = 1 << 12


def is_small(tensor: torch.Tensor) -> bool:
    """Returns whether an operator that saves a tensor may go on for all that it saves of this one.

    Operators on tensors of other classes may do anything, since those are told of each.
    """
    return type(tensor) in PLAIN and tensor.numel() <= MOST_ELEMENTS


class _Place:
    """Where a frame is, and whether anything is left to do there.

    Attributes:
        is_done: Whether nothing is, as long as names are bound as they were.
        own: Names among the globals of the frame, and what they were bound to. The namespace itself is not held: it may be
            somebody's who has done with it.
        others: Names in namespaces of modules of Python, and what they were bound to.
        code: The frame's code, held since another could have the identity of one that is gone.
    """

    __slots__ = ("code", "is_done", "others", "own")

    def __init__(self, frame: FrameType, *, is_innermost: bool) -> None:
        reader = Reader(frame)
        self.is_done = reader.is_done(is_innermost=is_innermost)
        self.own, self.others, self.code = reader.own, reader.others, frame.f_code


#: Places by identity of code and instruction: of frames that have called an operator, and of those that have called others.
_innermost: dict[tuple[int, int], _Place] = {}
_outer: dict[tuple[int, int], _Place] = {}

#: Places of operators in reruns of a kind of function where something was left to do, by identities that are not held: should
#: another object have got one of them, a rerun is stopped that might have returned.
_left_to_do: set[tuple[int, int, int]] = set()


def is_all_but_done(frame: FrameType, function: Any, until: CodeType) -> bool:
    """Returns whether nothing is left to do in any frame from that of an operator up to that of the rerun.

    Args:
        frame: What has called the operator that is saving a tensor.
        function: What the rerun calls.
        until: The code that calls it.
    """
    kind = function.__code__ if type(function) is FunctionType else type(function)
    case = id(frame.f_code), frame.f_lasti, id(kind)
    if case in _left_to_do:
        return False
    places, current = _innermost, frame
    for _ in range(_MOST_FRAMES):
        code = current.f_code
        if code is until:
            return places is _outer
        place = places.get((id(code), current.f_lasti)) or _look_at(current, places)
        if not place.is_done:
            break
        for name, value in place.own:
            if current.f_globals.get(name) is not value:
                return False
        for namespace, name, value in place.others:
            if namespace.get(name) is not value:
                return False
        outer = current.f_back
        if outer is None:  # another thread's
            break
        places, current = _outer, outer
    _make_room_in(_left_to_do)
    _left_to_do.add(case)
    return False


def _look_at(frame: FrameType, places: dict[tuple[int, int], _Place]) -> _Place:
    _make_room_in(places)
    place = places[id(frame.f_code), frame.f_lasti] = _Place(frame, is_innermost=places is _innermost)
    return place


def _make_room_in(places: dict[Any, Any] | set[Any]) -> None:
    if len(places) >= _MOST_PLACES:
        places.clear()
