"""The journal of a region: notes of all that its function reaches besides arguments, lent to reruns.

A rerun sees each place as forward saw it; after the rerun the place has its former content again. Values bound by modules are
compared when forward begins, when a rerun begins, and when the rerun ends: if a list to which forward appends is cleared before
backward, only the last comparison shows that the rerun has appended.
"""

from __future__ import annotations

import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, is_not
from typing import Any, Literal

import torch
from torch.nn import Module
from torch.nn.modules import module as torch_module

from ckpt_hooks._core.mutation import GONE, fused_steps, stepped_since
from ckpt_hooks._tensors.copies import data_of, is_theirs, same_layout
from ckpt_hooks._torch.tensors import is_freed, past_all_modes, share_counter, storage_of, version_of

from .containers import Content, Part
from .contents import WRITES, Complain, Contents, Undo
from .notes import GoneError, Held, Memory, Note, TensorNote, notes_in
from .places import ATOMS, parts_of, same
from .trees import Bound, Tree, dicts_of, is_of_framework, tree_of
from .walk import Walk, globals_used_by, walk_from

_version: Callable[[Any], int] = attrgetter("_version")
_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage

_ChangedTensors = list[tuple[torch.Tensor, int]]
#: torch's dictionaries of forward hooks that run in every module.
_GLOBAL_HOOKS = tuple(
    value for name, value in vars(torch_module).items() if name.startswith("_global_forward") and isinstance(value, dict)
)
_NO_HOOKS: list[Content] = [{} for _ in _GLOBAL_HOOKS]


def _hooks_now() -> list[Content]:
    return list(map(dict, _GLOBAL_HOOKS)) if any(_GLOBAL_HOOKS) else _NO_HOOKS


