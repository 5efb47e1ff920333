"""Variables of functions, closed over or global: noted when forward begins, and lent to a rerun as forward found them.

``for l in layers: h = checkpoint(lambda y: l(y), h)`` binds ``l`` anew for each layer, and each of the functions reads the one
variable ``l``. So while a rerun runs, the variable has the content found by forward. Afterwards the variable has its content
from before the rerun, whether bound by the caller, by the function itself (``nonlocal count``), or by a stopped rerun.

The variable itself is lent. A copy of the function with its own variables would be out of step with other users of the
variable: a hook that binds a closed-over variable, a helper that reads the same global, a function held by an object.

A tensor with a history is held without the history. With it, ``last = checkpoint(lambda y: f(y, last.detach()), x)`` would keep
the graphs of all earlier forwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from threading import Condition, Lock, get_ident
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch

from ckpt_hooks._core.modes import unseen
from ckpt_hooks._core.patience import INTERVAL, Patience
from ckpt_hooks._core.threads import on_engine_thread
from ckpt_hooks._tensors.copies import alias_with_history, as_kind
from ckpt_hooks._torch import is_kept_anyway

from .closure_scan import NOTHING, Reached, facts_of
from .module_plan import ModulePlan

__all__ = ["Loan", "StandIns", "contents_of", "lend", "take_back", "variables_in", "variables_of"]

#: The content of an unassigned variable.
_ABSENT = object()
_ALWAYS_ABSENT = repeat(_ABSENT)


@unseen
def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    return as_kind(tensor.detach(), type(tensor))


_with_history = unseen(alias_with_history)


#: Arguments of a rerun which differ from the tensors of forward, by the ``id`` of the latter.
StandIns = Mapping[int, torch.Tensor]
_NO_STAND_INS: StandIns = {}


class _Upstream:
    """The stand-in for a tensor with a history: the tensor itself while it lives, then another tensor on the same memory.

    If the tensor was an argument too, and a rerun gets another tensor for the argument, the rerun finds the same tensor here.
    """

    __slots__ = ("_alias", "_id", "_reference", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._alias, self._id = weakref.ref(tensor), _alias_of(tensor), id(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version

    def _tensor(self, stand_ins: StandIns) -> torch.Tensor | None:
        return stand_ins[self._id] if self._id in stand_ins else self._reference()

    def is_content(self, value: Any, stand_ins: StandIns) -> bool:
        """Whether a variable with this value has the noted content."""
        return value is not None and value is self._tensor(stand_ins)

    def content(self, stand_ins: StandIns) -> Any:
        """Returns an equivalent of the noted content."""
        tensor = self._tensor(stand_ins)
        return _with_history(self._alias, self._version) if tensor is None else tensor

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the alias and noted version of a dead tensor whose memory was written to since."""
        is_changed = self._reference() is None and self._version >= 0 and self._alias._version != self._version
        return [(self._alias, self._version)] if is_changed else []


