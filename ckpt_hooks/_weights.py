"""Parameters that a rerun reads again, though autograd has not saved them.

A parameter whose value backward needs is saved, and its version is compared when it comes back. Others are only read: a bias,
an embedding, and under autocast every weight, of which a cast is saved that a rerun makes anew. Should one of these be modified
between forward and backward, then the rerun computes something else without a word, where plain autograd has no need of it any
more and gives the right gradients. So the versions of the parameters that a region reaches are noted when its forward has
ended, and compared when it is rerun; and with them those of other tensors that require grad and that the function closes over.
(Those that require none are put back for a rerun, see :mod:`ckpt_hooks._module_state`.)

A region may reach parameters that it does not read, and those may well change in between: an optimizer that steps in the course
of a backward has changed the layers behind. So a rerun that finds some changed goes on, watched, and fails as soon as an
operator reads one of them. One that the function writes to before it reads it, as to clamp it, was written to in forward as
well, maybe by several regions that share it, and is left alone from there on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ._dispatch import QuietDispatchMode, count_writes
from ._module_plan import ModulePlan
from ._operators import Kind, facts_of, written_by
from ._torch import storage_of

__all__ = ["NO_PARAMETERS", "References", "WatchReads", "changed", "references_of", "versions_of"]

#: Parameters; they may be gone by now.
References = Sequence["weakref.ref[torch.Tensor]"]

NO_PARAMETERS: References = ()


def references_of(plans: Iterable[ModulePlan], tensors: Iterable[torch.Tensor]) -> References:
    """Returns the parameters of modules, and those among other tensors that are parameters or require grad."""
    lists = [plan.parameters for plan in plans]
    own: list[torch.Tensor] = [
        tensor
        for tensor in tensors
        if (type(tensor) is Parameter or (type(tensor) is torch.Tensor and tensor.requires_grad)) and not tensor.is_inference()
    ]
    if len(lists) == 1 and not own:
        return lists[0]
    return [*itertools.chain.from_iterable(lists), *map(weakref.ref, own)]


def versions_of(references: References) -> list[int]:
    """Returns the version of each parameter; -1 where it is gone."""
    try:
        return [reference()._version for reference in references]  # type: ignore[union-attr]
    except AttributeError:
        return [-1 if (parameter := reference()) is None else parameter._version for reference in references]


def changed(references: References, versions: list[int]) -> list[tuple[torch.Tensor, int]]:
    """Returns the parameters that were written to since, and the versions that they should have."""
    found = zip(references, versions, strict=True)
    return [
        (parameter, version)
        for reference, version in found
        if (parameter := reference()) is not None and parameter._version != version
    ]


#: A storage, None if there is none, and from where to where in it, in elements.
_Place = tuple["int | None", int, int]


def _place_of(tensor: torch.Tensor) -> _Place:
    storage = storage_of(tensor)
    if storage is None or tensor.is_nested:
        return None, 0, 0
    start, extent = tensor.storage_offset(), 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (size - 1) * stride
    return storage, int(start), int(start + extent)


def _overlap(one: _Place, other: _Place) -> bool:
    return one[0] is not None and one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


class WatchReads(QuietDispatchMode):  # type: ignore[no-untyped-call]
    """Fails as soon as an operator reads from the memory of a parameter that has changed; views do not read.

    Attributes:
        found: The error, which the function may have swallowed.
    """

    def __init__(self, changed: list[tuple[torch.Tensor, int]], error: Callable[[torch.Tensor, int], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = [(_place_of(parameter), parameter, version) for parameter, version in changed]
        self._error = error
        self.found: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = facts_of(func)[1]
        if kind is Kind.WRITES:
            written = _places_in(written_by(func, args, kwargs))
            self._watched = [entry for entry in self._watched if not any(_overlap(entry[0], place) for place in written)]
        if kind not in _HARMLESS and self._watched:
            for place in _places_in((args, kwargs)):
                for watched, parameter, version in self._watched:
                    if _overlap(watched, place):
                        self.found = self._error(parameter, version)
                        raise self.found
        output = func(*args, **kwargs)
        count_writes(func, args)
        return output


#: Hand out memory without looking at it, or look at nothing but its shape.
_HARMLESS = frozenset({Kind.VIEW, Kind.IGNORED, Kind.ALIASES, Kind.FACTORY})


def _places_in(values: Any) -> list[_Place]:
    return [_place_of(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
