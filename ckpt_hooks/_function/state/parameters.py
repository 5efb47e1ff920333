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
(``torch.func.functional_call``), or new ones were bound since. A rerun finds forward's, by their names, unless a framework has
exchanged them, as FSDP does with shards. Afterwards what was bound before the rerun is bound, also where the function binds
another one for a while, and was stopped before it bound its own again.

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.mutation import GONE
from ckpt_hooks._operators.facts import Kind, OpFacts, facts_of
from ckpt_hooks._tensors.copies import PLAIN, copy_of, fill_all
from ckpt_hooks._tensors.held_tensors import num_fused_steps, stepped_since
from ckpt_hooks._torch.tensors import is_freed, storage_of
from ckpt_hooks.errors import MutationError

from .container_contents import same
from .module_plan import ModulePlan

#: Where parameters are: modules whose own ones are meant, and other tensors. The list is for the latest numbers and names of
#: the former, which forwards share as long as they are the same.
References = tuple[Sequence["weakref.ref[Module]"], Sequence[torch.Tensor], list["Places"]]

#: The parameters of a module, by name.
Owner = dict[str, "torch.nn.Parameter | None"]

#: The ``id`` of each parameter, and its module and name; and all owners, and what is in these.
Places = tuple[list[int], list[tuple["weakref.ref[Module]", str]], list[Owner], list[int]]

_requires_grad = operator.attrgetter("requires_grad")
_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def references_of(plans: Sequence[ModulePlan], tensors: Sequence[torch.Tensor]) -> References:
    """Returns the places of the parameters of modules, and of other tensors that require grad."""
    if len(plans) == 1 and not tensors:
        return plans[0].parameters
    own = [tensor for tensor in tensors if tensor.requires_grad and type(tensor) in PLAIN and not tensor.is_inference()]
    return list(itertools.chain.from_iterable(plan.parameters[0] for plan in plans)), own, []


def _parameters_of(modules: Sequence[weakref.ref[Module]]) -> list[torch.Tensor]:
    """Returns the present parameters."""
    return [
        parameter
        for reference in modules
        if (module := reference()) is not None
        for parameter in module._parameters.values()
        if parameter is not None
    ]


def _places_of(numbers: list[int], modules: Sequence[weakref.ref[Module]]) -> Places:
    """Returns the places of the present parameters, which have some numbers."""
    alive = [(reference, module._parameters) for reference in modules if (module := reference()) is not None]
    names = [(reference, name) for reference, own in alive for name, parameter in own.items() if parameter is not None]
    owners = [own for _, own in alive]
    return numbers, names, owners, _bound_in(owners)


def _bound_in(owners: Sequence[Owner]) -> list[int]:
    """Returns the ``id`` of all that is bound in the parameters of modules: half a microsecond for a transformer's block."""
    return list(map(id, _chain(map(_values, owners))))


_chain, _values = itertools.chain.from_iterable, dict.values


class Rebound:
    """What was bound in modules where forward's parameters are bound for a rerun.

    Attributes:
        before: The parameters of modules, and a copy from before.
        hidden: Attributes of modules by the name of a parameter, taken out.
        lost: Parameters which stand in the places of forward's, which are gone, each with :data:`GONE` for a version.
        names: Names for which forward's parameter is gone, and nothing stands in its place.
    """

    __slots__ = ("before", "hidden", "lost", "names")

    def __init__(self, modules: Sequence[weakref.ref[Module]]) -> None:
        owners = [module._parameters for reference in modules if (module := reference()) is not None]
        self.before = [(own, own.copy()) for own in owners]
        self.lost: list[tuple[torch.Tensor, int]] = []
        self.names: list[str] = []
        self.hidden: list[tuple[dict[str, Any], str, Any]] = []

    def restore(self) -> None:
        """Binds what was bound before."""
        for own, before in self.before:
            if not same(own, before):
                own.clear()
                own.update(before)
        for attributes, name, value in self.hidden:
            attributes[name] = value


def _is_of_framework(found: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Whether a framework may have exchanged a parameter, as FSDP does with shards and what it gathers of these."""
    return (
        hasattr(found, "_fsdp_flattened")  # of FSDP's first version
        or is_traceable_wrapper_subclass(found)  # of the second, as ``DTensor`` is, which may gather to another one
        or (now is not None and is_traceable_wrapper_subclass(now))
        or is_freed(found)
    )


class Noted:
    """Parameters and other tensors reached by a region, and their versions when forward began.

    Parameters that require grad are held, as the graph holds them too; all other tensors are held weakly. Other tensors may
    have a history: of the region before, and so on.
    """

    __slots__ = ("_held", "_left_out", "_modules", "_places", "_steps", "_versions", "_weak")

    def __init__(self, references: References) -> None:
        self._steps = num_fused_steps()
        self._modules, others, latest = references
        self._held: Sequence[torch.Tensor] = _parameters_of(self._modules)
        numbers = list(map(id, self._held))
        if not latest or latest[0][0] != numbers:
            latest[:] = [_places_of(numbers, self._modules)]
        self._places = latest[0]
        self._left_out: frozenset[int] = frozenset()
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

    def bind(self) -> Rebound | None:
        """Binds the noted parameters in their modules; returns what was bound there, or None if these were."""
        _, _, owners, bound = self._places
        is_bound = _bound_in(owners) == bound
        is_there = not self._weak or None not in [reference() for reference in self._weak]
        return None if is_bound and is_there else self._rebind()

    def unbind(self, rebound: Rebound | None) -> None:
        """Binds what was bound before a rerun, also in place of what the function has bound, and been stopped."""
        if rebound is not None:
            rebound.restore()
        elif _bound_in(self._places[2]) != self._places[3]:
            self._rebind()

    def _rebind(self) -> Rebound:
        rebound = Rebound(self._modules)
        noted: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in self._tensors() if tensor is not None}
        try:
            for number, (reference, name) in zip(*self._places[:2], strict=True):
                module, found = reference(), noted.get(number)
                if module is None or number in self._left_out:
                    continue
                now = module._parameters.get(name)
                if found is None and now is not None:
                    rebound.lost.append((now, GONE))
                elif found is None:
                    rebound.names.append(name)
                elif found is not now and not _is_of_framework(found, now):
                    module._parameters[name] = found  # type: ignore[assignment]  # functional_call binds tensors, too
                    if name in module.__dict__:  # an attribute, which would be found first
                        rebound.hidden.append((module.__dict__, name, module.__dict__.pop(name)))
        except BaseException:
            rebound.restore()
            raise
        return rebound

    def leave_out(self, parameters: frozenset[int]) -> None:
        """Takes parameters out, given by the ``id`` of each."""
        left = [id(tensor) not in parameters for tensor in self._tensors()]
        self._versions = list(itertools.compress(self._versions, left))
        self._weak = list(itertools.compress(self._weak, left[len(self._held) :]))
        self._held = list(itertools.compress(self._held, left))
        self._left_out = parameters


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
        changed: Sequence[tuple[torch.Tensor, int]],
        collector: Doubting,
        error: Callable[[torch.Tensor, int], MutationError],
    ) -> None:
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