def _are_modules_called_elsewhere() -> bool:
    """Whether another thread is inside a module's forward, where a change of global hooks would take effect."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # this frame: its variable ``frames`` would refer to the frame, in a cycle
    code = Module._call_impl.__code__
    return any(frame.f_code is code for thread_frame in frames.values() for frame, _ in traceback.walk_stack(thread_frame))


#: Empty values, which journals without trees share.
_NO_TREES: tuple[list[Any], ...] = ([], [], [], [], [])
_NO_STORAGES: dict[Tree, list[torch.UntypedStorage]] = {}


class Journal:
    __slots__ = (
        "_outside",
        "_steps",
        "_storages",
        "_versions",
        "bound",
        "contents",
        "emptied",
        "generators",
        "held",
        "hooks",
        "kept",
        "roots",
        "tensors",
        "trees",
        "with_buffers",
    )

    trees: list[Tree]
    bound: list[Bound]
    held: list[Sequence[Any]]
    tensors: list[Collection[int]]  # by tree, the ``id`` of each tensor that may be an argument as well
    _versions: list[list[int]]  # by tree, the versions of parameters when forward began

    def __init__(self, walk: Walk | None, trees: Sequence[tuple[Tree, Bound]], *, preserve_buffers: bool) -> None:
        self.with_buffers = preserve_buffers
        self.generators: Sequence[torch.Generator] = () if walk is None else walk.generators
        has_contents = walk is not None
        self._storages: dict[Tree, list[torch.UntypedStorage]] = _NO_STORAGES
        self.trees, self.bound, self.held, self._versions, self.tensors = _NO_TREES
        if trees:
            self.trees, self.bound, self.held, self._versions, self.tensors = [], [], [], [], []
        for tree, bound in trees:
            parameters = bound.parameters
            self.trees.append(tree)
            self.bound.append(bound)
            # The journal holds values that nothing else may hold when a rerun begins, but not tensors without gradients, which
            # frameworks free.
            self.held.append(parameters if tree.holds_parameters else tree.get_held(bound.flat))
            self._versions.append(list(map(_version, parameters)))
            history = tree.history
            # Storages are held while forward runs, since ``.data =`` in forward may drop them: in a first forward, and in every
            # forward after that has happened.
            if not history.num_forwards or history.exchanges:
                self._storages = {**self._storages, tree: list(map(_storage, parameters))}
            self.tensors.append(tree.tensors)
            if tree.generators:
                self.generators = [*self.generators, *tree.generators]
            has_contents = has_contents or tree.has_contents()
        self.kept: Sequence[Any] = ()  # storages that forward has exchanged, and parameters that forward has unbound
        self.emptied: Collection[int] = ()
        self._steps = fused_steps.count
        self.roots: Sequence[tuple[Any, Note]] = ()
        self.hooks = _hooks_now()
        self._outside: Sequence[tuple[torch.Tensor, int]] = ()
        outside: Sequence[TensorNote] = ()
        if walk is not None:
            self.roots = walk.roots
            if walk.tensors:
                self.tensors = [*self.tensors, walk.tensors.keys()]
            outside = tuple(walk.tensors.values())
            known = [note.leaf if note.alias is None else note.alias for note in outside if note.requires_grad]
            self._outside = tuple([(leaf, leaf._version) for leaf in known if leaf is not None and not leaf.is_inference()])
        self.contents: Contents | None = None
        if has_contents and preserve_buffers and not torch.is_inference_mode_enabled():
            contents = self._contents_of(outside)
            self.contents = contents if contents.seen else None

    def _contents_of(self, outside: Sequence[TensorNote]) -> Contents:
        contents = Contents()
        for tree, bound in zip(self.trees, self.bound, strict=True):
            is_first = tree.history.num_forwards == 0
            if tree.group is not None:
                contents.add_group(tree.group)
            for note in tree.others:
                contents.add(note, note.tensor(), may_wait=is_first)
            if is_first or tree.history.writes_parameters:
                pairs = [pair for pair in zip(tree.parameters, bound.parameters, strict=True) if not is_of_framework(pair[1])]
                contents.add_parameters(pairs, may_wait=is_first)
            for module in [module for refer in tree.scripted if (module := refer()) is not None]:
                for buffer in module.buffers(recurse=False):
                    contents.add(TensorNote(buffer, owner=len(tree.notes)), buffer)
        for note in outside:
            if not note.requires_grad:
                contents.add(note, note.tensor())
        return contents

    def close(self, *, failed: bool) -> tuple[torch.Tensor, int] | None:
        """Ends forward; returns the result of :meth:`Contents.settle`."""
        late = None if self.contents is None else self.contents.settle(failed=failed)
        for tree, bound, versions in zip(self.trees, self.bound, self._versions, strict=True):
            history, parameters = tree.history, bound.parameters
            if not history.num_forwards or list(map(_version, parameters)) != versions:
                tree.note_writes(parameters, versions)
            if tree in self._storages:  # otherwise a rerun raises if a storage is gone
                self._note_exchanged(tree, parameters)
            history.num_forwards += not failed
            if tree.has_frozen:  # the journal does not hold frozen parameters, so those that forward has unbound are kept
                self.kept = [*self.kept, *tree.unbound(parameters)]
            bound.let_go()
        self._storages = _NO_STORAGES
        return late

    def _note_exchanged(self, tree: Tree, parameters: Sequence[torch.Tensor]) -> None:
        """Keeps the former storages of parameters whose storages forward has exchanged."""
        storages = self._storages[tree]
        if not any(map(is_not, storages, map(_storage, parameters))):
            return
        tree.history.exchanges = True
        kept, emptied = [*self.kept], {*self.emptied}
        for parameter, storage in zip(parameters, storages, strict=True):
            if _storage(parameter) is storage:
                continue
            if parameter.numel():
                kept.append(storage)
            else:
                emptied.add(id(parameter))  # a framework emptied the parameter, and fills it before a rerun reads it
        self.kept, self.emptied = kept, emptied

    def changed(self, loan: JournalLoan) -> _ChangedTensors:
        """Returns tensors and parameters without a copy that were written to since forward began, with their versions then."""
        steps = self._steps if self._steps != fused_steps.count else None
        pairs = [*self._outside]
        for tree, versions, bound in zip(self.trees, self._versions, loan.bound, strict=True):
            if bound is None:
                leaves: Sequence[Any] = [loan.held.get(note.number, loan.met.get(note.number)) for note in tree.parameters]
            else:
                leaves = bound.parameters
                if steps is None and list(map(_version, leaves)) == versions:
                    continue
            pairs += [(leaf, version) for leaf, version in zip(leaves, versions, strict=True) if isinstance(leaf, torch.Tensor)]
        if not pairs:
            return [] if self.contents is None else self.contents.changed()
        copied = set() if self.contents is None else self.contents.copied()
        changed = []
        for leaf, version in pairs:
            if (leaf._version != version or (steps is not None and stepped_since(leaf, steps))) and id(leaf) not in copied:
                changed.append((leaf, version))
        return changed if self.contents is None else changed + self.contents.changed()

    def note_written(self, tensor: torch.Tensor) -> bool:
        """Makes later forwards copy a tensor; returns whether they will."""
        notes = [note for tree in self.trees for note in tree.parameters if note.number == id(tensor)]
        if any(note.use in WRITES for note in notes):
            return True
        return self.contents is not None and self.contents.note_written(tensor)

    def storages(self) -> frozenset[int | None]:
        """Returns the storages of all tensors that the function reaches."""
        storages = set() if self.contents is None else {*self.contents.storages(uncopied=True)}
        storages.update(storage_of(value) for values in self.held for value in values if isinstance(value, torch.Tensor))
        return frozenset(storages).union(storage_of(tensor) for tensor, _ in self._outside)

    def lends(self) -> bool:
        is_written = self.contents is not None and self.contents.is_written()
        return is_written or any(tree.history.changes for tree in self.trees)

    def notes(self) -> list[tuple[Any, Note]]:
        notes = [note for tree in self.trees for note in tree.notes]
        return [(value, note) for note in notes if (value := note.reference()) is not None] + [*self.roots]


def _is_dull(function: Any) -> bool:
    if type(function) is not types.FunctionType:
        return type(function) in ATOMS
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return False
    names, is_library = globals_used_by(function)
    return is_library or not names


def journal_of(
    function: Any, objects: Sequence[Any], *, preserve_buffers: bool, is_needed: bool = False
) -> Journal | Literal[False] | None:
    """Returns notes of all that a call reaches; None if there is nothing, False if a lazy module has no parameters yet."""
    # The first forward of a lazy module makes its parameters, so it cannot run twice.
    has_hooks = any(_GLOBAL_HOOKS)
    if objects or has_hooks:
        pass
    elif isinstance(function, Module):
        tree_with_values = tree_of(function)
        if tree_with_values[0].is_lazy:
            return False
        if not tree_with_values[0].has_functions:
            return Journal(None, (tree_with_values,), preserve_buffers=preserve_buffers)
    elif not is_needed and _is_dull(function):
        return None
    walk = walk_from(function, objects)
    trees = list(map(tree_of, walk.modules))
    if any(tree.is_lazy for tree, _ in trees):
        return False
    # Modules that only these functions reach get no trees: the ``self`` of a hook may be the whole model.
    functions = [called for tree, bound in trees for called in tree.functions(bound.flat)]
    for called in (*functions, *(hook for hooks in _GLOBAL_HOOKS for hook in hooks.values())):
        if called is not True:
            walk.look_into(called)
    if not (trees or walk.roots or walk.generators or walk.tensors or is_needed):
        return None
    return Journal(walk, trees, preserve_buffers=preserve_buffers)


# --------------------------------------------------------------------------------------------------------------------- loans

_lock = threading.RLock()
_turn = threading.Condition(_lock)
_loans: dict[int, JournalLoan] = {}
_waiting: list[JournalLoan] = []


def _wait(loan: JournalLoan) -> None:
    _waiting.append(loan)
    try:
        _turn.wait()
    finally:
        _waiting.remove(loan)


class JournalLoan:
    """A journal lent to a rerun, from :meth:`begin` to :meth:`end`."""

    # A rerun waits for a rerun on another thread only if the two reruns need different contents in the same place.

    def __init__(self, journal: Journal, stand_ins: dict[int, torch.Tensor], complain: Complain) -> None:
        self.journal, self.stand_ins, self._complain = journal, stand_ins, complain
        self.held: dict[int, Any] = {}
        self.made: dict[int, Any] = {}
        self.met: dict[int, Any] = {}
        self.changed: _ChangedTensors = []
        self.lost: _ChangedTensors = []  # present parameters whose earlier tensor, or its content, is gone
        self.names: list[str] = []  # names to which forward bound a parameter, and which have no parameter now
        self.storages: frozenset[int | None] = frozenset()  # storages with another content in the rerun
        self.bound: list[Bound | None] = []
        self._is_quiet = False  # whether everything is as noted, so that the loan changes nothing
        self._thread = threading.get_ident()
        self._users: set[int] = set()  # the ``id`` of each loan of another thread that needs the contents of this loan
        self._undo: Undo | None = None
        self._by_address: dict[int, torch.Tensor | None] | None = None
        self._places: list[tuple[Any, Part, int, Content]] = []
        # Tensors with the memory and ``requires_grad`` to put back.
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        self.lent: set[int] = set()  # the ``id`` of each tensor that the rerun gives forward's memory

    def begin(self) -> None:
        with _lock:
            while True:
                self._look()
                if not (_loans and self._is_in_conflict()):
                    break
                _wait(self)
            _loans[id(self)] = self
            try:
                if not self._is_quiet:
                    self._fill()
                if self.journal.contents is not None:
                    undo = self._undo = Undo(self._complain)
                    self.journal.contents.rewind(undo)
                    self.storages = undo.storages()
            except BaseException:
                self.end()
                raise

    def _look(self) -> None:
        self.bound = list(map(Tree.look, self.journal.trees, self.journal.bound))
        is_quiet = self._is_as_noted()
        if is_quiet and self.stand_ins:
            is_quiet = all(map(self.stand_ins.keys().isdisjoint, self.journal.tensors))
        self._is_quiet = is_quiet

    def _is_as_noted(self) -> bool:
        journal = self.journal
        if None in self.bound and not all(tree.holds() for tree in journal.trees):
            return False
        hooks = _hooks_now()
        if hooks is not journal.hooks and not all(map(same, hooks, journal.hooks)):
            return False
        return not journal.roots or all(note.holds(value) for value, note in journal.roots)

    def _is_in_conflict(self) -> bool:
        others = [loan for loan in _loans.values() if loan._thread != self._thread]
        if not others:
            return False
        places, lends = self.places(), self.lends()
        conflicting = [loan for loan in others if (lends or loan.lends()) and not places.isdisjoint(loan.places())]
        if lends or not all(loan._is_as_noted() and all(tree.holds() for tree in loan.journal.trees) for loan in conflicting):
            return bool(conflicting)
        for loan in conflicting:  # such a loan lends the contents that this loan needs, and ends only after this loan
            loan._users.add(id(self))
        return False

    def lends(self) -> bool:
        return not self._is_quiet or self.journal.lends()

    def places(self) -> set[Any]:
        identities: set[Any] = set()
        for value, note in self.journal.notes():
            if type(value) is types.FunctionType:
                identities.update(map(id, value.__closure__ or ()))
                identities.update((id(value.__globals__), name) for name in globals_used_by(value)[0])
            identities.update(inner.number for inner in notes_in([note]) if type(inner) is Note or inner is note)
        return identities

    def _fill(self) -> None:
        journal, notes = self.journal, self.journal.notes()
        self.held = {id(bound): bound for values in journal.held for bound in values}
        self.met.update((id(bound), bound) for bound in (*(value for value, _ in notes), *journal.kept))
        for value, _ in notes:
            if isinstance(value, (Module, types.FunctionType)):
                dicts = [vars(value), *(dicts_of(vars(value)) if isinstance(value, Module) else ())]
                self.met.update((id(bound), bound) for table in dicts for bound in table.values() if type(bound) not in ATOMS)
        for value, note in notes:
            if self.made.get(note.number) is not value or type(value) is types.FunctionType:
                note.fill(value, self)
        if not _are_modules_called_elsewhere():
            for hooks, noted_hooks in zip(_GLOBAL_HOOKS, journal.hooks, strict=True):
                self.put(hooks, parts_of(type(hooks))[0], 0, dict(hooks), noted_hooks)

    def put(self, owner: Any, part: Part, base: int, current: Content, content: Content) -> None:
        self._places.append((owner, part, base, current))
        if not same(current, content):
            part.put(owner, base, current, content)

    def parameter(self, name: str, note: Any, current: Any) -> Any:
        """Returns the parameter to bind to a name in a rerun; the loan stands for an unbound name, also as ``current``."""
        if type(note) not in (Held, TensorNote):
            return note
        tensor = self.held.get(note.number)
        is_exchanged = tensor is not None and tensor is not current and (is_of_framework(tensor) or is_freed(tensor))
        if is_exchanged or is_of_framework(current):
            return current
        try:
            return note.present(self)
        except GoneError:
            if current is None or current is self:
                self.names.append(name)
            else:
                self.lost.append((current, GONE))
            return current

    def exchange(self, memory: Memory, tensor: torch.Tensor, requires_grad: bool) -> None:
        """Gives a leaf the noted memory and ``requires_grad`` for the rerun."""
        if is_of_framework(tensor) or is_theirs(tensor, memory.layout):
            return
        content = memory.tensor()
        if content is None and not memory.has_same_content(tensor):
            if id(tensor) not in self.journal.emptied:
                self.lost.append((tensor, GONE))
                for tree in self.journal.trees:
                    tree.history.exchanges = True
            return
        self.note_memory(tensor)
        # The tensor itself changes, and no alias takes its place: it has attributes and hooks, and functions refer to it.
        if tensor.requires_grad is not requires_grad:
            tensor.requires_grad_(requires_grad)
        if content is not None and not memory.holds(tensor):
            self.lent.add(id(tensor))
            past_all_modes(tensor, setattr, tensor, "data", content)

    def note_memory(self, tensor: torch.Tensor) -> None:
        if not is_of_framework(tensor):
            self._exchanged.append((tensor, data_of(tensor), tensor.requires_grad))

    def has_swapped(self, tensor: torch.Tensor) -> bool:
        """Whether ``torch.utils.swap_tensors`` has exchanged a tensor with another noted tensor."""
        if self._by_address is None:
            notes = [inner for _, note in self.journal.notes() for inner in notes_in([note]) if type(inner) is TensorNote]
            self._by_address = {note.address: note.alias for note in notes}
        alias = self._by_address.get(tensor._cdata)
        return alias is not None and version_of(alias) >= 0 and share_counter(alias, tensor)

    def value(self, note: Note) -> Any:
        """Returns the value of a note outside of the journal; containers also in the journal are the same objects."""
        self.by_identity((note.number,))
        return note.present(self)

    def by_identity(self, identities: Iterable[int]) -> dict[int, Any]:
        """Returns the rerun's containers and objects by the ``id`` of the noted object, where the whole content is noted."""
        for value, note in self.journal.notes() if self._is_quiet and identities else ():
            _collect(value, note, self.made)
        return {identity: self.made[identity] for identity in identities if identity in self.made}

    def end(self) -> None:
        with _lock:
            while self._users:
                _wait(self)
            try:
                self._put_back()
            finally:
                self.made, self.met, self._exchanged, self._by_address, self.bound = {}, {}, [], None, []
                self.lent.clear()
                _loans.pop(id(self), None)
                for loan in _loans.values():
                    loan._users.discard(id(self))
                if _waiting:
                    _turn.notify_all()

    def _put_back(self) -> None:
        journal = self.journal
        try:
            if self._is_quiet:
                bound = self.bound
                self._look()
                if not self._is_quiet:
                    self.made = {}  # without the objects that :meth:`by_identity` collected before the change
                    self._fill()
                    for tree in journal.trees:
                        tree.history.changes = True
                    self._is_quiet = True
                self.bound = bound
                self._exchanged.clear()
            else:
                for tree in journal.trees:
                    tree.history.changes = True
                for owner, part, base, before in reversed(self._places):
                    current = part.read(owner, base)
                    if current is not None and not same(current, before):
                        part.put(owner, base, current, before)
                for tensor, data, requires_grad in reversed(self._exchanged):
                    if tensor.requires_grad is not requires_grad:
                        tensor.requires_grad_(requires_grad)
                    if storage_of(tensor) != storage_of(data) or not same_layout(tensor, data):
                        past_all_modes(tensor, setattr, tensor, "data", data)
        finally:
            if journal.contents is not None:
                journal.contents.freed = ()
            if self._undo is not None:
                self._undo.restore()


def _collect(value: Any, note: Note, values: dict[int, Any]) -> None:
    if note.number in values or any(base for _, base, *_ in note.rows):
        return
    values[note.number] = value
    for part, base, content, keys in note.rows:
        current = part.read(value, base)
        for key in keys:
            if type(content[key]) is Note:
                _collect(current[key], content[key], values)