class _Tuple:
    """The stand-in for a tuple with such tensors."""

    __slots__ = ("_entries",)

    def __init__(self, entries: tuple[Any, ...]) -> None:
        self._entries = entries

    def is_content(self, value: Any, stand_ins: StandIns) -> bool:
        """Whether a variable with this value has the noted content."""
        is_alike = type(value) is tuple and len(value) == len(self._entries)
        return is_alike and all(map(_is_content, self._entries, value, repeat(stand_ins)))

    def content(self, stand_ins: StandIns) -> Any:
        """Returns an equivalent of the noted content."""
        return tuple(map(_content, self._entries, repeat(stand_ins)))

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the changed aliases of tensors in the tuple; see :meth:`_Upstream.changed`."""
        return _changed(self._entries)


def _noted(value: Any) -> Any:
    """Returns the stand-in for a content: the content itself, except for tensors with a history and tuples of these."""
    if isinstance(value, torch.Tensor):
        try:
            return _Upstream(value) if value.requires_grad and not is_kept_anyway(value) else value
        except RuntimeError:  # a multi-output view of a modified base, which has lost its graph
            return value
    if type(value) is tuple:
        entries = tuple(map(_noted, value))
        return value if all(map(is_, entries, value)) else _Tuple(entries)
    return value


def _is_content(noted: Any, value: Any, stand_ins: StandIns) -> bool:
    return noted is value or (type(noted) in _STANDING and noted.is_content(value, stand_ins))


def _content(noted: Any, stand_ins: StandIns) -> Any:
    return noted.content(stand_ins) if type(noted) in _STANDING else noted


def _changed(contents: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    return [found for noted in contents if type(noted) in _STANDING for found in noted.changed()]


_STANDING = (_Upstream, _Tuple)

#: The variables of one function: cells; a namespace and names in it; stand-ins for the contents when forward began; and
#: whether the function binds any.
_Entry = tuple[tuple[CellType, ...], dict[str, Any], tuple[str, ...], tuple[Any, ...], bool]
_NO_CELLS: tuple[CellType, ...] = ()

#: Types of contents without a stand-in.
_PLAIN = frozenset({type(None), bool, int, float, str, type, ModuleType, FunctionType, BuiltinFunctionType, object})


def variables_of(function: Any, reached: Reached, plans: Sequence[ModulePlan] = ()) -> Sequence[_Entry] | None:
    """Notes the variables of functions; None if there are none.

    Functions of torch and of this package are left out: their variables (of a compiler, say) are their own business.

    Args:
        function: The region's function.
        reached: The result of the closure scan of ``function``.
        plans: The plans of the modules found.
    """
    if reached is not NOTHING:
        entries = [entry for one in reached.functions if (entry := _entry_of(one)) is not None]
        for plan in plans:
            entries += variables_in(plan)
        return entries or None
    only = _entry_of(function) if type(function) is FunctionType else None
    return None if only is None else (only,)


def variables_in(plan: ModulePlan) -> Sequence[_Entry]:
    """Notes the variables of the functions held by a module and its submodules."""
    return [entry for one in plan.functions if (function := one()) is not None and (entry := _entry_of(function))]


def contents_of(entries: Sequence[_Entry] | None) -> list[Any]:
    """Returns the noted contents of variables, without the namespaces around."""
    return [] if entries is None else [contents for _, _, _, contents, _ in entries]


def _entry_of(function: FunctionType) -> _Entry | None:
    names, binds, is_library = facts_of(function)
    cells = function.__closure__ or _NO_CELLS
    if is_library or not (cells or names):
        return None
    namespace = function.__globals__
    contents = _read(cells, namespace, names)
    if not _PLAIN.issuperset(map(type, contents)):
        contents = tuple(map(_noted, contents))
    return cells, namespace, names, contents, binds


_contents_of: Callable[[CellType], Any] = attrgetter("cell_contents")


def _read(cells: tuple[CellType, ...], namespace: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    if not cells:
        return tuple(map(namespace.get, names, _ALWAYS_ABSENT))
    try:
        return (*map(_contents_of, cells), *map(namespace.get, names, _ALWAYS_ABSENT))
    except ValueError:
        return (*map(_content_or_absent, cells), *map(namespace.get, names, _ALWAYS_ABSENT))


def _content_or_absent(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _write(entry: _Entry, contents: Sequence[Any], now: Sequence[Any]) -> None:
    """Writes the contents of variables that differ from ``now``."""
    cells, namespace, names, *_ = entry
    for cell, content, old in zip(cells, contents, now, strict=False):
        if content is _ABSENT and old is not _ABSENT:
            del cell.cell_contents
        elif content is not old:
            cell.cell_contents = content
    skipped = len(cells)
    for name, content, old in zip(names, contents[skipped:], now[skipped:], strict=True):
        if content is _ABSENT and old is not _ABSENT:
            namespace.pop(name, None)
        elif content is not old:
            namespace[name] = content


def _places(entry: _Entry) -> list[Any]:
    """Returns a key for each variable, equal where the variable is the same."""
    cells, namespace, names, *_ = entry
    return [*map(id, cells), *((id(namespace), name) for name in names)]


#: The use of variables by a running rerun: its thread, its variables, and the places of variables lent to it.
_Use = tuple[int, Sequence[_Entry], "frozenset[Any]"]
_NO_PLACES: frozenset[Any] = frozenset()
_NO_USE: _Use = (0, (), _NO_PLACES)


class Loan:
    """Variables lent to a rerun, some bound to another content at present, or bound by the rerun itself.

    Of two reruns on different threads with different contents for a shared variable, one waits for the other.
    """

    __slots__ = ("_before", "_entries", "_stand_ins", "_use")

    def __init__(self, entries: Sequence[_Entry], stand_ins: StandIns) -> None:
        """Waits until no other thread has the variables, and lends them."""
        self._entries, self._stand_ins = entries, stand_ins
        self._before: list[Sequence[Any]] = []
        self._use = _NO_USE
        try:
            self._lend()
        except BaseException:
            self.end()
            raise

    def _lend(self) -> None:
        with _lock:
            _loans.add(id(self))
            self._use = self._look()
            _waiting.append(self)
            patience = Patience() if on_engine_thread() else None
            while (other := next(filter(self._is_in_conflict, list(_uses.values())), None)) is not None:
                if not _turn.wait(None if patience is None else INTERVAL) and patience is not None:
                    patience.look(other[0])
                self._use = self._look()
            _waiting.remove(self)
            _uses[id(self._use)] = self._use
            for entry in self._entries:
                now = _read(*entry[:3])
                self._before.append(now)
                if self._use[2]:
                    notes = zip(entry[3], now, strict=True)
                    contents = [
                        old if _is_content(noted, old, self._stand_ins) else _content(noted, self._stand_ins)
                        for noted, old in notes
                    ]
                    _write(entry, contents, now)

    def _look(self) -> _Use:
        """Finds the variables with another content than in forward."""
        found = [zip(_places(entry), entry[3], _read(*entry[:3]), strict=True) for entry in self._entries]
        lent = [place for place, noted, value in chain(*found) if not _is_content(noted, value, self._stand_ins)]
        return get_ident(), self._entries, frozenset(lent)

    def _is_in_conflict(self, other: _Use) -> bool:
        thread, entries, lent = self._use
        if other[0] == thread or not (lent or other[2]):
            return False
        return not (lent.isdisjoint(_all_places(other[1])) and other[2].isdisjoint(_all_places(entries)))

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the aliases and noted versions of dead tensors whose memory was written to since."""
        return [found for entry in self._entries for found in _changed(entry[3])]

    def end(self) -> None:
        """Restores the contents from before the loan."""
        with _lock:
            for entry, before in reversed(list(zip(self._entries, self._before, strict=False))):  # some, where __init__ failed
                _write(entry, before, _read(*entry[:3]))
            _uses.pop(id(self._use), None)
            _loans.discard(id(self))
            if self in _waiting:  # an exception ended the wait
                _waiting.remove(self)
            if _waiting:
                _turn.notify_all()


