"""Contents of tensors before a rerun, put back when the rerun ends: of exchanged tensors, and of written ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ckpt_hooks._tensors.copies import copy_of, data_of, fill_all, has_storage, is_plain, same_layout
from ckpt_hooks._torch.tensors import storage_of

from .buffers import Complain, Slot, Use, has_changed, is_copied
from .module_plan import ModulePlan
from .small_buffers import SmallBuffers

_NO_STORAGES = frozenset["int | None"]()

#: A tensor, its version, its content, and its layout to be put back, if it may have got another.
Before = tuple[torch.Tensor, int, torch.Tensor, "torch.Tensor | None"]


def _has_moved(before: Before) -> bool:
    tensor, version, content, _ = before
    return tensor._version != version or has_changed(tensor, content, Use.READ)


class ContentsUndo:
    """The contents before a rerun, to be put back.

    Attributes:
        complain: Returns an error for a tensor that the rerun alone wrote to, and its version before.
        exchanged: Tensors with another content in the rerun.
        freed: Tensors without memory. Some get their content for the rerun; the function fills the others, or must not read.
        others: Tensors with the same content in the rerun.
        slots: Names of parameters without gradients, and the parameters.
        small: Groups of small tensors, their content, their versions (None if unknown), and whether they get another content.
        uncopied: Tensors without a copy, and their versions.
    """

    __slots__ = ("_trained", "complain", "exchanged", "freed", "others", "slots", "small", "uncopied")

    def __init__(self, complain: Complain) -> None:
        self.complain = complain
        self.slots: list[tuple[Slot, Any]] = []
        self.exchanged: list[Before] = []
        self.freed: list[torch.Tensor] = []
        self.others: list[Before] = []
        self.small: list[tuple[SmallBuffers, bytes, list[int] | None, bool]] = []
        self.uncopied: list[tuple[torch.Tensor, int]] = []
        self._trained: list[Before] = []

    def watch_trained(self, plans: Sequence[ModulePlan]) -> None:
        """Copies the parameters which a rerun may initialise once more, which cannot be put back."""
        modules = {id(module): module for plan in plans for reference in plan.parameters[0] if (module := reference())}
        found = {id(p): p for module in modules.values() for p in module._parameters.values() if p is not None}
        trained = [p for p in found.values() if p.requires_grad and is_plain(p) and is_copied(p.detach())]
        self._trained = [(parameter, parameter._version, copy_of(parameter), None) for parameter in trained]

    def exchange(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes tensors that are about to get another content, and such as have no memory at present."""
        for tensor in tensors:
            if has_storage(tensor):
                self.exchanged.append((tensor, tensor._version, copy_of(tensor), data_of(tensor)))
            else:
                self.freed.append(tensor)

    def storages(self) -> frozenset[int | None]:
        """Returns the storages with another content in the rerun."""
        small = [group.storages for group, _, _, is_exchanged in self.small if is_exchanged]
        if not self.exchanged and len(small) <= 1:
            return small[0] if small else _NO_STORAGES
        return frozenset(storage_of(tensor) for tensor, *_ in self.exchanged).union(*small)

    def restore(self) -> None:
        """Restores the contents from before the rerun, including tensors written by the rerun alone.

        Raises:
            MutationError: If the rerun initialised parameters once more, which are restored, or wrote to a tensor to which no
                forward has written.
        """
        for (owner, name), value in reversed(self.slots):
            owner[name] = value
        written: list[tuple[torch.Tensor, int]] = []
        for group, content, versions, is_exchanged in self.small:
            if versions is None:
                if (now := group.read()) != content:
                    if not group.is_unwritten():
                        written.append((group.first_difference(content, now), group.versions[0]))
                    group.write(content, group.versions)
            elif is_exchanged or group.read() != content or group.read_versions() != versions:
                group.write(content, versions)
        if self.exchanged or self.others:
            fill_all((*self.exchanged, *filter(_has_moved, self.others)))
        for tensor in self.freed:
            tensor.untyped_storage().resize_(0)
        for trained in self._trained:
            parameter, version, data, _ = trained
            if same_layout(parameter, data) and not torch.allclose(parameter, data, rtol=0, atol=0, equal_nan=True):
                fill_all([trained])
                written.append((parameter, version))
        if self.uncopied:
            written += [(tensor, version) for tensor, version in self.uncopied if tensor._version != version]
        if written:
            raise self.complain(*written[0])
