"""Reads the memory held by a live graph: nodes, handles of regions, and the regions' frames. Runs nothing.

Notes taken in forward tell the operator, the line and the module of each storage, and of each node.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_hooks._core.call_sites import called_modules, site_of
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import Frame, is_recomputing, packed_in
from ckpt_hooks._core.holdings import Cause, Holding, Reason, Saved, holdings_in, storage_and_size
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.packed import KeptTensor
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.autograd import ctx_attributes, is_packed, node_number, nodes_below, packed_of, saved_in, sequence_number
from ckpt_hooks._torch.functions import OVERLOAD
from ckpt_hooks._torch.pytree import keystr, tree_flatten_with_path, tree_leaves
from ckpt_hooks._torch.tensors import dense_parts, is_kept_anyway

from .printing import NOWHERE, Origin, Residual

_aten = torch.ops.aten
# Operators that bring a new constant into the program: their argument does not count as memory from before forward.
_BIRTHS = frozenset({_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class ForwardNotes(Observer):
    """Names of storages, and origins of storages and nodes, noted in a forward under :class:`OperatorNotes`."""

    def __init__(self) -> None:
        # Names of parameters, buffers and arguments, by storage.
        self.names: dict[int | None, str] = {}
        self.arguments: set[int | None] = set()
        self.parameters: set[int | None] = set()
        # By storage: the operator that made the storage, or first wrote to uninitialized memory; modules by name only.
        self.made: dict[int | None, Origin] = {}
        self.older: set[int] = set()  # storages that an operator read and no operator made
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
        return storage in self.names or storage in self.older

    def note(self, operator: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        # Autograd makes the node of an operator before it dispatches, so this is the latest node; without a node, a known one.
        number, origin = sequence_number() - 1, None
        if number not in self.nodes:
            origin = self.nodes[number] = self._origin(operator)
        if operator not in _BIRTHS:
            for tensor in (part for value in inputs for part in dense_parts(value)):
                storage, _ = storage_and_size(tensor)
                if storage is not None and storage not in self.made:
                    self.older.add(storage)
        facts = facts_of(operator) if isinstance(operator, OVERLOAD) else None
        is_empty = facts is not None and facts.is_uninitialized
        for tensor in (part for value in outputs for part in dense_parts(value)):
            storage, _ = storage_and_size(tensor)
            is_view = facts is not None and facts.is_view
            is_known = storage in self.made and (is_view or storage not in self._uninitialized)
            if storage is None or storage in self.older or is_known:
                continue
            origin = self.made[storage] = origin or self._origin(operator)
            self.storages.setdefault(storage, weakref.ref(tensor.untyped_storage()))
            if is_empty:
                self._uninitialized.add(storage)
            else:
                self._uninitialized.discard(storage)

    def _origin(self, operator: Any) -> Origin:
        frame = sys._getframe(1)
        called = called_modules(frame)
        name = None if called[0] is None else self._name_of(called[0], called[-1])
        return Origin(operator=str(operator), module=name, line=site_of(frame))

    def _name_of(self, module: Any, outermost: Any) -> str | None:
        self.outermost[id(outermost)] = outermost  # held, so that no other module gets its ``id``
        names = self._names.get(id(outermost))
        if names is None or id(module) not in names:
            names = self._names[id(outermost)] = {id(inner): name for name, inner in outermost.named_modules()}
            names.setdefault(id(module), None)
        return names[id(module)]


class OperatorNotes(QuietDispatchMode):
    """Notes each operator of a forward, inside regions and outside; operators of recomputes are left out."""

    def __init__(self, notes: ForwardNotes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        count_writes(func, args)
        if not is_recomputing():
            self._notes.note(func, tree_leaves((args, kwargs)), tree_leaves(output))
        return output


_ORDER = {reason: place for place, reason in enumerate(Reason)}
_NOT_HELD = frozenset({Reason.DROPPED, Reason.LOST})


class GraphReader:
    """Reads a graph: claims on storages by nodes and regions, and what regions have dropped."""

    def __init__(self, notes: ForwardNotes) -> None:
        self._notes, self._knows_nothing = notes, not (notes.names or notes.nodes)
        # The claims on each storage; memory whose storage is hidden has a number below zero.
        self._claims: dict[int, list[Residual]] = {}
        self._sizes: dict[int, int] = {}
        self._dropped: list[tuple[int | None, Residual]] = []
        self._read: set[tuple[int, int]] = set()  # handles, by frame and position
        self._frames: dict[int, Frame] = {}

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        for node in sorted(nodes_below(tensor.grad_fn for tensor in tensors), key=node_number):
            variables, attributes = saved_in(node), ctx_attributes(node)
            origin = self._notes.nodes.get(node_number(node), NOWHERE) if variables or attributes else NOWHERE
            for saved in variables:
                self._read_saved(saved, origin, (node.name(),))
            for attribute, value in attributes.items():
                for holding in holdings_in(value, Cause(Reason.CTX, f"ctx.{attribute}"), set()):
                    self._claim_holding(holding, (), origin, (node.name(),))
        todo, around = list(self._frames.values()), {}
        for frame in todo:  # including frames added in the loop
            for owner in frame.owners():
                around[id(owner)] = owner
                if id(owner) not in self._frames:
                    self._frames[id(owner)] = owner
                    todo.append(owner)
        for frame in around.values():  # outer regions dropped tensors too, for which only inner regions have handles
            for saved in frame.saved():
                self._read_dropped(frame, saved, NOWHERE, ())
        for frame in self._frames.values():
            watch = frame.watch
            origin = NOWHERE if watch is None else Origin(module=watch.region.module, line=watch.region.site)
            for holding in frame.held():
                self._claim_holding(holding, format_path(frame.path), origin)

    def _read_saved(self, saved: Any, origin: Origin, name: tuple[str, ...]) -> None:
        packed = packed_of(saved)
        if packed is None:
            return
        if isinstance(packed, torch.Tensor):
            reason = Reason.HOOKS if is_packed(saved) else Reason.SAVED
            self._claim(packed, reason, origin, name)
            return
        known = packed_in(packed)
        frame = None if known is None else known.frame
        if frame is not None:
            self._frames[id(frame)] = frame
            self._read_dropped(frame, frame.describe(packed), origin, name)
        elif isinstance(known, KeptTensor):
            cause = known.held_for
            self._claim(known.tensor, cause.reason, origin, name, format_path(known.path), f"saved, {cause.in_words()}")
        else:
            self._read_hooks(packed, origin, name)

    def _read_dropped(self, frame: Frame, saved: Saved, origin: Origin, name: tuple[str, ...]) -> None:
        if (id(frame), saved.position) in self._read or saved.fate not in _NOT_HELD:
            return  # read already, or held: then ``frame.held()`` has the tensor
        self._read.add((id(frame), saved.position))
        storage, operator, site, module = None, saved.made_by, origin.line, origin.module
        size, shape, dtype = saved.nbytes or 0, saved.shape, saved.dtype
        tensor = None if frame.watch is None else frame.watch.tensors.get(saved.position)
        if tensor is not None and tensor.storage is not None:
            storage, size = tensor.storage, tensor.storage_nbytes
            made = self._notes.made.get(storage, NOWHERE)
            operator, site, module = made.operator or operator, made.line or site, made.module or module
        region = format_path(frame.path)
        entry = Residual(saved.fate, size, shape, dtype, None, "", None, operator, site, module, region, name)
        self._dropped.append((storage, entry))

    def _read_hooks(self, packed: Any, origin: Origin, name: tuple[str, ...]) -> None:
        """Reads the tensors in an object that a user's hooks returned."""
        if type(packed).__module__ == "torch.utils.checkpoint":
            why = "by torch.utils.checkpoint, of unknown size"
            entry = Residual(Reason.DROPPED, 0, why=why, site=origin.line, module=origin.module, saved_by=name)
            self._dropped.append((None, entry))
            return
        holdings = list(holdings_in(packed, Cause(Reason.HOOKS, "packed by saved-tensor hooks"), set(), (Frame,)))
        for holding in holdings:
            self._claim_holding(holding, (), origin, name)
        if not holdings:
            why = f"packed by saved-tensor hooks as {type(packed).__name__}, of unknown size"
            entry = Residual(Reason.HOOKS, 0, why=why, operator=origin.operator, site=origin.line, module=origin.module)
            self._add(None, 0, entry._replace(saved_by=name))

    def _claim(
        self,
        tensor: torch.Tensor,
        reason: Reason,
        origin: Origin,
        name: tuple[str, ...],
        region: tuple[str, ...] = (),
        why: str = "",
    ) -> None:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            parts = dense_parts(tensor)
            if len(parts) != 1 or parts[0] is not tensor:
                for part in parts:
                    self._claim(part, reason, origin, name, region, why)
                return
        if tensor.requires_grad and is_kept_anyway(tensor):
            reason = Reason.PARAMETER
        shape = None if tensor.is_nested else tensor.shape
        nbytes, dtype, device = tensor.nbytes, tensor.dtype, tensor.device
        entry = Residual(reason, nbytes, shape, dtype, device, why, region=region, saved_by=name)
        self._add(*storage_and_size(tensor), entry, origin)

    def _claim_holding(self, holding: Holding, region: tuple[str, ...], origin: Origin, name: tuple[str, ...] = ()) -> None:
        reason, why, nbytes, _, _, shape, dtype, device, _ = holding
        entry = Residual(reason, nbytes, shape, dtype, device, why, region=region, saved_by=name)
        for storage, size in holding.parts or ((holding.storage, holding.storage_nbytes),):
            self._add(storage, size, entry, origin)

    def _add(self, storage: int | None, size: int, entry: Residual, origin: Origin = NOWHERE) -> None:
        """Adds a claim on a storage; ``origin`` is the node's or region's, for storages of unknown origin."""
        if storage is None:
            storage, size = -1 - len(self._claims), entry.nbytes
        claims = self._claims.get(storage)
        if claims is None:
            self._sizes[storage] = size
            self._claims[storage] = [self._placed(storage, entry, origin)]
            return
        entry = self._placed(storage, entry, origin)
        for place, claim in enumerate(claims):
            if claim[:4] == entry[:4] and claim.region == entry.region:
                if entry.saved_by and entry.saved_by[0] not in claim.saved_by:
                    claims[place] = claim._replace(saved_by=claim.saved_by + entry.saved_by)
                return
        claims.append(entry)

    def _placed(self, storage: int, entry: Residual, origin: Origin) -> Residual:
        """Returns a claim with the storage's reason and origin."""
        if self._knows_nothing and origin is NOWHERE:
            return entry
        notes, reason = self._notes, entry.reason
        if storage in notes.arguments:
            reason = Reason.ARGUMENT
        elif storage in notes.parameters:
            reason = Reason.PARAMETER
        elif reason is not Reason.PARAMETER and notes.is_there_anyway(storage):
            reason = Reason.OUTSIDE
        made, name = notes.made.get(storage, NOWHERE), notes.names.get(storage)
        if made is not NOWHERE:
            origin = made
        elif origin is NOWHERE and name is None and reason is entry.reason:
            return entry
        return entry._replace(reason=reason, name=name, operator=made.operator, site=origin.line, module=origin.module)

    def unclaimed(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Returns the sizes of live storages that operators made and nothing claims, without the storages of ``tensors``."""
        others = {storage_and_size(part)[0] for tensor in tensors for part in dense_parts(tensor)} | self._claims.keys()
        left = {storage: memory() for storage, memory in self._notes.storages.items() if storage not in others}
        return {storage: memory.nbytes() for storage, memory in left.items() if memory is not None}

    def add_unseen(self, sizes: Mapping[int, int]) -> None:
        for storage, size in sizes.items():
            if self._notes.storages[storage]() is None:
                self._add(storage, size, Residual(Reason.UNSEEN, size, why="in no node that torch shows"))

    def residuals(self) -> tuple[tuple[Residual, ...], tuple[Residual, ...], bool]:
        """Returns an entry for each held storage and for each dropped storage, and whether all dropped storages are known."""
        tensors = []
        for storage, claims in self._claims.items():
            counts, size = claims[0], self._sizes[storage]
            if len(claims) > 1:
                first = min(claims, key=lambda claim: _ORDER[claim.reason])
                counts = first._replace(nbytes=size, views=tuple(claims))
            elif counts.nbytes != size:
                counts = counts._replace(nbytes=size)
            tensors.append(counts)
        # A tensor without a known storage counts as known only if the tensor is empty; without a dtype its size is unknown.
        known = (storage is not None or (entry.dtype is not None and not entry.nbytes) for storage, entry in self._dropped)
        dropped, seen = [], set[int | None](self._claims)  # each storage once, without storages that are held
        for number, entry in self._dropped:
            if number is None or not (number in seen or self._notes.is_there_anyway(number)):
                dropped.append(entry)
                seen.add(number)
        return tuple(tensors), tuple(dropped), all(known)
