"""Parameters that a rerun reads again, though autograd has not saved them.

A parameter whose value backward needs is saved, and its version is compared when it comes back. Others are only read: a bias,
an embedding, and under autocast every weight, of which a cast is saved that a rerun makes anew. Should one of these be modified
between forward and backward, then the rerun computes something else without a word, where plain autograd has no need of it any
more and gives the right gradients. So the versions of the parameters that a region reaches are noted when its forward
begins, and compared when it is rerun; and with them those of other tensors that require grad and that the function closes over.
(Those that require none are put back for a rerun, see :mod:`.module_state`.)

A region may reach parameters that it does not read, and those may well change in between: an optimizer that steps in the course
of a backward has changed the layers behind. So a rerun that finds some changed is watched. As soon as an operator is about to
read one of them, the rerun ends: no value to come would be right, and whoever asks for one gets an error. (To go on may also
never end, if the function has a backward in it that comes to the very node which waits for this rerun.)

Functions that write to a parameter themselves write again in a rerun. One that is clamped, say, or filled before it is read is
read as forward read it. What the rerun wrote is undone when it ends, the version included: another rerun, and whoever saved the
parameter, finds it as forward left it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ckpt_hooks._core.modes import PausableDispatchMode, count_writes
from ckpt_hooks._operators.facts import OpFacts, facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._tensors.copies import PLAIN, copy_of, fill_all
from ckpt_hooks._tensors.fused_steps import num_fused_steps, stepped_since
from ckpt_hooks._torch import storage_of
from ckpt_hooks.errors import MutationError

from .module_plan import ModulePlan

__all__ = [
    "Noted",
    "References",
    "WatchReads",
    "references_of",
]

#: Where parameters are: modules whose own ones are meant, and other tensors.
References = tuple[Sequence["weakref.ref[Module]"], Sequence[torch.Tensor]]

_requires_grad = operator.attrgetter("requires_grad")
_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def references_of(plans: Sequence[ModulePlan], tensors: Sequence[torch.Tensor]) -> References:
    """Returns where the parameters of modules are, and those among other tensors that require grad."""
    if len(plans) == 1 and not tensors:
        return plans[0].parameters
    own = [tensor for tensor in tensors if tensor.requires_grad and type(tensor) in PLAIN and not tensor.is_inference()]
    return list(itertools.chain.from_iterable(plan.parameters[0] for plan in plans)), own


def _parameters_of(modules: Sequence[weakref.ref[Module]]) -> list[torch.Tensor]:
    """Returns the parameters as they are now: a framework may have its modules hold others by the time of a rerun."""
    return [
        parameter
        for reference in modules
        if (module := reference()) is not None
        for parameter in module._parameters.values()
        if parameter is not None
    ]


class Noted:
    """Parameters and other tensors that a region reaches, and their versions when its forward began.

    Parameters that require grad are held, as the graph holds them too; all else weakly. Other tensors may have a history, which
    may be that of a region before, and so on.
    """

    __slots__ = ("_held", "_steps", "_versions", "_weak")

    def __init__(self, references: References) -> None:
        """Notes the versions that they have now."""
        self._steps = num_fused_steps()
        modules, others = references
        self._held: Sequence[torch.Tensor] = _parameters_of(modules)
        self._weak: Sequence[weakref.ref[torch.Tensor]] = ()
        if others or not all(map(_requires_grad, self._held)):
            frozen = [parameter for parameter in self._held if not parameter.requires_grad]
            self._weak = list(map(weakref.ref, (*frozen, *others)))
            self._held = [parameter for parameter in self._held if parameter.requires_grad]
        self._versions = self._read()

    def _read(self) -> list[int]:
        """Returns the version of each, those that are held before the others; -1 where it has none."""
        try:
            versions = list(map(_version, self._held))
            return versions + [reference()._version for reference in self._weak] if self._weak else versions  # type: ignore[union-attr]
        except (AttributeError, RuntimeError, ValueError):  # gone, without versions, or not made yet
            return list(map(_version_or_none, self._tensors()))

    def _tensors(self) -> list[torch.Tensor | None]:
        return [*self._held, *(reference() for reference in self._weak)]

    def required_grad(self, plans: Sequence[ModulePlan]) -> set[int]:
        """Returns which of them required grad when they were noted, by the ``id`` of each.

        Args:
            plans: Those of the modules that they were noted of, whose frozen parameters did not.
        """
        others = {id(tensor) for reference in self._weak if (tensor := reference()) is not None}
        of_modules = {id(parameter) for plan in plans for parameter in _parameters_of(plan.parameters[0])}
        return {*map(id, self._held), *(others - of_modules)}

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns those that were written to since, and the versions that they should have."""
        if self._read() == self._versions and self._steps == num_fused_steps():
            return []
        # One that is gone has no version, and steps may be those of others.
        return [
            (tensor, version)
            for tensor, version in zip(self._tensors(), self._versions, strict=True)
            if version >= 0
            and tensor is not None
            and (_version_or_none(tensor) != version or stepped_since(tensor, self._steps))
        ]

    def leave_out(self, parameters: frozenset[int]) -> None:
        """Takes some out, which are given by the ``id`` of each."""
        left = [id(tensor) not in parameters for tensor in self._tensors()]
        self._versions = list(itertools.compress(self._versions, left))
        self._weak = list(itertools.compress(self._weak, left[len(self._held) :]))
        self._held = list(itertools.compress(self._held, left))


def _version_or_none(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or is_lazy(tensor) or tensor.is_inference() else tensor._version


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


class Doubting(Protocol):
    """What collects the values of a rerun (:class:`ckpt_hooks._function.collector.Collector`)."""

    def distrust(self, error: Callable[[], MutationError]) -> None:
        """Is told that no value to come is to be trusted; may end the rerun."""


class WatchReads(PausableDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when an operator first reads from the memory of a parameter that has changed, and undoes writes to those."""

    def __init__(
        self,
        changed: list[tuple[torch.Tensor, int]],
        collector: Doubting,
        error: Callable[[torch.Tensor, int], MutationError],
    ) -> None:
        """Prepares to watch.

        Args:
            changed: The parameters, and the versions that they should have.
            collector: Gets the values of the rerun, and is told when those to come are not to be trusted.
            error: Returns the error for a parameter and the version that it should have.
        """
        super().__init__()
        self._watched = [(_place_of(parameter), parameter, version) for parameter, version in changed]
        self._collector, self._error = collector, error
        self._undo: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._has_read = False

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        fill_all((parameter, version, content, None) for parameter, version, content in self._undo)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            self._look_at(facts_of(func), args, kwargs)
        output = func(*args, **kwargs)
        count_writes(func, args)
        return output

    def _look_at(self, facts: OpFacts, args: Any, kwargs: Any) -> None:
        written = _places_in(facts.written_in(args, kwargs)) if facts.kind is Kind.WRITES else ()
        if written and facts.is_repeatable:
            self._about_to_write(written)
        if facts.kind not in _HARMLESS and self._watched and not self._has_read:
            for place in _places_in((args, kwargs)):
                for watched, parameter, version in self._watched:
                    if not self._has_read and _overlap(watched, place):
                        self._has_read = True
                        self._collector.distrust(functools.partial(self._error, parameter, version))
        if written:
            self._about_to_write(written)

    def _about_to_write(self, written: Sequence[_Place]) -> None:
        left = []
        for entry in self._watched:
            place, parameter, _ = entry
            if any(_overlap(place, other) for other in written):
                self._undo.append((parameter, parameter._version, copy_of(parameter)))
            else:
                left.append(entry)
        self._watched = left
