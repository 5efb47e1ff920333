"""Parameters that a rerun reads again, though autograd has not saved them.

A parameter whose value backward needs is saved, and its version is compared when it comes back. Others are only read: a bias,
an embedding, and under autocast every weight, of which a cast is saved that a rerun makes anew. Should one of these be modified
between forward and backward, then the rerun computes something else without a word, where plain autograd has no need of it any
more and gives the right gradients. So the versions of the parameters that a region reaches are noted when its forward
begins, and compared when it is rerun; and with them those of other tensors that require grad and that the function closes over.
(Those that require none are put back for a rerun, see :mod:`ckpt_hooks._module_state`.)

A region may reach parameters that it does not read, and those may well change in between: an optimizer that steps in the course
of a backward has changed the layers behind. So a rerun that finds some changed goes on, watched. As soon as an operator reads
one of them, what is saved from there on is not trusted: whoever asks for it gets an error.

Functions that write to a parameter themselves write again in a rerun. One that is clamped, say, or filled before it is read is
read as forward read it. What the rerun wrote is undone when it ends, the version included: another rerun, and whoever saved the
parameter, finds it as forward left it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ._dispatch import QuietDispatchMode, count_writes
from ._module_plan import ModulePlan
from ._operators import Kind, facts_of, written_by
from ._refit import copy_of, fill_all
from ._torch import storage_of

__all__ = ["NO_PARAMETERS", "References", "WatchReads", "changed", "references_of", "versions_of", "without"]

#: Modules whose own parameters are meant, and other tensors; they may be gone by now. No weak reference to a parameter outlives
#: its region: ``torch.utils.swap_tensors``, by which modules convert some, refuses those that have one.
References = tuple[Sequence["weakref.ref[Module]"], Sequence["weakref.ref[torch.Tensor]"]]

NO_PARAMETERS: References = ((), ())

_TYPES = frozenset({torch.Tensor, Parameter})


def references_of(plans: Sequence[ModulePlan], tensors: Sequence[torch.Tensor]) -> References:
    """Returns the parameters of modules, and those among other tensors that require grad."""
    if len(plans) == 1 and not tensors:
        return plans[0].parameters
    own = [tensor for tensor in tensors if tensor.requires_grad and type(tensor) in _TYPES and not tensor.is_inference()]
    modules = itertools.chain.from_iterable(plan.parameters[0] for plan in plans)
    return list(modules), list(map(weakref.ref, own))


def versions_of(references: References) -> list[int]:
    """Returns the version of each parameter; -1 where it has none."""
    modules, tensors = references
    try:
        found = [
            parameter._version
            for reference in modules
            for parameter in reference()._parameters.values()  # type: ignore[union-attr]
            if parameter is not None
        ]
    except (AttributeError, RuntimeError, ValueError):  # a module that is gone, a parameter without versions or not made yet
        return [-1 if tensor is None else _version_of(tensor) for tensor in _tensors_of(references)]
    if tensors:
        found += [-1 if (tensor := reference()) is None else tensor._version for reference in tensors]
    return found


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _tensors_of(references: References) -> list[torch.Tensor | None]:
    modules, tensors = references
    owned = [
        parameter
        for reference in modules
        if (module := reference()) is not None
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    return [*owned, *(reference() for reference in tensors)]


def without(references: References, versions: list[int], left_out: frozenset[int]) -> tuple[References, list[int]]:
    """Returns parameters and their versions without some, which are given by the ``id`` of each."""
    found = zip(_tensors_of(references), versions, strict=False)
    left = [(tensor, version) for tensor, version in found if tensor is not None and id(tensor) not in left_out]
    return ((), [weakref.ref(tensor) for tensor, _ in left]), [version for _, version in left]


def changed(references: References, versions: list[int]) -> list[tuple[torch.Tensor, int]]:
    """Returns the parameters that were written to since, and the versions that they should have.

    None, where some have been added or taken out meanwhile.
    """
    tensors = _tensors_of(references)
    if len(tensors) != len(versions):
        return []
    return [
        (tensor, version)
        for tensor, version in zip(tensors, versions, strict=True)
        if tensor is not None and version >= 0 and _version_of(tensor) != version
    ]


#: A storage, None if there is none, and from where to where in it, in bytes.
_Place = tuple["int | None", int, int]


def _place_of(tensor: torch.Tensor) -> _Place:
    storage = storage_of(tensor)
    if storage is None or tensor.is_nested:
        return None, 0, 0
    start, extent, size = tensor.storage_offset(), 1, tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (length - 1) * stride
    return storage, int(start * size), int((start + extent) * size)


def _places_in(values: Any) -> list[_Place]:
    return [_place_of(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _overlap(one: _Place, other: _Place) -> bool:
    return one[0] is not None and one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


#: Hand out memory without looking at it, or look at nothing but its shape.
_HARMLESS = frozenset({Kind.VIEW, Kind.IGNORED, Kind.ALIASES, Kind.FACTORY})


#: Writing operators whose result is the same on what they have written to before: run again, they do what they did in forward.
_OVERWRITES = frozenset(
    {
        "abs_",
        "ceil_",
        "clamp_",
        "clamp_max_",
        "clamp_min_",
        "clip_",
        "copy_",
        "embedding_renorm_",
        "fill_",
        "fill_diagonal_",
        "floor_",
        "hardtanh_",
        "index_copy_",
        "index_fill_",
        "masked_fill_",
        "nan_to_num_",
        "normal_",
        "relu_",
        "renorm_",
        "round_",
        "sign_",
        "threshold_",
        "tril_",
        "triu_",
        "trunc_",
        "uniform_",
        "zero_",
        "_foreach_abs_",
        "_foreach_clamp_max_",
        "_foreach_clamp_min_",
        "_foreach_copy_",
        "_foreach_zero_",
    }
)


class WatchReads(QuietDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when an operator first reads from the memory of a parameter that has changed, and undoes writes to those.

    Attributes:
        found: The parameter that was read, and the version that it should have.
        trusted: How many tensors had been saved by then.
    """

    def __init__(self, changed: list[tuple[torch.Tensor, int]], saved: Sequence[torch.Tensor]) -> None:
        """Prepares to watch.

        Args:
            changed: The parameters, and the versions that they should have.
            saved: Gets one entry a tensor that the rerun saves.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = [(_place_of(parameter), parameter, version) for parameter, version in changed]
        self._saved = saved
        self._undo: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.found: tuple[torch.Tensor, int] | None = None
        self.trusted = 0

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        fill_all((parameter, version, content, None) for parameter, version, content in self._undo)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = facts_of(func)[1]
        written = _places_in(written_by(func, args, kwargs)) if kind is Kind.WRITES else ()
        if written and func._schema.name.partition("::")[2] in _OVERWRITES:
            self._about_to_write(written)
        if kind not in _HARMLESS and self._watched and self.found is None:
            for place in _places_in((args, kwargs)):
                for watched, parameter, version in self._watched:
                    if self.found is None and _overlap(watched, place):
                        self.found, self.trusted = (parameter, version), len(self._saved)
        if written:
            self._about_to_write(written)
        output = func(*args, **kwargs)
        count_writes(func, args)
        return output

    def _about_to_write(self, written: Sequence[_Place]) -> None:
        left = []
        for entry in self._watched:
            place, parameter, _ = entry
            if any(_overlap(place, other) for other in written):
                self._undo.append((parameter, parameter._version, copy_of(parameter)))
            else:
                left.append(entry)
        self._watched = left
