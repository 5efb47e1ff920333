"""The arguments of a region, taken apart so that its tensors can be saved like any other saved tensor (Rule 2).

Tensors are found at any depth of lists, tuples, dicts and dataclasses. Lists and dicts are captured with the entries of the
time of forward, and so is whatever holds a tensor: a rerun gets containers of its own, and sees nothing of what caller or
function did to the originals since. Everything else is handed on as the object it is.

A tensor that occurs twice comes back as one object, since functions ask whether two arguments are the same
(``torch.nn.MultiheadAttention`` takes another path if query is key), and a saved tensor that went through somebody's hooks
would come back as a new object each time.

Where no saved-tensor hooks are active, a ``SavedTensor`` would keep the tensor itself and its version; doing just that here
costs a sixth.
"""

from __future__ import annotations

import dataclasses
import io
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ._refit import refit
from ._torch import (
    SavedTensor,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    save_tensor,
    top_saved_tensors_hooks,
)
from .errors import MutationError

__all__ = ["Arguments"]

# Types whose values neither are nor hold tensors: not worth a second look.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


_NO_KWARGS: dict[str, Any] = {}
_NO_OBJECTS: tuple[Any, ...] = ()


_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_version_of = operator.attrgetter("_version")


def _versions_of(tensors: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    try:
        return tuple(map(_version_of, tensors))
    except (AttributeError, RuntimeError):  # None has no version, and inference tensors refuse to tell
        return tuple(-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors)


def _save(
    tensors: Sequence[torch.Tensor], *, each_occurrence: bool
) -> tuple[list[SavedTensor | int | None], list[torch.Tensor | None]]:
    """Saves tensors by way of the hooks that are active; returns what was saved, and those that are kept.

    Leaves that require grad are kept besides: the graph keeps them too, and a rerun gets the very object.
    """
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
            keep = value is None or (tensor.is_leaf and tensor.requires_grad)
            saved.append(None if keep else value)
            kept.append(tensor if keep else None)
    return saved, kept


def _saved_or_none(tensor: torch.Tensor) -> SavedTensor | None:
    """Returns a tensor as saved, or None for one that autograd refuses to save: it may be passed on without being used."""
    if tensor.is_inference():
        return None
    try:
        return save_tensor(tensor)
    except RuntimeError:
        # Of autograd's making, as for a view whose base was modified, or of a hook's? A hook that does nothing tells.
        push_saved_tensors_hooks(_identity, _identity)
        try:
            save_tensor(tensor)
        except RuntimeError:
            return None
        finally:
            pop_saved_tensors_hooks()
        raise


def _strides_of(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    return {
        position: tensor.stride()
        for position, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_contiguous()
    }


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _TensorAt:
    """Stands for a tensor: its position among those saved."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class _Container:
    """Stands for a list, tuple, dict or dataclass, or an instance of a subclass of theirs.

    Attributes:
        original: What was captured; let go of when the walk is over.
        kind: Its type.
        entries: Captured entries of a list or tuple, captured values of a dict with their keys.
        attributes: Captured attributes by name: fields of a dataclass, ``__dict__`` of an instance of a subclass.
    """

    __slots__ = ("attributes", "entries", "kind", "original")

    def __init__(self, original: Any) -> None:
        self.original = original
        self.kind = type(original)
        self.entries: list[Any] = []
        self.attributes: list[tuple[str, Any]] = []

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
        """Returns a new container of the captured entries; ``built`` has those made so far in this rerun, by id."""
        if id(self) in built:
            return built[id(self)]
        kind = self.kind
        made: Any
        if issubclass(kind, tuple):
            items = [_build(entry, tensors, built) for entry in self.entries]
            # torch's named results take one sequence; tuples of other kinds may have constructors of their own.
            made = kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)
            built[id(self)] = made
        else:
            made = built[id(self)] = kind.__new__(kind)  # type: ignore[call-overload]
            if issubclass(kind, list):
                list.extend(made, (_build(entry, tensors, built) for entry in self.entries))
            elif issubclass(kind, dict):
                set_item = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
                for key, entry in self.entries:
                    set_item(made, key, _build(entry, tensors, built))
        for name, captured in self.attributes:
            object.__setattr__(made, name, _build(captured, tensors, built))
        return made


def _build(captured: Any, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
    kind = type(captured)
    if kind is _TensorAt:
        return tensors[captured.position]
    if kind is _Container:
        return captured.build(tensors, built)
    return captured


def _stands_for_something(captured: Any) -> bool:
    return type(captured) in (_TensorAt, _Container)


class _Capture:
    """One walk over the arguments of one call."""

    __slots__ = ("_containers", "_seen", "objects", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._containers: list[_Container] = []

    def finish(self) -> None:
        """Lets go of the containers that were walked; until then they keep their ids."""
        for container in self._containers:
            container.original = None

    def value(self, value: Any, path: str) -> Any:
        """Returns what stands for a value.

        Args:
            value: The value.
            path: Where it stands, as a user would write it.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in _ATOMS:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        if isinstance(value, list):
            return self._sequence(value, list.__iter__(value), path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, tuple):
            return self._unless_empty(self._sequence(value, tuple.__iter__(value), path))
        if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
            return self._unless_empty(self._with_attributes(self._container(value), path))
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise TypeError(
                f"{path} is an iterator ({type(value).__name__}), which a checkpointed function cannot take: it can be read "
                "once, and recomputing the function in backward would read it again. Pass a list or a tuple of its items."
            )
        self.objects.append(value)
        return value

    def _tensor(self, value: torch.Tensor) -> _TensorAt:
        self.tensors.append(value)
        return _TensorAt(len(self.tensors) - 1)

    def _container(self, value: Any) -> _Container:
        container = self._seen[id(value)] = _Container(value)
        self._containers.append(container)
        return container

    def _sequence(self, value: Any, entries: Iterator[Any], path: str) -> _Container:
        container = self._container(value)
        for index, entry in enumerate(entries):
            container.entries.append(self.value(entry, f"{path}[{index}]"))
        return self._with_attributes(container, path)

    def _dict(self, value: dict[Any, Any], path: str) -> _Container:
        container = self._container(value)
        for key, entry in dict.items(value):
            container.entries.append((key, self.value(entry, f"{path}[{key!r}]")))
        if isinstance(value, defaultdict):
            container.attributes.append(("default_factory", value.default_factory))
        return self._with_attributes(container, path)

    def _with_attributes(self, container: _Container, path: str) -> _Container:
        value = container.original
        names = dict.fromkeys(getattr(value, "__dict__", ()))
        for kind in container.kind.__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    names[name] = None
        if dataclasses.is_dataclass(value):
            names.update((field.name, None) for field in dataclasses.fields(value) if hasattr(value, field.name))
        for name in names:
            container.attributes.append((name, self.value(getattr(value, name), f"{path}.{name}")))
        return container

    def _unless_empty(self, container: _Container) -> Any:
        """Hands the original on where it cannot change and nothing in it is captured."""
        if any(map(_stands_for_something, container.entries)) or any(
            _stands_for_something(captured) for _, captured in container.attributes
        ):
            return container
        self._seen[id(container.original)] = container.original
        return container.original


class Arguments:
    """The arguments of one call, captured, with their tensors saved."""

    __slots__ = ("_captured", "_saved", "_strides", "_tensors", "_versions", "objects")

    #: What of the arguments is neither a tensor nor was taken apart: modules, generators, functions, and the like.
    objects: Sequence[Any]

    _captured: tuple[list[Any], dict[str, Any]] | None
    # Where hooks were active, what each tensor was saved as: None where it is kept, a position where it is the same as another.
    _saved: list[SavedTensor | int | None] | None
    _tensors: Sequence[torch.Tensor | None]
    _versions: tuple[int, ...]
    # Of those that are not contiguous, by position; unset where no hooks were active.
    _strides: dict[int, tuple[int, ...]]

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, nested: bool = False) -> None:
        """Captures arguments and saves their tensors, by way of the saved-tensor hooks that are active on this thread.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            nested: Whether a frame is around this one. Then a tensor that occurs twice is saved twice: the rerun of that frame
                saves them again, in step with its forward, and may meet two tensors where forward met one twice.

        Raises:
            TypeError: If there is an iterator among them: it can be read once, and a rerun reads it again.
        """
        if not kwargs and _TENSOR_TYPES.issuperset(map(type, args)):  # the common case, tensors and nothing else
            self._captured = None
            self.objects = _NO_OBJECTS
            tensors: Sequence[torch.Tensor] = args
        else:
            capture = _Capture()
            self._captured = (
                [capture.value(value, f"args[{index}]") for index, value in enumerate(args)],
                {key: capture.value(value, f"kwargs[{key!r}]") for key, value in kwargs.items()},
            )
            tensors, self.objects = capture.tensors, capture.objects
            capture.finish()
        if top_saved_tensors_hooks(False) is None:
            self._saved = None
            self._tensors = tensors
        else:
            self._saved, self._tensors = _save(tensors, each_occurrence=nested)
            self._strides = _strides_of(tensors)
        self._versions = _versions_of(tensors)

    def restore(self, region: Callable[[], tuple[str, ...]]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns arguments to call with again: the saved tensors, in new containers.

        Args:
            region: Names the region, for an error.

        Raises:
            MutationError: If a tensor was modified in place since.
        """
        kept = self._tensors
        if self._saved is None:
            versions = _versions_of(kept)
            if versions != self._versions:
                self._raise_mutated(versions, region())
        else:
            for position, tensor in enumerate(kept):
                if tensor is not None and _versions_of((tensor,)) != self._versions[position : position + 1]:
                    self._raise_mutated(_versions_of(kept), region())
        tensors: Sequence[torch.Tensor] = kept  # type: ignore[assignment]
        if self._saved is not None:
            tensors = []
            for position, saved in enumerate(self._saved):
                tensor = kept[position]
                if isinstance(saved, int):
                    tensor = tensors[saved]
                elif tensor is None:
                    assert saved is not None
                    tensor = refit(saved.unpack(), self._strides.get(position), self._versions[position])
                tensors.append(tensor)
        if self._captured is None:
            return tensors, _NO_KWARGS
        built: dict[int, Any] = {}
        args, kwargs = self._captured
        return (
            [_build(captured, tensors, built) for captured in args],
            {key: _build(captured, tensors, built) for key, captured in kwargs.items()},
        )

    def _raise_mutated(self, versions: tuple[int, ...], region: tuple[str, ...]) -> None:
        position, expected, found = next(
            (position, before, now)
            for position, (before, now) in enumerate(zip(self._versions, versions, strict=True))
            if before != now and self._tensors[position] is not None
        )
        tensor = self._tensors[position]
        argument = self._path_of(position)
        assert tensor is not None
        raise MutationError(
            f"{argument} of region {'/'.join(region)!r}, a {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} "
            f"tensor, has been modified by an inplace operation since the region's forward began: it is at version {found}; "
            f"expected version {expected} instead. Backward reruns the region and needs the values that forward saw. Modify "
            "a clone, or use the out-of-place form of the operation.",
            region=region,
            tensor=argument,
            expected=expected,
            found=found,
        )

    def _path_of(self, position: int) -> str:
        if self._captured is None:
            return f"args[{position}]"
        args, kwargs = self._captured
        todo: list[tuple[str, Any]] = [(f"args[{index}]", captured) for index, captured in enumerate(args)]
        todo += [(f"kwargs[{key!r}]", captured) for key, captured in kwargs.items()]
        seen = set()
        while todo:
            path, captured = todo.pop(0)
            if isinstance(captured, _TensorAt) and captured.position == position:
                return path
            if isinstance(captured, _Container) and id(captured) not in seen:
                seen.add(id(captured))
                entries = captured.entries if issubclass(captured.kind, dict) else enumerate(captured.entries)
                todo += [(f"{path}[{key!r}]", entry) for key, entry in entries]
                todo += [(f"{path}.{name}", entry) for name, entry in captured.attributes]
        return "an argument"
