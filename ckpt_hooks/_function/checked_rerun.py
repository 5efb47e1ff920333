"""The dispatch mode of a rerun that the self-check compares: notices unfilled memory and repeated updates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.call_sites import call_site_of, name_in_models, place_in_words
from ckpt_hooks._core.descriptions import describe_kind, format_path, region_in_words
from ckpt_hooks._core.modes import QuietDispatchMode
from ckpt_hooks._operators.facts import NORMALIZES_BY_BATCH, REPEATABLE, UNINITIALIZED, OpFacts, facts_of
from ckpt_hooks._state.journal import JournalLoan
from ckpt_hooks._tensors.nested import instances_in
from ckpt_hooks._torch.tensors import storage_of, version_of
from ckpt_hooks.errors import MutationError

from .words import name_of_tensor

#: Operators of ATen that may leave results unfilled.
_UNFILLED = UNINITIALIZED | {"resize_", "_grouped_mm", "_varlen_attn", "_flash_attention_forward"}

#: Operators whose repetition changes nothing.
_REPEATABLE = REPEATABLE | {"bitwise_and_", "bitwise_or_", "logical_and_", "logical_or_"}

#: Operators that read the tensor they write to only if an argument is set: the position and name of that argument.
_READS_IF_SET = {
    "index_put_": (3, "accumulate"),
    "_index_put_impl_": (3, "accumulate"),
    "put_": (3, "accumulate"),
    "scatter_": (4, "reduce"),
    **dict.fromkeys(NORMALIZES_BY_BATCH | {"batch_norm", "_native_batch_norm_legit"}, (5, "training")),
}

_ADVICE = (
    "Make the tensor a buffer of a module that the region calls: a recompute gets buffers as forward got them. Or write "
    "`with checkpoint_region():`, which runs Python once."
)


class CheckedRerun(QuietDispatchMode):
    def __init__(self, frame: Any, loan: JournalLoan | None, arguments: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self._frame, self._sampled, self._loan = frame, frame.sampled, loan
        self._puts_back = frame.options.preserve_buffers
        # Storages to which writes are not checked: of arguments, and storages made, filled or reported in this rerun.
        self._exempt = {storage_of(tensor) for tensor in arguments if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = facts_of(func)
        if not facts.is_trusted or facts.name in _UNFILLED:
            self._sampled.may_be_unfilled = True
        if facts.written and self._puts_back and not (facts.is_opaque or facts.is_inplace_view or facts.replaces_storage):
            self._look_at_write(facts, args, kwargs or {})
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if facts.has_fresh:
            self._exempt.update(map(storage_of, instances_in(output, torch.Tensor)))
        return output

    def _look_at_write(self, facts: OpFacts, args: Any, kwargs: Any) -> None:
        reads = not (facts.name in _REPEATABLE or kwargs.get("beta") == 0)  # as ``baddbmm_`` with ``beta=0``
        if facts.name in _READS_IF_SET:
            place, name = _READS_IF_SET[facts.name]
            reads = bool(args[place] if place < len(args) else kwargs.get(name))
        for written in facts.written:
            for tensor in instances_in(written.of(args, kwargs), torch.Tensor):
                storage, version = storage_of(tensor), version_of(tensor)
                if storage is None or storage in self._exempt or version < 0:
                    continue
                # Memory at version 0 is new: if it were older, forward's write would have raised the version.
                if written.overwritten or (written.counted and version == 0):
                    self._exempt.add(storage)
                elif reads:
                    self._exempt.add(storage)  # reported once
                    if self._loan is None or storage not in self._loan.journal.storages():
                        self._sampled.settle(self._error(tensor, facts), _ADVICE)

    def _error(self, tensor: torch.Tensor, facts: OpFacts) -> MutationError:
        region = format_path(self._frame.path)
        name = name_of_tensor(tensor, self._frame.function, name_in_models(tensor) or "a tensor from outside of the region")
        line = place_in_words(call_site_of(sys._getframe()), {})
        return MutationError(
            f"{region_in_words(region)}: {name}, {describe_kind(tensor)}, is updated by forward and again by its recompute, "
            f"with {facts.full_name}\n  at {line}\n",
            region=region,
            tensor=name,
            expected=None,
            found=None,
        )
