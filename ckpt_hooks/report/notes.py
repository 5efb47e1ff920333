"""Notes of a forward: the operator, the line and the module of each storage, and of each node of the graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ckpt_hooks._core.call_sites import called_modules, site_of
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import is_recomputing
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.functions import OVERLOAD
from ckpt_hooks._torch.tensors import dense_parts

from .entries import Origin

_aten = torch.ops.aten
# These make a tensor, and get it as their argument.
_BIRTHS = frozenset({_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class Notes(Observer):
    """What is known of storages and nodes: their origins, noted in a forward under :class:`OperatorNotes`, and their names."""

    def __init__(self) -> None:
        # Of parameters, buffers and arguments, by the number of their storage.
        self.names: dict[int | None, str] = {}
        self.arguments: set[int | None] = set()
        self.parameters: set[int | None] = set()
        # By storage; of uninitialised memory, the first operator which wrote to it. Modules are named without their class.
        self.made: dict[int | None, Origin] = {}
        self.found: set[int] = set()  # storages read by an operator, and not made before: these were there before
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.nodes: dict[int, Origin] = {}  # by the number of the node
        self.outermost: dict[int, torch.nn.Module] = {}
        self._uninitialized: set[int] = set()
        self._names: dict[int, dict[int, str | None]] = {}

    def add_module(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            for part in dense_parts(parameter):
                storage = storage_and_size(part)[0]
                self.names.setdefault(storage, name)
                self.parameters.add(storage)
        for name, buffer in module.named_buffers():
            for part in dense_parts(buffer):
                self.names.setdefault(storage_and_size(part)[0], name)

    def add_arguments(self, arguments: Iterable[tuple[str, Any]]) -> None:
        """Adds the tensors and modules in arguments, each a place and a value."""
        for place, value in arguments:
            for path, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, torch.nn.Module):
                    self.add_module(leaf)
                for part in dense_parts(leaf):
                    storage = storage_and_size(part)[0]
                    if storage not in self.parameters:
                        self.arguments.add(storage)
                        self.names[storage] = place + keystr(path)

    def is_there_anyway(self, storage: int) -> bool:
        return storage in self.names or storage in self.found

    def note(self, operator: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        number, origin = sequence_number() - 1, None
        if number not in self.nodes:
            origin = self.nodes[number] = self._origin(operator)
        if operator not in _BIRTHS:
            for tensor in (part for value in inputs for part in dense_parts(value)):
                storage, _ = storage_and_size(tensor)
                if storage is not None and storage not in self.made:
                    self.found.add(storage)
        facts = facts_of(operator) if isinstance(operator, OVERLOAD) else None
        is_empty = facts is not None and facts.is_uninitialized
        for tensor in (part for value in outputs for part in dense_parts(value)):
            storage, _ = storage_and_size(tensor)
            is_view = facts is not None and facts.is_view
            is_known = storage in self.made and (is_view or storage not in self._uninitialized)
            if storage is None or storage in self.found or is_known:
                continue
            origin = self.made[storage] = origin or self._origin(operator)
            self.storages.setdefault(storage, weakref.ref(tensor.untyped_storage()))
            if is_empty:
                self._uninitialized.add(storage)
            else:
                self._uninitialized.discard(storage)

    def _origin(self, operator: Any) -> Origin:
        frame = sys._getframe(3)
        module, outermost = called_modules(frame)
        name = None if module is None else self._name_of(module, outermost)
        return Origin(operator=str(operator), module=name, line=site_of(frame))

    def _name_of(self, module: Any, outermost: Any) -> str | None:
        self.outermost[id(outermost)] = outermost  # held, so that its identity stays its own
        names = self._names.get(id(outermost))
        if names is None or id(module) not in names:
            names = self._names[id(outermost)] = {id(inner): name for name, inner in outermost.named_modules()}
            names.setdefault(id(module), None)
        return names[id(module)]


class OperatorNotes(QuietDispatchMode):
    """Notes each operator of a forward, inside regions and outside; operators of recomputes are left out."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        count_writes(func, args)
        if not is_recomputing():
            self._notes.note(func, tree_leaves((args, kwargs)), tree_leaves(output))
        return output
