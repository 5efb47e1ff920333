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
from typing import Any

import torch

from ._bytecode import MOST_ELEMENTS, SIMPLE, Reader, is_run_by, is_small
from ._refit import PLAIN
from ._runtime.passes import MISSING
from ._torch import CALL_OF_FORWARD, CALL_OF_MODULES

__all__ = ["MOST_ELEMENTS", "WayOut", "is_all_but_done", "is_small", "way_out_of"]

#: How many frames of Python may be between the operator and the rerun.
_MOST_FRAMES = 20

#: Types of what may be among the arguments and the values besides tensors.
_NO_TENSORS = SIMPLE | {type(MISSING)}

#: How many kinds of functions are remembered, how many cases of each, and how many ways for each of these.
_MOST_KINDS = 1 << 12
_MOST_CASES = 1 << 8
_MOST_WAYS = 4

#: After how many times that something was left to do functions of a kind are not asked about any more, if they never returned.
_PATIENCE = 32

#: Names that have to be bound to certain things of torch, in one namespace.
_Names = list[tuple[str, Any]]

#: Where a frame is on a way: how deep in the stack, seen from :func:`is_all_but_done`; what it runs; where it is in that, as an
#: offset; and names among its globals. The namespace itself is not held: it may be somebody's who has done with it.
_Place = tuple[int, CodeType, int, _Names]


class _Way:
    """A way from an operator to the rerun, and whether anything is left to do there.

    Attributes:
        is_done: Whether nothing is, as long as names are bound as they were.
        code: That of the innermost frame, held since another code could have its identity when it is gone.
        own: What names among the innermost frame's globals have to be bound to.
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
        self.own: _Names = []
        self.places: list[_Place] = []
        others: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.is_done = 1 < len(frames) <= _MOST_FRAMES and is_run_by(frames[-2].f_code, function)
        called: CodeType | None = None
        for depth, frame in enumerate(frames):
            own: _Names = []
            if self.is_done and frame is not frames[-1]:
                reader = Reader(frame, called)
                self.is_done, own = reader.is_done(), reader.own
                others.update(((id(namespace), name), (namespace, name, value)) for namespace, name, value in reader.others)
            called = frame.f_code
            if depth == 0:
                self.own = own
            elif called is not CALL_OF_MODULES and called is not CALL_OF_FORWARD:
                self.places.append((depth + 2, called, frame.f_lasti, own))
        self.others = list(others.values())


#: An operator: the identity of the code that calls it, and the instruction there.
_Case = tuple[int, int]


class _Kind:
    """What is known of functions of one kind: of one code, or objects of one class.

    Attributes:
        ways: Those that were judged, by their cases; some of each have nothing left to do.
        met: Cases that have been met once.
        left_to_do: Cases in which something was left to do when they were looked at for the first time. Should another code
            have the identity of one by now, no more is lost than the time that it takes to stop.
        refusals: How many times one of these was met again.
    """

    __slots__ = ("left_to_do", "met", "refusals", "ways")

    def __init__(self) -> None:
        self.ways: dict[_Case, list[_Way]] = {}
        self.met: set[_Case] = set()
        self.left_to_do: set[_Case] = set()
        self.refusals = 0


_kinds: dict[int, _Kind] = {}

#: What there is to know of a rerun for it to return: the code that calls the function, the function, its arguments, its kind.
WayOut = tuple[CodeType, Any, Sequence[Any], _Kind]


def way_out_of(until: CodeType, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WayOut | None:
    """Returns what there is to know of a rerun for it to return, None where it is to be stopped in any case.

    Args:
        until: The code that calls the function.
        function: What it calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    key = id(function.__code__ if type(function) is FunctionType else type(function))
    kind = _kinds.get(key)
    if kind is None:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        kind = _kinds[key] = _Kind()
    if kwargs or (kind.refusals >= _PATIENCE and not kind.ways):
        return None
    return until, function, args, kind


def is_all_but_done(innermost: FrameType, values: Sequence[torch.Tensor], leaf: torch.Tensor | None, way_out: WayOut) -> bool:
    """Returns whether nothing is left to do in any frame from that of an operator up to that of the rerun.

    Args:
        innermost: The frame that has called the operator that is saving a tensor: that of the caller's caller.
        values: What the rerun has brought back, of which the last one is that tensor, and those before may be of the same
            operator.
        leaf: The latest leaf that was saved, perhaps by it as well.
        way_out: The rerun.
    """
    until, function, args, kind = way_out
    case = id(innermost.f_code), innermost.f_lasti
    if case in kind.left_to_do:
        kind.refusals += 1
        return False
    for one in (*values[-2:], leaf, *args):
        if type(one) in PLAIN:  # as is_small, without a call for each
            if one.numel() > MOST_ELEMENTS:
                return False
        elif type(one) not in _NO_TENSORS:
            return False
    for way in kind.ways.get(case, ()):
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
    return _look_at(innermost, function, until, kind, case)


def _look_at(innermost: FrameType, function: Any, until: CodeType, kind: _Kind, case: _Case) -> bool:
    """Judges a way, from the second time on that its case is met: code that runs once is not worth to be read."""
    for remembered in (kind.ways, kind.met, kind.left_to_do):
        if len(remembered) >= _MOST_CASES:
            remembered.clear()
    known = kind.ways.get(case, [])
    if case not in kind.met or len(known) >= _MOST_WAYS:
        kind.met.add(case)
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
        kind.left_to_do.add(case)
        return False
    kind.ways[case] = [*known, way]
    return way.is_done
