"""Variables of functions, closed over or global, and contents of containers and objects, lent to a rerun as forward found them.

``for l in layers: h = checkpoint(lambda y: l(y), h)`` binds ``l`` anew for each layer, and each of the functions reads the one
variable ``l``. So while a rerun runs, the variable has the content found by forward. Afterwards the variable has its content
from before the rerun, whether bound by the caller, by the function itself (``nonlocal count``), or by a stopped rerun. The same
goes for the entries and attributes of the containers and objects that the function reaches, a batch or a cache, say.

The variable itself is lent. A copy of the function with its own variables would be out of step with other users of the
variable: a hook that binds a closed-over variable, a helper that reads the same global, a function held by an object.

A tensor with a history is held without the history. With it, ``last = checkpoint(lambda y: f(y, last.detach()), x)`` would keep
the graphs of all earlier forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import is_
from threading import Condition, Lock, get_ident
from typing import Any

from .notes import ABSENT, ContentNote, Lent, Root, present
from .reached_values import Entry, Walk, read
from .tensor_note import GoneError, StandIns, TensorNote

_NO_STAND_INS: StandIns = {}


class Names:
    """The variables of a region's functions, and the containers and objects to which these and arguments lead.

    Attributes:
        entries: The variables.
        is_changed: Whether forward changed containers and objects; True until forward has ended.
        roots: The containers and objects, and their notes.
    """

    __slots__ = ("entries", "is_changed", "roots")

    def __init__(self, entries: Sequence[Entry], roots: Sequence[Root]) -> None:
        self.entries, self.roots = entries, roots
        self.is_changed = True

    def settle(self) -> None:
        """Ends forward."""
        self.is_changed = not all(noted.holds(value) for value, noted in self.roots)

    def places(self) -> frozenset[Any]:
        """Returns a key for each place, equal where the place is the same."""
        found = chain(*map(_places, self.entries), *(noted.identities() for _, noted in self.roots))
        return frozenset(found)

    def contents(self) -> list[Any]:
        """Returns the noted contents, without the namespaces around."""
        return [*(contents for _, _, _, contents, _ in self.entries), self.roots]


def names_of(walk: Walk) -> Names | None:
    """Returns the finds of a walk that have names; None if there are none."""
    return Names(walk.entries, walk.roots) if walk.entries or walk.roots else None


def _is_content(noted: Any, value: Any, stand_ins: StandIns) -> bool:
    """Whether a variable with a value has the noted content."""
    if noted is value:
        return True
    if type(noted) is TensorNote:
        return noted.is_of(value, stand_ins)
    return type(noted) is ContentNote and noted.holds(value)


def _content(noted: Any, now: Any, lent: Lent) -> Any:
    """Returns the noted content of a variable; the present content if that is gone."""
    try:
        return present(noted, lent)
    except GoneError:
        return now


def _write(entry: Entry, contents: Sequence[Any], now: Sequence[Any]) -> None:
    """Writes the contents of variables that differ from ``now``."""
    cells, namespace, names, *_ = entry
    for cell, content, old in zip(cells, contents, now, strict=False):
        if content is ABSENT and old is not ABSENT:
            del cell.cell_contents
        elif content is not old:
            cell.cell_contents = content
    skipped = len(cells)
    for name, content, old in zip(names, contents[skipped:], now[skipped:], strict=True):
        if content is ABSENT and old is not ABSENT:
            namespace.pop(name, None)
        elif content is not old:
            namespace[name] = content


def _places(entry: Entry) -> list[Any]:
    """Returns a key for each variable, equal where the variable is the same."""
    cells, namespace, names, *_ = entry
    return [*map(id, cells), *((id(namespace), name) for name in names)]


#: The use of places by a running rerun: its thread, its places, and those lent to it.
_Use = tuple[int, Names, "frozenset[Any]"]
_NO_PLACES: frozenset[Any] = frozenset()
_NO_USE: _Use = (0, Names((), ()), _NO_PLACES)


class VariableLoan:
    """Places lent to a rerun, some with another content at present, or changed by the rerun itself.

    Of two reruns on different threads with different contents for a shared place, one waits for the other.

    Attributes:
        lent: The lent contents of containers and objects.
    """

    __slots__ = ("_before", "_holds", "_names", "_use", "lent")

    def __init__(self, names: Names, stand_ins: StandIns) -> None:
        """Waits until no other thread has the places, and lends them."""
        self._names, self.lent = names, Lent(stand_ins)
        self._before: list[Sequence[Any]] = []
        self._use, self._holds = _NO_USE, True
        try:
            self._lend()
        except BaseException:
            self.end()
            raise

    def _lend(self) -> None:
        entries, roots = self._names.entries, self._names.roots
        with _lock:
            _loans.add(id(self))
            self._use = self._look()
            _waiting.append(self)
            while any(map(self._is_in_conflict, list(_uses.values()))):
                _turn.wait()
                self._use = self._look()
            _waiting.remove(self)
            _uses[id(self._use)] = self._use
            lent = self.lent
            for entry in entries:
                now = read(*entry[:3])
                self._before.append(now)
                if self._use[2]:
                    contents = [
                        old if _is_content(noted, old, lent.stand_ins) else _content(noted, old, lent)
                        for noted, old in zip(entry[3], now, strict=True)
                    ]
                    _write(entry, contents, now)
            if not self._holds:
                lent.met.update((id(value), value) for value, _ in roots)
                for value, noted in roots:
                    noted.fill(value, lent)

    def _look(self) -> _Use:
        """Finds the places whose content differs from forward's, and the places changed by forward."""
        names, stand_ins = self._names, self.lent.stand_ins
        self.lent = Lent(stand_ins)
        holding = [noted.holds(value, self.lent) for value, noted in names.roots]
        self._holds = all(holding)
        found = [zip(_places(entry), entry[3], read(*entry[:3]), strict=True) for entry in names.entries]
        lent = [place for place, noted, value in chain(*found) if not _is_content(noted, value, stand_ins)]
        for (_, noted), holds in zip(names.roots, holding, strict=True):
            if names.is_changed or not holds:
                lent += noted.identities()
        return get_ident(), names, frozenset(lent)

    def _is_in_conflict(self, other: _Use) -> bool:
        thread, names, lent = self._use
        if other[0] == thread or not (lent or other[2]):
            return False
        return not (lent.isdisjoint(other[1].places()) and other[2].isdisjoint(names.places()))

    def end(self) -> None:
        """Restores the contents from before the loan."""
        with _lock:
            self.lent.restore()
            before = zip(self._names.entries, self._before, strict=False)  # some of these, where __init__ failed
            for entry, contents in reversed(list(before)):
                _write(entry, contents, read(*entry[:3]))
            _uses.pop(id(self._use), None)
            _loans.discard(id(self))
            if self in _waiting:  # an exception ended the wait
                _waiting.remove(self)
            if _waiting:
                _turn.notify_all()


