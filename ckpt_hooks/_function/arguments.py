"""The arguments of a region, taken apart so that their tensors can be saved like other saved tensors (Rule 2).

Tensors are found at any depth of lists, tuples, dicts and dataclasses (:mod:`ckpt_hooks._tensors.containers`).

A repeated tensor comes back as one object, since functions ask whether two arguments are the same
(``torch.nn.MultiheadAttention`` takes another path if query is key), and a saved tensor passed through hooks would come back as
a new object each time.

Without active saved-tensor hooks, a ``SavedTensor`` would keep the tensor itself and its version; doing just that here costs a
sixth.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import are_of_frame
from ckpt_hooks._core.mutation import changed_argument
from ckpt_hooks._tensors.containers import Capture, build
from ckpt_hooks._tensors.copies import as_kind, restore_layout
from ckpt_hooks._tensors.fused_steps import num_fused_steps, stepped_since
from ckpt_hooks._tensors.saved_inputs import save_all
from ckpt_hooks._torch.autograd import SavedTensor, top_saved_tensors_hooks
from ckpt_hooks._torch.tensors import storage_of

from .argument_places import Captured, flag_error, path_at
from .origins import Origins, has_history
from .packing import unpack, unpack_watched
from .state.notes import Lent

__all__ = ["Arguments", "HandedOut", "Hooks", "Restored", "put_hooks_back"]

#: The position of a tensor, the tensor as hooks handed it out, and its version then if they are somebody else's.
HandedOut = tuple[int, torch.Tensor, "int | None"]


#: The frame around a region, and the region's path.
Inside = tuple[Frame, RegionPath]

#: The hooks registered on tensors: each dict of hooks by their numbers, and its content.
Hooks = Sequence[tuple[dict[int, Any], dict[int, Any]]]

#: The tensors, and those that are other ones than in forward, by the ``id`` that these had.
Restored = tuple[Sequence["torch.Tensor | None"], dict[int, torch.Tensor]]

_NO_KWARGS: dict[str, Any] = {}
_NO_STAND_INS: dict[int, torch.Tensor] = {}
_NO_OBJECTS: tuple[Any, ...] = ()
_NO_FLAGS: dict[int, bool] = {}
_NO_HOOKS: Sequence[Callable[[], dict[int, Any] | None]] = ()


_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
#: Version, and whether grad is required; -1 and None where that is not to be had.
_Facts = tuple[int, "bool | None"]
_NO_FACTS: _Facts = (-1, None)
_facts_of = operator.attrgetter("_version", "requires_grad")


def _facts_of_all(tensors: Sequence[torch.Tensor | None]) -> list[_Facts]:
    try:
        return list(map(_facts_of, tensors))
    except (AttributeError, RuntimeError):
        return [_NO_FACTS if tensor is None else _facts_slowly(tensor) for tensor in tensors]


def _facts_slowly(tensor: torch.Tensor) -> _Facts:
    version = -1 if tensor.is_inference() else tensor._version  # inference tensors refuse to tell
    try:
        return version, tensor.requires_grad
    except RuntimeError:  # a view of many whose base was modified, which has lost its graph
        return version, None


def _strides_of(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    return {
        position: tensor.stride()
        for position, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_contiguous()
    }


def _with_flags(tensors: Sequence[torch.Tensor | None], flags: dict[int, bool]) -> list[torch.Tensor | None]:
    """Returns tensors, with aliases for the positions in ``flags``, whose ``requires_grad`` is as when forward began."""
    aliases: dict[int, torch.Tensor] = {}
    tensors = list(tensors)
    for position, flag in flags.items():
        tensor = tensors[position]
        assert tensor is not None
        if id(tensor) not in aliases:
            alias = as_kind(tensor.detach(), type(tensor))
            alias.__dict__.update(tensor.__dict__)
            aliases[id(tensor)] = alias.requires_grad_(flag)
        tensors[position] = aliases[id(tensor)]
    return tensors


def put_hooks_back(before: Hooks, now: Hooks) -> None:
    """Restores the hooks of tensors after a rerun: gradients may yet come, and the hooks of forward are there.

    Args:
        before: The hooks before the rerun, see :meth:`Arguments.hooks`.
        now: The present ones.
    """
    noted = {id(hooks): content for hooks, content in before}
    for hooks, _ in (*before, *now):
        content = noted.get(id(hooks), {})
        if hooks.keys() != content.keys():
            hooks.clear()
            hooks.update(content)


class Arguments:
    """The arguments of one call, captured, with their tensors saved."""

    __slots__ = (
        "_captured",
        "_containers",
        "_facts",
        "_flags",
        "_foreign",
        "_hooked",
        "_ids",
        "_kept_facts",
        "_origins",
        "_saved",
        "_steps",
        "_storages",
        "_strides",
        "_tensors",
        "live",
        "objects",
    )

    #: What of the arguments is neither a tensor nor was taken apart: modules, generators, functions, and the like.
    objects: Sequence[Any]
    #: Where hooks were active, all tensors as they came. To be set to None when forward has ended, in which the caller has them
    #: at hand.
    live: Sequence[torch.Tensor] | None

    _captured: Captured
    # The ``id`` that each container had in forward; unset if there are only tensors.
    _containers: Sequence[int]
    # Of tensors that are kept, and of which the function itself has changed whether they require grad: whether they did before.
    _flags: dict[int, bool]
    # Whether what was saved comes back through hooks of somebody else, which may hand on one tensor each time.
    _foreign: bool
    # Where hooks of saved tensors were active: the hooks that are registered on each tensor, of which a rerun gets another one.
    _hooked: Sequence[Callable[[], dict[int, Any] | None]]
    # Of all tensors: the ``id`` that each had in forward; unset where no hooks were active.
    _ids: Sequence[int]
    _kept_facts: list[_Facts]
    # Where hooks were active, what each tensor was saved as: None where it is kept, a position where it is the same as another.
    _saved: list[SavedTensor | int | None] | None
    # Of those tensors that aliases are kept of, if any.
    _origins: Origins | None
    # How many steps of fused optimizers there were.
    _steps: int
    _tensors: Sequence[torch.Tensor | None]
    # Where hooks were active: which storage each is in, which foreign hooks may hand on as it is.
    _storages: tuple[int | None, ...]
    # Of all tensors; unset where no hooks were active.
    _facts: list[_Facts]
    # Of those that are not contiguous, by position; unset where no hooks were active.
    _strides: dict[int, tuple[int, ...]]

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, inside: Inside | None = None) -> None:
        if not kwargs and _TENSOR_TYPES.issuperset(map(type, args)):  # the common case, tensors and nothing else
            self._captured = None
            self.objects = _NO_OBJECTS
            tensors: Sequence[torch.Tensor] = args
        else:
            capture = Capture()
            self._captured = (
                [capture.value(value, f"args[{index}]") for index, value in enumerate(args)],
                {key: capture.value(value, f"kwargs[{key!r}]") for key, value in kwargs.items()},
            )
            tensors, self.objects = capture.tensors, capture.objects
            self._containers = capture.finish()
        hooks = top_saved_tensors_hooks(False)
        if hooks is None:
            self._saved = self.live = None
            self._tensors = tensors
        else:
            # Inside a frame a repeated tensor is saved twice: the frame's rerun saves the arguments again, in step with its
            # forward, and may meet two tensors where forward met one.
            if inside is not None and tensors and are_of_frame(hooks):
                inside[0].note_inside(len(tensors), inside[1])
            self._saved, self._tensors = save_all(tensors, each_occurrence=inside is not None)
            self._strides = _strides_of(tensors)
            self._facts, self._ids = _facts_of_all(tensors), list(map(id, tensors))
            self._foreign = hooks[1] not in (unpack, unpack_watched)
            self._storages = tuple(map(storage_of, tensors))
            self.live = tensors
        self._kept_facts = _facts_of_all(self._tensors)
        self._steps = num_fused_steps()
        self._flags, self._hooked, self._origins = _NO_FLAGS, _NO_HOOKS, None

    def close(self) -> None:
        """Ends forward: later changes of a tensor do not come from the function."""
        if self.live is not None:
            self._hooked = [weakref.ref(hooks) for tensor in self.live if (hooks := tensor._backward_hooks)]
            self.live = None
        now = _facts_of_all(self._tensors)
        if now != self._kept_facts:
            self._note_flags(now)
        held = list(self._tensors)
        for position, tensor in enumerate(held):
            if tensor is None or not now[position][1]:
                continue
            # What the function has written to cannot be brought back, and needs no stand-in.
            if has_history(tensor) or (now[position][0] != self._kept_facts[position][0] and not tensor.is_leaf):
                if self._origins is None:
                    self._origins = Origins()
                held[position] = self._origins.let_go(position, tensor)
                self._kept_facts[position] = self._kept_facts[position][0], False
        if self._origins is not None:
            self._tensors = held

    def _note_flags(self, now: Sequence[_Facts]) -> None:
        """Notes tensors whose ``requires_grad`` was changed by the function, by ``requires_grad_``, say."""
        for position, (before, found) in enumerate(zip(self._kept_facts, now, strict=True)):
            if before[1] != found[1] and None not in (before[1], found[1]):
                self._flags = {position: bool(before[1]), **self._flags}
                self._kept_facts[position] = before[0], found[1]

    def _are_as_they_were(self, tensors: Sequence[torch.Tensor]) -> bool:
        return _facts_of_all(tensors) == self._facts and tuple(map(storage_of, tensors)) == self._storages

    def restore(self, region: Callable[[], tuple[str, ...]], handed_out: list[HandedOut], *, is_open: bool = False) -> Restored:
        """Returns the tensors for another call.

        Args:
            region: Returns the names of the region, for an error.
            handed_out: Gets the entries for :meth:`look_at` at the end of the rerun.
            is_open: Whether forward has not ended yet.

        Raises:
            MutationError: If a tensor was modified in place since.
        """
        kept, now = self._tensors, _facts_of_all(self._tensors)
        if now != self._kept_facts:
            if is_open:
                self._note_flags(now)
            if now != self._kept_facts:
                self._raise_changed(region())
        if self._steps != num_fused_steps():
            self._look_for_steps(region)
        if self._flags:
            kept = _with_flags(kept, self._flags)
        stand_ins = _NO_STAND_INS
        if self._origins is not None:
            kept, stand_ins = self._origins.put_into(kept)
        if self._saved is None:
            return kept, stand_ins
        tensors: Sequence[torch.Tensor] = kept  # type: ignore[assignment]
        # A backward in the middle of forward need not ask a region around, which would have to run up to here once more, and
        # this backward with it: with every level of nesting, twice as much.
        if self.live is not None and self._are_as_they_were(self.live):
            tensors = self.live
        else:
            tensors, stand_ins = [], {}
            for position, saved in enumerate(self._saved):
                tensor = kept[position]
                if isinstance(saved, int):
                    tensor = tensors[saved]
                elif tensor is None:
                    assert saved is not None
                    unpacked = saved.unpack()
                    version = self._facts[position][0]
                    if self._foreign and unpacked._version > version and storage_of(unpacked) == self._storages[position]:
                        self._raise_modified(position, unpacked, region())
                    tensor = restore_layout(unpacked, self._strides.get(position), version)
                    is_theirs = tensor is unpacked and self._foreign
                    handed_out.append((position, tensor, tensor._version if is_theirs else None))
                    stand_ins[self._ids[position]] = tensor
                tensors.append(tensor)
        return tensors, stand_ins

    def build(self, tensors: Sequence[Any], lent: Iterable[Lent]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns positional and keyword arguments for another call, in new containers.

        Args:
            tensors: What :meth:`restore` returned.
            lent: What is lent to the rerun: a container which the function reaches otherwise too is there.
        """
        if self._captured is None:
            return tensors, _NO_KWARGS
        built: dict[int, Any] = {}
        for one in lent:
            built.update(one.by_identity(self._containers))
        args, kwargs = self._captured
        return (
            [build(captured, tensors, built) for captured in args],
            {key: build(captured, tensors, built) for key, captured in kwargs.items()},
        )

    def _present(self) -> list[torch.Tensor]:
        """Returns the living tensors of forward, in no order."""
        origins = [] if self._origins is None else self._origins.present()
        return origins + [tensor for tensor in self._tensors if tensor is not None]

    def hooks(self, handed_out: list[HandedOut]) -> Hooks:
        """Returns the hooks registered on the tensors of a rerun, which may be gone while the graph holds their hooks.

        Args:
            handed_out: The entries added by :meth:`restore`.
        """
        references = (*self._hooked, *(() if self._origins is None else self._origins.hooked))
        dicts = [tensor._backward_hooks for tensor in (*self._present(), *(tensor for _, tensor, _ in handed_out))]
        return [(hooks, hooks.copy()) for hooks in (*dicts, *(reference() for reference in references)) if hooks]

    def look_at(self, handed_out: list[HandedOut]) -> None:
        """Notes writes of a rerun to tensors handed out by foreign hooks, which may have no other copy."""
        for position, tensor, version in handed_out:
            if version is not None and tensor._version != version:
                storages = list(self._storages)
                storages[position] = storage_of(tensor)
                self._storages = tuple(storages)

    def _raise_changed(self, region: tuple[str, ...]) -> None:
        for position, (tensor, before, now) in enumerate(
            zip(self._tensors, self._kept_facts, _facts_of_all(self._tensors), strict=True)
        ):
            if tensor is None or before == now:
                continue
            if before[0] != now[0]:
                self._raise_modified(position, tensor, region)
            raise flag_error(path_at(self._captured, position), tensor, before[1], now[1], region)

    def _look_for_steps(self, region: Callable[[], tuple[str, ...]]) -> None:
        for position, tensor in enumerate(self._tensors):
            if tensor is not None and stepped_since(tensor, self._steps):
                self._raise_modified(position, tensor, region())

    def _raise_modified(self, position: int, tensor: torch.Tensor, region: tuple[str, ...]) -> None:
        expected = self._kept_facts[position][0] if self._saved is None else self._facts[position][0]
        has_moved = self._saved is not None and storage_of(tensor) != self._storages[position]
        raise changed_argument(path_at(self._captured, position), tensor, expected, region, has_moved=has_moved)
