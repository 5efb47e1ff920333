"""The self-check: in some passes of a module, function or line, recomputed values are compared with forward's.

A rerun may miss Python state, and no list of such state is complete. Comparing passes 1, 2, 4, 8, ... shows a miss early.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from torch.nn import Module

#: From this pass on a difference is only a warning: a check that skips most passes must not end a long run.
LATE = 64
#: The most places of a function whose closures differ in numbers or strings; all further closures share one place.
_MOST_PLACES = 64
#: How many first passes are all compared in a place that many modules share: passes 1, 2, 4, ... might skip a module.
_ALL_OF_SHARED = 16
#: How many passes of a shared place are compared in a row before the first of their backwards: more than models have layers.
_IN_A_ROW = 128


class CheckedPlace:
    """The passes of a module, function or line, of which some are compared."""

    _first: weakref.ref[Any] | None  # of the samples in a row
    __slots__ = ("_due", "_first", "_gap", "_left", "_row", "has_warned", "num_parts", "number", "owner")

    def __init__(self, owner: Any, *, is_shared: bool = False) -> None:
        self.number, self._due, self.has_warned, self.num_parts = 0, 1, False, 0
        self.owner = None if owner is None else weakref.ref(owner)
        # How many passes are sampled in a row: more than one if modules that nothing tells apart share this place.
        self._row = _IN_A_ROW if is_shared else 1
        self._gap = 1
        self._begin_row()

    def is_of(self, owner: Any) -> bool:
        return self.owner is None or self.owner() is owner

    def is_due(self) -> bool:
        """Counts a pass, and returns whether its recompute is compared."""
        number = self.number = self.number + 1
        return number >= self._due

    def sampled(self, sample: Any) -> None:
        # Some forwards have no backward, such as those of a validation, and of a thousand in a row none has been compared. So
        # another row of passes is sampled although none of this row was compared, but each time after twice as many.
        if self._first is None:
            self._first = weakref.ref(sample)
        self._left -= 1
        is_full = self._left <= 0
        if is_full or self._first() is None:  # its graph ended without a backward
            gap = max(self._gap, self._row) if is_full else self._gap
            self._due, self._gap = self.number + gap, 2 * gap
            self._begin_row()

    def _begin_row(self) -> None:
        self._left, self._first = self._row, None

    def compared(self) -> None:
        self._gap = 1
        self._begin_row()
        bits = self.number.bit_length()
        self._due = 1 << bits  # the next power of two
        if self._row > 1:  # if twelve layers share a place, powers of two reach only some layers
            self._due = self.number + 1 if self.number < _ALL_OF_SHARED else self._due + bits


Places = dict[Any, CheckedPlace]
#: Places by ``id``, of functions that reach no module and of modules under policies; places of lines, by code and instruction.
_places: Places = {}
_lines: Places = {}
#: Places of a module's replicas, by the ``id`` of the table of hooks that the replicas share with the module.
_of_replicas: dict[int, tuple[weakref.ref[Any], tuple[Places, Places]]] = {}


def places_of_replica(module: Module) -> Places | None:
    """Returns the places inside a replica of DataParallel, which all replicas share; None for another module."""
    # Replicas are made anew in each step: with places of their own each step would be a first step, and compared.
    if "_is_replica" not in vars(module):
        return None
    hooks = module._forward_hooks
    key = id(hooks)
    shared = _of_replicas.get(key)
    if shared is None:
        shared = _of_replicas[key] = weakref.ref(hooks, lambda _: _of_replicas.pop(key, None)), ({}, {})
    return shared[1][module.training]


def place_of(function: Any, places: Places | None) -> CheckedPlace:
    """Returns the place of a function; ``places`` belong to the first module in the function's reach, if any."""
    owner: Any = function
    is_shared = False
    if isinstance(function, Module):
        if places is None:
            places = places_of_replica(function)
        if places is not None:  # the places are of this module itself
            return places.get(None) or places.setdefault(None, CheckedPlace(None))
        key: Any = id(function)
    else:
        inner = getattr(function, "__func__", function)
        owner = getattr(inner, "__code__", None)
        if owner is None:  # a callable object, perhaps a new object in each step: the place is of its class
            owner, is_shared = type(inner), places is None
        key = id(owner)
        if (closure := getattr(inner, "__closure__", None)) is not None:
            key = _with_atoms(key, closure)
    return _place_at(key, owner, _places if places is None else places, is_shared=is_shared)


def place_of_line(frame: types.FrameType | None, inside: dict[str, Any]) -> CheckedPlace:
    """Returns the place of the innermost line of a stack, past the frames of the file with the globals ``inside``."""
    # The module cannot tell places apart: it is in a local variable, and reading ``f_locals`` keeps all variables alive.
    while frame is not None and frame.f_globals is inside:
        frame = frame.f_back
    if frame is None:
        return CheckedPlace(None)
    code = frame.f_code
    key = id(code), frame.f_lasti
    place = _lines.get(key)
    if place is None:
        place = _lines[key] = CheckedPlace(None, is_shared=True)
        place.owner = weakref.ref(code, functools.partial(_lines.pop, key))  # ``pop`` takes the reference as default
    return place


def _place_at(key: Any, owner: Any, places: Places, *, is_shared: bool) -> CheckedPlace:
    place = places.get(key)
    if place is None or not place.is_of(owner):
        if type(key) is tuple and not is_shared:
            whole = _place_at(key[0], owner, places, is_shared=False)
            if whole.num_parts >= _MOST_PLACES:
                return whole
            whole.num_parts += 1
        place = places[key] = CheckedPlace(owner, is_shared=is_shared)
    return place


def _with_atoms(key: int, closure: Any) -> Any:
    # ``lambda h: self.layers[index](h)`` runs another layer for each number.
    atoms = []
    for cell in closure:
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            continue
        if type(value) in (int, str):
            atoms.append(value)
    return (key, *atoms) if atoms else key