def lend(names: Names, stand_ins: StandIns = _NO_STAND_INS) -> VariableLoan | _Use:
    """Lends a rerun its places with the contents found by forward, until :func:`take_back` is called with the result.

    Args:
        names: The places.
        stand_ins: Arguments of the rerun which differ from the tensors of forward.
    """
    # No lock for a rerun with unchanged variables alone, most reruns: it registers its use, then looks for loans. A loan is
    # counted, then looks for uses. Of two at the same time at least one sees the other.
    if not names.roots:
        use = get_ident(), names, _NO_PLACES
        _uses[id(use)] = use
        if not _loans and _are_as_noted(names.entries, stand_ins):
            return use
        del _uses[id(use)]
    return VariableLoan(names, stand_ins)


def take_back(lent: VariableLoan | _Use) -> None:
    """Ends a loan or use begun by :func:`lend`."""
    if type(lent) is VariableLoan:
        lent.end()
        return
    _uses.pop(id(lent), None)
    if _waiting:
        with _lock:
            _turn.notify_all()


def _are_as_noted(entries: Sequence[Entry], stand_ins: StandIns) -> bool:
    """Whether variables have the noted contents, and the functions bind none of the variables."""
    for cells, namespace, names, noted, binds in entries:
        if binds:
            return False
        now = read(cells, namespace, names)
        if not (all(map(is_, noted, now)) or all(map(_is_content, noted, now, repeat(stand_ins)))):
            return False
    return True


# Of all threads.
_uses: dict[int, _Use] = {}
_loans: set[int] = set()
_waiting: list[VariableLoan] = []
_lock = Lock()
_turn = Condition(_lock)