def lend(entries: Sequence[_Entry], stand_ins: StandIns = _NO_STAND_INS) -> Loan | _Use:
    """Lends a rerun its variables with the contents found by forward, until :func:`take_back` is called with the result.

    A rerun with unchanged variables, which binds none, takes no lock: it registers its use, then looks for loans. A loan is
    counted first, and then looks for uses. So of a use and a loan at the same time, at least one sees the other.

    Args:
        entries: The variables.
        stand_ins: Arguments of the rerun which differ from the tensors of forward.
    """
    use = get_ident(), entries, _NO_PLACES
    _uses[id(use)] = use
    if not _loans and _are_as_noted(entries, stand_ins):
        return use
    del _uses[id(use)]
    return Loan(entries, stand_ins)


def take_back(lent: Loan | _Use) -> None:
    """Ends a loan or use begun by :func:`lend`."""
    if type(lent) is Loan:
        lent.end()
        return
    _uses.pop(id(lent), None)
    if _waiting:
        with _lock:
            _turn.notify_all()


def _are_as_noted(entries: Sequence[_Entry], stand_ins: StandIns) -> bool:
    """Whether variables have the noted contents, and the functions bind none of the variables."""
    for cells, namespace, names, noted, binds in entries:
        if binds:
            return False
        now = _read(cells, namespace, names)
        if not (all(map(is_, noted, now)) or all(map(_is_content, noted, now, repeat(stand_ins)))):
            return False
    return True


def _all_places(entries: Sequence[_Entry]) -> list[Any]:
    return [place for entry in entries for place in _places(entry)]


# Of all threads.
_uses: dict[int, _Use] = {}
_loans: set[int] = set()
_waiting: list[Loan] = []
_lock = Lock()
_turn = Condition(_lock)
