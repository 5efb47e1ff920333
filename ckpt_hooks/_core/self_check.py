"""The self-check: in some passes of a module, function or line, recomputed values are compared with forward's.

A rerun may miss Python state, and no list of such state is complete. Comparing passes 1, 2, 4, 8, ... shows a miss early.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from typing import Any, Literal

from torch.nn import Module

from .misuse import wrong

Level = Literal["error", "warn", False]

_LEVELS: dict[str, Level] = {"error": "error", "warn": "warn", "0": False}
#: From this pass on a difference is only a warning: a check that skips most passes must not end a long run.
LATE = 64
#: The most places of a function whose closures differ in numbers or strings; all further closures share one place.
_MOST_PLACES = 64
#: How many first passes are all compared in a place that many modules share: passes 1, 2, 4, ... might skip a module.
_ALL_OF_SHARED = 16
#: How many passes of a shared place are compared in a row before the first of their backwards: more than models have layers.
_IN_A_ROW = 128


def _from_environment() -> Level:
    value = os.environ.get("CKPT_HOOKS_SELF_CHECK", "error")
    if value not in _LEVELS:
        raise ValueError(f"CKPT_HOOKS_SELF_CHECK is {value!r}. Set it to error, warn, or 0 for no check.")
    return _LEVELS[value]


class _SelfCheck:
    level: Level = _from_environment()


settings = _SelfCheck()


class set_self_check:  # noqa: N801 -- used like a function
    """Sets what happens when a recompute computes other values than forward did: an error, a warning, or nothing.

    A region compares the values that backward brings back with those of forward in passes 1, 2, 4, 8, ... of each module or
    function. Modules whose regions are opened by the same ``with`` statement, and objects of a class, count together: their
    first 16 passes are compared, then fewer and fewer. A compared pass takes some hundred microseconds more for each saved
    tensor on a CPU. Forwards without a backward take that too, but fewer and fewer of them. The setting holds for all threads,
    from the call on, or for a ``with`` block. The environment variable ``CKPT_HOOKS_SELF_CHECK`` (``error``, ``warn`` or
    ``0``) gives the initial setting.

    Args:
        level: ``"error"``, the default, raises a :class:`ckpt_hooks.DeterminismError` before pass 64 of a module or function
            and warns from then on. ``"warn"`` only warns. Each module or function warns once. Passes count anew after a change
            of a module's flags, such as by ``train()``. False switches these comparisons off, not those of
            ``determinism_check="values"`` and of dispatch modes.

    Raises:
        ValueError: If ``level`` is something else.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint, set_self_check
        >>> x = torch.ones(2, requires_grad=True)
        >>> with set_self_check("warn"):
        ...     checkpoint(torch.sin, x).sum().backward()
    """

    def __init__(self, level: Level) -> None:
        if not (level is False or (isinstance(level, str) and level in ("error", "warn"))):
            raise wrong(level, "level", "'error', 'warn' or False", "Leave the call out for 'error', the default.", ValueError)
        self._before, settings.level = settings.level, level

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        settings.level = self._before


class CheckedPlace:
    """The passes of a module, function or line, of which some are compared."""

    __slots__ = ("_due", "_first", "_gap", "_is_shared", "_left", "has_warned", "num_parts", "number", "owner")

    def __init__(self, owner: Any, *, is_shared: bool = False) -> None:
        self.number, self._due, self.has_warned, self.num_parts = 0, 1, False, 0
        self.owner = None if owner is None else weakref.ref(owner)
        self._is_shared = is_shared  # whether modules that nothing tells apart share this place
        self._left = self._gap = _IN_A_ROW if is_shared else 1
        self._first: weakref.ref[Any] | None = None  # of the samples in a row

    def is_of(self, owner: Any) -> bool:
        return self.owner is None or self.owner() is owner

    def is_due(self) -> bool:
        """Counts a pass, and returns whether its recompute is compared."""
        number = self.number = self.number + 1
        return number >= self._due

    def sampled(self, sample: Any) -> None:
        # Some forwards have no backward, such as those of a validation, and of a thousand in a row none has been compared. So
        # another pass is sampled although this one waits for its backward, but each time after twice as many.
        if self._first is None:
            self._first = weakref.ref(sample)
        self._left -= 1
        if self._left <= 0 or self._first() is None:  # its graph ended without a backward
            self._due, self._gap = self.number + self._gap, 2 * self._gap
            self._begin_row()

    def _begin_row(self) -> None:
        self._left, self._first = _IN_A_ROW if self._is_shared else 1, None

    def compared(self) -> None:
        self._gap = _IN_A_ROW if self._is_shared else 1
        self._begin_row()
        bits = self.number.bit_length()
        self._due = 1 << bits  # the next power of two
        if self._is_shared:  # if twelve layers share a place, powers of two reach only some layers
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
