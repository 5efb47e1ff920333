"""The arguments of a region, taken apart so that their tensors are saved as autograd saves tensors (Rule 2)."""

# If a caller passes a tensor twice, a rerun gets one object twice, though hooks return a new object for each saved tensor:
# functions compare arguments by ``is``, as ``torch.nn.MultiheadAttention`` does with query and key. Without active saved-tensor
# hooks, ``Arguments`` holds each tensor and its version itself, in a sixth of the time that a ``SavedTensor`` takes.

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import RegionPath, format_path
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.hooks import UNPACKS, are_of_frame
from ckpt_hooks._core.mutation import GONE, Why, fused_steps, mutated, stepped_since
from ckpt_hooks._state.containers import Capture, build
from ckpt_hooks._state.journal import JournalLoan
from ckpt_hooks._state.notes import Memory
from ckpt_hooks._tensors.copies import Base, alias_with_history, as_kind, as_view, base_of, is_dense, is_theirs, restore_layout
from ckpt_hooks._torch.autograd import (
    SavedTensor,
    has_tangent,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    save_tensor,
    top_saved_tensors_hooks,
)
from ckpt_hooks._torch.functions import is_jit_tracing
from ckpt_hooks._torch.tensors import counted_detach, handles_operators, storage_of, version_of

#: A tensor that a rerun got from saved-tensor hooks: its position, the tensor, and its version if the hooks may repeat it.
HandedOut = tuple[int, torch.Tensor, "int | None"]

#: The frame around a region, and the region's path.
PlaceInFrame = tuple[Frame, RegionPath]

#: The tensors for a rerun; and, by the ``id`` of a tensor in forward, the other tensor that stands in for it.
Restored = tuple[Sequence["torch.Tensor | None"], dict[int, torch.Tensor]]

_NONE: dict[Any, Any] = {}  # always empty: most ``Arguments`` share it, to save memory

# The strides and base of a tensor without an entry in ``_layouts``: any strides, no base.
_ANY = None, None

_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
#: A tensor's version, -1 if it counts none, and ``requires_grad``, None if torch raises.
_Facts = tuple[int, "bool | None"]
_facts_of = operator.attrgetter("_version", "requires_grad")


def _facts_of_all(tensors: Sequence[torch.Tensor | None]) -> list[_Facts]:
    try:
        return list(map(_facts_of, tensors))
    except (AttributeError, RuntimeError):
        return list(map(_facts_slowly, tensors))


def _facts_slowly(tensor: torch.Tensor | None) -> _Facts:
    if tensor is None:
        return -1, None
    try:
        return version_of(tensor), tensor.requires_grad
    except RuntimeError:  # torch raises for a multi-output view whose base was modified
        return version_of(tensor), None


def _memory_of(tensor: torch.Tensor | None) -> Memory | None:
    """Returns the memory of a tensor, to notice a later ``tensor.data = ...``; None if unknown."""
    if tensor is None or type(tensor) not in _TENSOR_TYPES or not is_dense(tensor):
        return None
    return Memory(tensor, is_weak=type(tensor) is torch.nn.Parameter)  # weak, so that frameworks can free parameters


def _has_history(tensor: torch.Tensor) -> bool:
    """Whether a tensor that requires grad is the output of an operator, and an alias can stand in for it."""
    # No alias stands in for a view of a modified tensor, since asking for ``is_leaf`` may make a new graph node for the view.
    # Nor for a tensor with a tangent, which an alias would lack.
    if type(tensor) is not torch.Tensor or tensor.is_nested or (tensor._is_view() and tensor._version):
        return False
    return not (tensor.is_leaf or has_tangent(tensor))


def _save_all(
    tensors: Sequence[torch.Tensor], *, each_occurrence: bool
) -> tuple[list[SavedTensor | int | None], list[torch.Tensor | None]]:
    """Saves inputs through the active saved-tensor hooks (Rule 2); returns the saved tensors, and the kept tensors."""
    saved: list[SavedTensor | int | None] = []
    kept: list[torch.Tensor | None] = []
    positions: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        first = positions.setdefault(id(tensor), position)
        value = _saved_or_none(tensor) if first == position or each_occurrence else None
        if first != position:
            saved.append(first)
            kept.append(None)
        else:
            # A leaf is kept, not saved: the graph keeps the leaf anyway, and a rerun gets the same object.
            keep = value is None or (tensor.is_leaf and tensor.requires_grad)
            saved.append(None if keep else value)
            kept.append(tensor if keep else None)
    return saved, kept


def _saved_or_none(tensor: torch.Tensor) -> SavedTensor | None:
    """Returns a saved tensor, or None if autograd cannot save: no error, as the function may never compute with the tensor."""
    # Hooks would return a subclass that defines only ``__torch_function__`` without its class and attributes.
    if tensor.is_inference() or not (type(tensor) in _TENSOR_TYPES or handles_operators(tensor)):
        return None
    try:
        return save_tensor(tensor)
    except RuntimeError:
        # Autograd raised, as for a view whose base was modified, or a hook raised. Hooks that do nothing tell which.
        push_saved_tensors_hooks(*[lambda tensor: tensor] * 2)
        try:
            save_tensor(tensor)
        except RuntimeError:
            return None
        finally:
            pop_saved_tensors_hooks()
        raise


