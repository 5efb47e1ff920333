"""Parameters which a rerun reads again, though autograd has not saved them.

If backward needs a parameter's value, the parameter is saved, and its version is compared on unpacking. Other parameters are
only read: a bias, an embedding, and under autocast every weight, of which only the cast is saved, and a rerun makes the cast
anew. If such a parameter is modified between forward and backward, the rerun silently computes other values, while plain
autograd needs the parameter no more and gives the right gradients. So the versions of all parameters reached by a region are
noted when its forward begins, and compared when the region is rerun. The same goes for closed-over tensors that require grad.
(Closed-over tensors that require none are put back for a rerun, see :mod:`.contents`.)

A region may reach parameters without reading them, and these may well change in between: an optimizer that steps in the course
of a backward has changed the layers behind. So a rerun with changed parameters is watched. As soon as an operator is about to
read a changed parameter, the rerun ends: no later value would be right, and unpacking one raises an error. (To go on may also
never end, if the function has a backward inside that comes to the very node waiting for this rerun.)

A module may have other parameters by the time of a rerun: those of forward were given for one call
(``torch.func.functional_call``), or new ones were bound since. A rerun finds forward's, unless a framework has exchanged them,
as FSDP does with shards: such a parameter has another class or another shape.

Functions that write to a parameter themselves write again in a rerun. A parameter clamped or filled before its first read is
read as forward read it. The end of a rerun undoes its writes, the version included: another rerun, and every operator that
saved the parameter, finds the parameter as forward left it.
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

from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._operators.facts import OpFacts, facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._tensors.copies import PLAIN, copy_of, fill_all
from ckpt_hooks._tensors.fused_steps import num_fused_steps, stepped_since
from ckpt_hooks._torch import is_freed, storage_of
from ckpt_hooks.errors import MutationError

from .module_plan import ModulePlan

__all__ = [
    "Bound",
    "Noted",
    "References",
    "WatchReads",
    "bind_again",
    "references_of",
]

#: Where parameters are: modules whose own ones are meant, and other tensors.
References = tuple[Sequence["weakref.ref[Module]"], Sequence[torch.Tensor]]

_requires_grad = operator.attrgetter("requires_grad")
_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def references_of(plans: Sequence[ModulePlan], tensors: Sequence[torch.Tensor]) -> References:
    """Returns the places of the parameters of modules, and of other tensors that require grad."""
    if len(plans) == 1 and not tensors:
        return plans[0].parameters
    own = [tensor for tensor in tensors if tensor.requires_grad and type(tensor) in PLAIN and not tensor.is_inference()]
    return list(itertools.chain.from_iterable(plan.parameters[0] for plan in plans)), own


def _parameters_of(modules: Sequence[weakref.ref[Module]]) -> list[torch.Tensor]:
    """Returns the present parameters: a framework may have exchanged the parameters of its modules by the time of a rerun."""
    return [
        parameter
        for reference in modules
        if (module := reference()) is not None
        for parameter in module._parameters.values()
        if parameter is not None
    ]


#: The parameters of a module, a name in these, and what is bound to it.
Bound = tuple[dict[str, "torch.nn.Parameter | None"], str, torch.nn.Parameter]


def bind_again(bound: Sequence[Bound]) -> None:
    """Binds parameters in their modules."""
    for own, name, parameter in bound:
        own[name] = parameter


class Noted:
    """Parameters and other tensors reached by a region, and their versions when forward began.

    Parameters that require grad are held, as the graph holds them too; all other tensors are held weakly. Other tensors may
    have a history: of the region before, and so on.
    """

    __slots__ = ("_held", "_modules", "_numbers", "_steps", "_versions", "_weak")

    def __init__(self, references: References) -> None:
        """Notes the present versions."""
        self._steps = num_fused_steps()
        self._modules, others = references
        self._held: Sequence[torch.Tensor] = _parameters_of(self._modules)
        self._numbers = list(map(id, self._held))
        self._weak: Sequence[weakref.ref[torch.Tensor]] = ()
        if others or not all(map(_requires_grad, self._held)):
            frozen = [parameter for parameter in self._held if not parameter.requires_grad]
            self._weak = list(map(weakref.ref, (*frozen, *others)))
            self._held = [parameter for parameter in self._held if parameter.requires_grad]
        self._versions = self._read()

    def _read(self) -> list[int]:
        """Returns the version of each tensor, held tensors first; -1 for a tensor without version."""
        try:
            versions = list(map(_version, self._held))
            return versions + [reference()._version for reference in self._weak] if self._weak else versions  # type: ignore[union-attr]
        except (AttributeError, RuntimeError, ValueError):  # gone, without versions, or not made yet
            return list(map(_version_or_none, self._tensors()))

    def _tensors(self) -> list[torch.Tensor | None]:
        return [*self._held, *(reference() for reference in self._weak)]

    def required_grad(self, plans: Sequence[ModulePlan]) -> set[int]:
        """Returns the ``id`` of each noted tensor which required grad when noted.

        Args:
            plans: The plans of the noted modules, whose frozen parameters required no grad.
        """
        others = {id(tensor) for reference in self._weak if (tensor := reference()) is not None}
        of_modules = {id(parameter) for plan in plans for parameter in _parameters_of(plan.parameters[0])}
        return {*map(id, self._held), *(others - of_modules)}

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the tensors written to since, with their noted versions."""
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

    def bind(self, lost: list[tuple[torch.Tensor, int]]) -> Sequence[Bound]:
        """Binds the noted parameters in their modules, where other ones are; returns those, for :func:`bind_again`.

        Args:
            lost: Gets those which stay, since the noted one is gone, each with the version -1.
        """
        if list(map(id, _parameters_of(self._modules))) == self._numbers:
            return ()
        noted: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in self._tensors() if tensor is not None}
        modules = [module for reference in self._modules if (module := reference()) is not None]
        places = [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        if len(places) != len(self._numbers):  # some were added, or taken out
            return ()
        others = []
        for (own, name, now), number in zip(places, self._numbers, strict=True):
            found = noted.get(number)
            if found is now or not number or type(now) not in PLAIN:
                continue
            if found is None:
                lost.append((now, -1))
            elif type(found) in PLAIN and found.shape == now.shape and not is_freed(found):
                others.append((own, name, now))
                own[name] = found  # type: ignore[assignment]  # functional_call binds tensors, too
        return others

    def leave_out(self, parameters: frozenset[int]) -> None:
        """Takes parameters out, given by the ``id`` of each."""
        left = [id(tensor) not in parameters for tensor in self._tensors()]
        self._versions = list(itertools.compress(self._versions, left))
        self._weak = list(itertools.compress(self._weak, left[len(self._held) :]))
        self._held = list(itertools.compress(self._held, left))
        self._numbers = [0 if number in parameters else number for number in self._numbers]


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
    """The collector of a rerun's values (:class:`ckpt_hooks._function.collector.Collector`)."""

    def distrust(self, error: Callable[[], MutationError]) -> None:
        """Marks all later values as wrong; may end the rerun."""


class WatchReads(QuietDispatchMode):
    """Notes an operator's first read from the memory of a changed parameter, and undoes writes to changed parameters."""

    def __init__(
        self,
        changed: list[tuple[torch.Tensor, int]],
        collector: Doubting,
        error: Callable[[torch.Tensor, int], MutationError],
    ) -> None:
        """Prepares to watch.

        Args:
            changed: The parameters, and their versions in forward.
            collector: Gets the values of the rerun, and is told when later values are wrong.
            error: Returns the error for a parameter and its version in forward.
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
