"""The kept outputs of a selective region, by the place of their operators in the sequence of forward.

A kept output is a cache, no more: if the output is gone or changed, the operator runs again. This concerns outputs modified
since (the version tells, and forward sees the writes), outputs taken by an earlier recompute because its backward did not
retain the graph, and outputs which share memory with an input, which are not kept at all.

Routes of a mixture of experts must not be chosen again because of a write to the weights, which top-k returns with the indices.
So operators on which routes depend have copies kept, and copies handed out.

Kernels of a custom ``autograd.Function`` may write to kept outputs which are its arguments, or results of operators inside, and
no version tells. So these outputs are kept as copies too, from before the function or from within: as much memory as the
outputs themselves, which go when forward lets go of them.

Like everything a region holds until backward, kept outputs go through the saved-tensor hooks around the region. If these are
the hooks of a frame, that frame brings the outputs back: a region inside a region that recomputes everything keeps nothing
through the outer region, and finds its kept outputs when the outer region has been rerun.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.holdings import BY_POLICY
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.modes import is_compiled_code_running, past_modes, unseen
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._operators.draws import skip_draw
from ckpt_hooks._operators.facts import Kind, OpFacts
from ckpt_hooks._tensors.containers import instances_in, replaced_in, tensors_in
from ckpt_hooks._tensors.copies import copies_of, restore_layout
from ckpt_hooks._tensors.held_tensors import HeldByHooks, HeldOnHost, HeldTensor, hold_tensor, recomputes
from ckpt_hooks._tensors.offloaded import Batch
from ckpt_hooks._tensors.transfers import transfers_for
from ckpt_hooks._torch.autograd import Hooks
from ckpt_hooks._torch.tensors import counted_detach, storage_of, version_witness
from ckpt_hooks.errors import MutationError

_plain = torch.Tensor
_HOLDS_TENSORS = (torch.Tensor, list, tuple, dict)
_NO_ALIASES: Sequence[tuple[torch.Tensor, int]] = ()


class _NotBroughtBack(Exception):  # noqa: N818 -- nobody sees it
    """The outer frame holds an output, and did not bring the output back for this recompute."""


class Entry:
    """The kept output of one operator."""

    __slots__ = ("aliases", "draw", "is_copied", "stays", "value")

    is_copied: bool  # whether copies are kept and handed out, so that writes to the output do not matter
    stays: bool  # whether the operator has an effect, and must not run again
    value: Any  # the output, with a held tensor in place of each tensor
    draw: torch.Tensor | None  # the operator's draw from a random stream, if any
    # Witnesses of tensors which share memory with the output but not the version counter, and their versions.
    aliases: Sequence[tuple[torch.Tensor, int]]


class KeptOutputs:
    """The kept outputs of one forward."""

    __slots__ = (
        "_brought",
        "_is_recomputed",
        "batch",
        "entries",
        "hooks",
        "is_copying",
        "is_in_frame",
        "num_kept",
        "path",
        "places",
    )

    def __init__(self) -> None:
        self.batch: Batch | None = None  # the outputs on the host, if there are any
        self.entries: dict[int, Entry] = {}  # the kept outputs, by place in the sequence
        self.hooks: Hooks | None = None  # the saved-tensor hooks to pass kept outputs through, if there are any
        # ``is_copying``: whether copies are kept of all outputs; ``is_in_frame``: whether these are the hooks of a frame.
        self.is_copying = self.is_in_frame = False
        # The number of outputs kept, including outputs forgotten before the end of forward, which is left to chance.
        self.num_kept = 0
        self.path: RegionPath = ("", None)  # the region
        self.places: dict[int | None, int] = {}  # places in the sequence, by the storage of the kept output
        # The tensors brought back by the outer frame for the running recompute, by the id of the held tensor.
        self._brought: dict[int, torch.Tensor] = {}
        self._is_recomputed = False

    def attach(self, path: RegionPath, hooks: Hooks | None) -> None:
        """Sets the region, and the saved-tensor hooks to pass kept outputs through, if any."""
        self.path, self.hooks = path, hooks
        self.is_in_frame = hooks is not None and are_of_frame(hooks)
        self._is_recomputed = hooks is not None and recomputes(hooks[1])

    def keep(
        self, place: int, output: Any, args: Any, kwargs: Any, draw: torch.Tensor | None, facts: OpFacts, *, offload: bool
    ) -> None:
        """Keeps the output of an operator, unless in an argument's memory, or in a buffer which compiled code uses again."""
        kind = facts.kind
        if kind is Kind.EFFECT:
            self._keep_for_good(place, output, draw, offload=offload)
            return
        if is_compiled_code_running() or (self.is_in_frame and not _has_node(args, kwargs)):
            return
        outputs = [output] if type(output) is torch.Tensor else tensors_in(output)
        storages = [storage_of(tensor) for tensor in outputs]
        for arg in args:
            if type(arg) is torch.Tensor:
                if storage_of(arg) in storages:
                    return
            elif isinstance(arg, _HOLDS_TENSORS) and any(storage_of(other) in storages for other in tensors_in(arg)):
                return
        if kwargs and any(storage_of(other) in storages for other in tensors_in(kwargs)):
            return
        if any(tensor.is_inference() for tensor in outputs):  # inference tensors count no versions
            return
        aliases: Sequence[tuple[torch.Tensor, int]] = _NO_ALIASES
        as_it_is = kind is Kind.COLLECTIVE
        is_copied = (self.is_copying and not as_it_is) or (facts.is_routing is not False and _is_route(facts, outputs))
        if is_copied:
            output = past_modes(copies_of, output)
        elif len(outputs) > 1 and any(type(tensor) is not _plain for tensor in outputs):
            # Among them may be inner tensors of subclasses, open to writes by others, which are not held themselves.
            aliases = [(version_witness(tensor), tensor._version) for tensor in outputs]
        for storage in storages:
            self.places[storage] = place
        entry = Entry()  # attributes one by one: half the cost of an ``__init__``
        entry.value = self._kept(output, offload=offload and not as_it_is, as_it_is=as_it_is)
        entry.draw = draw
        entry.aliases = aliases
        entry.is_copied = is_copied
        entry.stays = False
        self.entries[place] = entry
        self.num_kept += 1

    def _keep_for_good(self, place: int, output: Any, draw: torch.Tensor | None, *, offload: bool) -> None:
        """Keeps the output of an operator with an effect, which must not run again."""
        entry = self.entries[place] = Entry()
        entry.value = self._kept(past_modes(copies_of, output), offload=offload)
        entry.draw, entry.aliases = draw, _NO_ALIASES
        entry.is_copied = entry.stays = True

    def _kept(self, output: Any, *, offload: bool, as_it_is: bool = False) -> Any:
        hooks = None if as_it_is and not self.is_in_frame else self.hooks
        if isinstance(output, torch.Tensor):
            return self._held(hooks, output, offload=offload)
        return replaced_in(output, torch.Tensor, partial(self._held, hooks, offload=offload))

    def _held(self, hooks: Hooks | None, output: torch.Tensor, *, offload: bool) -> HeldTensor:
        tensor = counted_detach(output)
        if offload and not self.is_in_frame and (transfers := transfers_for(tensor)) is not None:
            self.batch = self.batch or Batch()
            return HeldOnHost(tensor, self.batch, transfers, self.path, BY_POLICY).sealed(None)
        if hooks is not None:
            return HeldByHooks(tensor, hooks, self.path, BY_POLICY)
        return hold_tensor(tensor, self.path, BY_POLICY).sealed(None)

    def forget(self, args: Any) -> None:
        """Drops outputs which share memory with the arguments of a writing operator."""
        places = self.places
        for tensor in tensors_in(args):
            place = places.get(storage_of(tensor))
            if place is not None and (entry := self.entries.get(place)) is not None and not entry.is_copied:
                del self.entries[place]

    def part_from(self, args: Any) -> None:
        """Keeps copies from now on of outputs which share memory with the arguments of an unseen writer."""
        for tensor in tensors_in(args):
            place = self.places.get(storage_of(tensor), -1)
            entry = self.entries.get(place)
            if entry is None or entry.is_copied:
                continue
            # Others are dropped: hooks may have kept the tensor itself, and a copy on its way to the host may be half there.
            if all(type(held) is HeldTensor for held in instances_in(entry.value, HeldTensor)):
                output = self._output_of(entry, last=False)
                if output is not MISSING:
                    entry.value = self._kept(past_modes(copies_of, output), offload=False)
                    entry.aliases, entry.is_copied = _NO_ALIASES, True
                    continue
            del self.entries[place]

    @unseen
    def watch(self, args: Any, outputs: Any) -> None:
        """Watches the results of an operator which share memory with a kept output, but not the version counter."""
        for tensor in tensors_in(args):
            entry = self.entries.get(self.places.get(storage_of(tensor), -1))
            if entry is not None and not entry.is_copied:
                more = ((version_witness(output), output._version) for output in tensors_in(outputs))
                entry.aliases = (*entry.aliases, *more)

    def bring_back(self) -> None:
        """Brings back tensors held by the outer frame before a recompute: no frame can recompute from within an operator."""
        if self._is_recomputed:
            for entry in self.entries.values():
                for held in instances_in(entry.value, HeldByHooks):
                    with suppress(MutationError):  # written to from outside of the region
                        self._brought[id(held)] = held.get()
        if self.batch is not None:
            self.batch.fetch_with_next()

    def let_go(self) -> None:
        """Drops the tensors brought back and not asked for."""
        self._brought.clear()

    def take(self, place: int, operator: Any, args: Any, kwargs: Any, *, last: bool) -> Any:
        """Returns the kept output of an operator; :data:`MISSING` if gone."""
        entry = self.entries[place]
        output = self._output_of(entry, last=last)
        if output is MISSING:
            return MISSING
        if entry.draw is not None:
            skip_draw(operator, args, kwargs, entry.draw)
        if last and not entry.stays:
            del self.entries[place]
            return output
        return past_modes(copies_of, output) if entry.is_copied else output

    def peek(self, place: int) -> Any:
        """Returns the kept output of an operator, and leaves the output in place; :data:`MISSING` if not kept or gone."""
        entry = self.entries.get(place)
        return MISSING if entry is None else self._output_of(entry, last=False)

    def _output_of(self, entry: Entry, *, last: bool) -> Any:
        if entry.aliases and any(alias._version != version for alias, version in entry.aliases):
            return MISSING
        value = entry.value
        try:
            if type(value) is HeldTensor:
                return value.get() if last else counted_detach(value.get())
            if isinstance(value, HeldTensor):
                return self._tensor_of(value, last=last)
            return replaced_in(value, HeldTensor, partial(self._tensor_of, last=last))
        except (_NotBroughtBack, MutationError):  # the operator runs again
            return MISSING

    def _tensor_of(self, held: HeldTensor, *, last: bool) -> torch.Tensor:
        """Returns a tensor object with no other holder, at the version of forward, which is compared."""
        if type(held) is HeldByHooks:
            tensor = self._brought.pop(id(held), None) if self._is_recomputed else held.get()
            if tensor is None:
                raise _NotBroughtBack
            return counted_detach(tensor if tensor._version == held.version else _at_version(tensor, held))
        tensor = held.get()
        return tensor if last or type(held) is HeldOnHost else counted_detach(tensor)


@unseen
def _at_version(tensor: torch.Tensor, held: HeldTensor) -> torch.Tensor:
    assert held.version is not None
    return restore_layout(tensor, None, held.version)


def _has_node(args: Any, kwargs: Any) -> bool:
    """Whether gradients flow through an operator."""
    # One without gradients may build a table once, which the rerun of an outer region finds built, and does not count.
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


def _is_route(facts: OpFacts, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether routes may depend on an output: of comparisons and casts, on integers and truth values alone."""
    return bool(outputs) and (facts.is_routing is True or not outputs[0].is_floating_point())
