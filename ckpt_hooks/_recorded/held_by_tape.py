"""The tensors held by a tape: tensors from outside read by its operators, and tensors kept by a policy.

While the outermost region is open, the tape sees every write, and copies a needed tensor before a write. At the end the held
tensors are sealed: from then on versions tell of writes, as for tensors saved by autograd.
"""

from __future__ import annotations

import weakref

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.holdings import Cause
from ckpt_hooks._operators.facts import Kind
from ckpt_hooks._tensors.held_tensors import HeldOnHost, HeldTensor, hold_tensor
from ckpt_hooks._tensors.offloaded import Batch
from ckpt_hooks._tensors.transfers import transfers_for
from ckpt_hooks._torch.autograd import Hooks
from ckpt_hooks._torch.tensors import counted_detach, is_kept_anyway
from ckpt_hooks.policies.decisions import OFFLOAD

from .values import Value

_weakref = weakref.ref


class TensorsHeld:
    """The values of one tape whose tensors are kept."""

    __slots__ = ("_batch", "_for_frame", "_held", "is_in_frame")

    def __init__(self, *, is_in_frame: bool) -> None:
        self.is_in_frame = is_in_frame  # whether a function frame is around
        self._held: list[weakref.ref[Value]] = []
        # Hooks have to get the same tensors in forward and in the rerun of a frame around. The set of live values depends on
        # the garbage collector, so all are held up to the end of the region.
        self._for_frame: list[Value] = []
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._held)

    def note(self, value: Value, reference: weakref.ref[Value]) -> None:
        """Notes a value, whose tensor is sealed at the end."""
        self._held.append(reference)
        if self.is_in_frame:
            self._for_frame.append(value)

    def keep(self, value: Value, tensor: torch.Tensor, decision: int, path: RegionPath, cause: Cause) -> None:
        """Keeps the tensor of a value, or sends it to the host; drops the value's history, which is not needed then."""
        alias = counted_detach(tensor)
        to_host = decision == OFFLOAD and not self.is_in_frame and not _is_cast_of_leaf(value)
        transfers = transfers_for(tensor) if to_host else None
        if transfers is not None:
            self._batch = self._batch or Batch()
            self._hold(value, HeldOnHost(alias, self._batch, transfers, path, cause))
        else:
            self._hold(value, hold_tensor(alias, path, cause))
        value.op = value.before = None

    def _hold(self, value: Value, saved: HeldTensor) -> None:
        value.saved = saved
        reference = _weakref(value)
        self.note(value, reference)
        held = value.store.held
        if held is None:
            value.store.held = [reference]
        else:
            held.append(reference)

    def note_version_later(self, value: Value) -> None:
        """Notes the version of a kept tensor only at the end of the region, since the version moves without a write."""
        assert value.saved is not None
        value.saved.version = None
        self._held.append(_weakref(value))

    def close(self, hooks: Hooks | None, *, respect_hooks: bool) -> None:
        """Ends the recording: seals the kept tensors, by the hooks around if any."""
        held, self._held = self._held, []
        for reference in held:
            value = reference()
            if value is not None and value.saved is not None:
                saved = value.saved
                value.saved = saved.sealed(hooks if respect_hooks or not saved.by_policy else None)
        self._for_frame.clear()


def _is_cast_of_leaf(value: Value) -> bool:
    """Whether a value is autocast's cast of a parameter, which autocast keeps until its block ends."""
    if value.op is None or value.op.facts.kind is not Kind.CAST:
        return False
    source = value.op.args[0]
    saved = source.saved if type(source) is Value else None
    return saved is not None and saved.tensor is not None and is_kept_anyway(saved.tensor)