class Arguments:
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, inside: PlaceInFrame | None = None) -> None:
        # The arguments taken apart, positional and by keyword; None if all are positional tensors.
        self._captured: tuple[list[Any], dict[str, Any]] | None = None
        self._containers: Sequence[int] = ()  # the ``id`` of each container in forward
        self._paths: Sequence[str] = ()  # the place of each tensor, as in ``args[0]['x']``, for errors
        self.objects: Sequence[Any] = ()  # objects not taken apart: modules, generators, functions
        tensors: Sequence[torch.Tensor] = args
        if kwargs or not _TENSOR_TYPES.issuperset(map(type, args)):
            capture = Capture()
            self._captured = (
                [capture.value(value, f"args[{index}]") for index, value in enumerate(args)],
                {key: capture.value(value, f"kwargs[{key!r}]") for key, value in kwargs.items()},
            )
            tensors, self.objects, self._paths = capture.tensors, capture.objects, capture.paths
            self._containers = capture.finish()
        hooks = top_saved_tensors_hooks(False)
        # With active hooks, an entry for each tensor: the saved tensor, None if the tensor is kept, or, for a repeated tensor,
        # the position of its first occurrence. Without hooks None, and the attributes set below for hooks are unset.
        self._saved: list[SavedTensor | int | None] | None = None
        # With active hooks, all tensors until forward ends: until then the caller holds them anyway.
        self.live: Sequence[torch.Tensor] | None = None
        self._tensors: Sequence[torch.Tensor | None] = tensors
        if hooks is not None:
            # Inside another frame a repeated tensor is saved twice: that frame's rerun may get two tensors where forward got a
            # single tensor, but has to save as many tensors as forward.
            if inside is not None and tensors and are_of_frame(hooks):
                inside[0].note_inside([None] * len(tensors), inside[1])
            self._saved, self._tensors = _save_all(tensors, each_occurrence=inside is not None)
            self._layouts = {  # strides and base, for the rerun, of each view and each tensor that is not contiguous
                position: (None if tensor.is_contiguous() else tensor.stride(), base_of(tensor))
                for position, tensor in enumerate(tensors)
                if tensor.layout is torch.strided and (tensor._is_view() or not tensor.is_contiguous()) and not tensor.is_nested
            }
            self._facts, self._ids = _facts_of_all(tensors), list(map(id, tensors))
            # Whether the hooks may hand out the same tensor each time: all but those of function frames.
            self._repeats = not UNPACKS.get(hooks[1], False)
            self._storages = list(map(storage_of, tensors))
            self.live = tensors
        # Facts and memory of kept tensors when forward began. While TorchScript traces, sizes are tensors: no memory is noted.
        self._kept_facts = _facts_of_all(self._tensors)
        self._memory = [None] * len(tensors) if is_jit_tracing() else list(map(_memory_of, self._tensors))
        self._steps = fused_steps.count
        # By position: the ``requires_grad`` of a kept tensor when forward began, if it has changed since.
        self._flags: dict[int, bool] = _NONE
        # Arguments that are outputs of operators: position, a weak reference, the ``id``, an alias without history, and the
        # base of a view. Only the alias is held: after ``h += checkpoint(block, h)`` the history of ``h`` leads to the region,
        # which would hold itself for ever. A rerun gets the tensor while it lives, later the alias with a history.
        self._origins: tuple[tuple[int, weakref.ref[torch.Tensor], int, torch.Tensor, Base | None], ...] = ()

    def close(self) -> None:
        """Ends forward: from now on the function changes no tensor."""
        self.live = None
        facts = _facts_of_all(self._tensors)
        if facts != self._kept_facts:
            self._note_flags(facts)
        tensors = list(self._tensors)
        for position, tensor in enumerate(tensors):
            if tensor is None or not facts[position][1]:
                continue
            # A view to which the function has written is not held either: a rerun raises for its version in any case.
            if _has_history(tensor) or (facts[position][0] != self._kept_facts[position][0] and not tensor.is_leaf):
                tensors[position] = self._let_go(position, tensor)
                self._kept_facts[position] = self._kept_facts[position][0], False
        if self._origins:
            self._tensors = tensors

    def _let_go(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        same = next((known[1:] for known in self._origins if known[2] == id(tensor)), None) if self._origins else None
        origin = same or (weakref.ref(tensor), id(tensor), counted_detach(tensor), base_of(tensor))
        self._origins += ((position, *origin),)
        return origin[2]

    def _note_flags(self, after: Sequence[_Facts]) -> None:
        """Notes the earlier ``requires_grad`` of tensors where it has changed since forward began."""
        for position, (before, now) in enumerate(zip(self._kept_facts, after, strict=True)):
            if before[1] != now[1] and None not in (before[1], now[1]):
                self._flags = {position: bool(before[1]), **self._flags}
                self._kept_facts[position] = before[0], now[1]

    def _stand_in(self) -> Restored:
        """Returns the kept tensors, with stand-ins for tensors that are gone or whose ``requires_grad`` has changed."""
        tensors, stand_ins, aliases = list(self._tensors), dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for position, flag in self._flags.items():
            tensor = tensors[position]
            assert tensor is not None
            if (alias := aliases.get(id(tensor))) is None:
                alias = as_view(as_kind(tensor.detach(), type(tensor)), base_of(tensor)).requires_grad_(flag)
                aliases[id(tensor)] = alias
                alias.__dict__.update(tensor.__dict__)
            tensors[position] = alias
        for position, reference, number, alias, base in self._origins:
            tensor = reference()
            if tensor is None:
                if number not in stand_ins:
                    stand_ins[number] = alias_with_history(alias, alias._version, base)
                tensor = stand_ins[number]
            tensors[position] = tensor
        return tensors, stand_ins

    def restore(self, frame: Frame, handed_out: list[HandedOut]) -> Restored:
        """Returns the tensors for another call; ``handed_out`` gets the entries for :meth:`look_at`."""
        facts = _facts_of_all(self._tensors)
        if facts != self._kept_facts:
            self._note_flags(facts)
            if facts != self._kept_facts:
                self._raise_changed(format_path(frame.path))
        if self._steps != fused_steps.count:
            for position, argument in enumerate(self._tensors):
                if argument is not None and stepped_since(argument, self._steps):
                    self._raise_modified(position, argument, format_path(frame.path))
        kept, stand_ins = self._stand_in() if self._flags or self._origins else (self._tensors, _NONE)
        for position, (place, arg) in enumerate(zip(self._memory, kept, strict=True)):
            if place is None or arg is None or place.holds(arg) or is_theirs(arg, place.layout) or place.has_same_content(arg):
                continue
            raise mutated(Why.MOVED, format_path(frame.path), arg, GONE, name=self._path_at(position))
        if self._saved is None:
            return kept, stand_ins
        tensors: Sequence[torch.Tensor] = kept  # type: ignore[assignment]
        # A backward within forward uses the live tensors. To unpack the saved tensors would rerun the outer region up to this
        # point, including this backward, so the work would double with each level of nesting.
        live = self.live
        if live is not None and _facts_of_all(live) == self._facts and list(map(storage_of, live)) == self._storages:
            tensors = live
        else:
            tensors, stand_ins = [], {**stand_ins}
            for position, saved in enumerate(self._saved):
                tensor = kept[position]
                if isinstance(saved, int):
                    tensor = tensors[saved]
                elif tensor is None:
                    assert saved is not None
                    unpacked = saved.unpack()
                    version = self._facts[position][0]
                    if self._repeats and unpacked._version > version and storage_of(unpacked) == self._storages[position]:
                        self._raise_modified(position, unpacked, format_path(frame.path))
                    strides, base = self._layouts.get(position, _ANY)
                    tensor = restore_layout(unpacked, strides, version)
                    is_shared = tensor is unpacked and self._repeats
                    if is_shared and type(tensor) is torch.Tensor and not tensor.requires_grad:
                        # An alias: if the rerun gives it other memory (``.data = ...``), the hooks' tensor stays as it is.
                        tensor = counted_detach(tensor)
                    tensor = as_view(tensor, base)
                    handed_out.append((position, tensor, tensor._version if is_shared else None))
                    stand_ins[self._ids[position]] = tensor
                tensors.append(tensor)
        return tensors, stand_ins

    def build(self, tensors: Sequence[Any], loan: JournalLoan | None) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns positional and keyword arguments for another call, with new containers or with containers of the loan."""
        if self._captured is None:
            return tensors, _NONE
        built = {} if loan is None else loan.by_identity(self._containers)
        args, kwargs = self._captured
        return (
            [build(captured, tensors, built) for captured in args],
            {key: build(captured, tensors, built) for key, captured in kwargs.items()},
        )

    def look_at(self, handed_out: list[HandedOut]) -> None:
        """Notes storages from foreign hooks to which a rerun wrote: a rerun raises if it gets such a storage again."""
        for position, tensor, version in handed_out:
            if version is not None and tensor._version != version:
                self._storages[position] = storage_of(tensor)

    def _raise_changed(self, region: tuple[str, ...]) -> None:
        for position, (tensor, before, now) in enumerate(
            zip(self._tensors, self._kept_facts, _facts_of_all(self._tensors), strict=True)
        ):
            if tensor is not None and before != now:
                self._raise_modified(position, tensor, region)

    def _path_at(self, position: int) -> str:
        return f"args[{position}]" if self._captured is None else self._paths[position]

    def path_of(self, tensor: torch.Tensor) -> str | None:
        return next((self._path_at(at) for at, value in enumerate(self._tensors) if value is tensor), None)

    def _raise_modified(self, position: int, tensor: torch.Tensor, region: tuple[str, ...]) -> None:
        expected = self._kept_facts[position][0] if self._saved is None else self._facts[position][0]
        raise mutated(Why.REACHED, region, tensor, expected, name=self._path_at(position))
