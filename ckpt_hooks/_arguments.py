"""The arguments of a region, taken apart so that its tensors can be saved like any other saved tensor (Rule 2).

Tensors are found at any depth of lists, tuples, dicts and dataclasses. Lists and dicts are captured with the entries of the
time of forward, and so is whatever holds a tensor: a rerun gets containers of its own, and sees nothing of what caller or
function did to the originals since. Everything else is handed on as the object it is.

A tensor is saved once however often it occurs, since functions ask whether two arguments are the same object
(``torch.nn.MultiheadAttention`` takes another path if query is key), and a saved tensor that went through somebody's hooks
comes back as a new object each time.

Where no saved-tensor hooks are active, a ``SavedTensor`` would keep the tensor itself and its version; doing just that here
costs a sixth.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._torch import SavedTensor, save_tensor, saved_tensors_hooks_active
from .errors import InputMutationError

__all__ = ["Arguments"]

# Types whose values neither are nor hold tensors: not worth a second look.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


_NO_KWARGS: dict[str, Any] = {}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class _TensorAt:
    """Stands for a tensor: its position among those saved."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class _Container:
    """Stands for a list, tuple, dict or dataclass.

    Attributes:
        template: An empty container to copy and fill; for a tuple, which cannot be filled, its type.
        entries: Captured entries with the index, key or field that each stood at.
    """

    __slots__ = ("entries", "template")

    def __init__(self, template: Any) -> None:
        self.template = template
        self.entries: list[tuple[Any, Any]] = []

    def build(self, tensors: list[torch.Tensor], built: dict[int, Any]) -> Any:
        """Returns a new container of the captured entries; ``built`` has those made so far in this rerun, by id."""
        if id(self) in built:
            return built[id(self)]
        template = self.template
        if isinstance(template, type):
            made = _new_tuple(template, [_build(entry, tensors, built) for _, entry in self.entries])
            built[id(self)] = made
            return made
        made = built[id(self)] = copy.copy(template)
        for key, entry in self.entries:
            value = _build(entry, tensors, built)
            if isinstance(made, list):
                made.append(value)
            elif isinstance(made, dict):
                made[key] = value
            else:
                object.__setattr__(made, key, value)
        return made


def _new_tuple(kind: type[Any], items: list[Any]) -> Any:
    if kind is tuple:
        return tuple(items)
    make = getattr(kind, "_make", None)  # a named tuple takes its fields one by one, torch's return types one sequence
    return kind(items) if make is None else make(items)


def _build(captured: Any, tensors: list[torch.Tensor], built: dict[int, Any]) -> Any:
    kind = type(captured)
    if kind is _TensorAt:
        return tensors[captured.position]
    if kind is _Container:
        return captured.build(tensors, built)
    return captured


class _Capture:
    """One walk over the arguments of one call."""

    __slots__ = ("_containers", "_positions", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._positions: dict[int, _TensorAt] = {}
        self._containers: dict[int, _Container] = {}

    def tensor(self, value: torch.Tensor) -> _TensorAt:
        """Returns what stands for a tensor, the same for each occurrence."""
        captured = self._positions.get(id(value))
        if captured is None:
            captured = self._positions[id(value)] = _TensorAt(len(self.tensors))
            self.tensors.append(value)
        return captured

    def value(self, value: Any, path: str) -> Any:
        """Returns what stands for any value.

        Args:
            value: The value.
            path: Where it stands, as a user would write it.
        """
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in _ATOMS:
            return value
        if id(value) in self._containers:
            return self._containers[id(value)]
        if isinstance(value, list):
            return self._fill(value, _emptied(value), ((i, entry, f"{path}[{i}]") for i, entry in enumerate(value)))
        if isinstance(value, dict):
            return self._fill(value, _emptied(value), ((key, entry, f"{path}[{key!r}]") for key, entry in value.items()))
        if isinstance(value, tuple):
            container = self._fill(value, type(value), ((i, entry, f"{path}[{i}]") for i, entry in enumerate(value)))
            return container if _holds_any(container) else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
            return self._dataclass(value, path)
        if isinstance(value, Iterator):
            raise TypeError(
                f"{path} is an iterator ({type(value).__name__}), which a checkpointed function cannot take: it can be read "
                "once, and recomputing the function in backward would read it again. Pass a list or a tuple of its items."
            )
        return value

    def _dataclass(self, value: Any, path: str) -> Any:
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        container = self._fill(value, None, ((name, getattr(value, name), f"{path}.{name}") for name in names))
        container.entries = [(name, entry) for name, entry in container.entries if type(entry) in (_TensorAt, _Container)]
        if not container.entries:
            return value
        container.template = template = copy.copy(value)
        for name, _ in container.entries:
            object.__setattr__(template, name, None)
        return container

    def _fill(self, value: Any, template: Any, entries: Iterator[tuple[Any, Any, str]]) -> _Container:
        container = self._containers[id(value)] = _Container(template)
        append = container.entries.append
        for key, entry, path in entries:
            append((key, self.value(entry, path)))
        return container


def _emptied(value: Any) -> Any:
    if type(value) in (list, dict):
        return type(value)()
    template = copy.copy(value)  # keeps the type and what an instance of it carries, as a default factory
    template.clear()
    return template


def _holds_any(container: _Container) -> bool:
    return any(type(entry) in (_TensorAt, _Container) for _, entry in container.entries)


class Arguments:
    """The arguments of one call, captured, with their tensors saved."""

    __slots__ = ("_args", "_kwargs", "_saved", "_versions")

    _saved: list[torch.Tensor] | list[SavedTensor]
    _versions: list[int] | None

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures arguments and saves their tensors, by way of the saved-tensor hooks that are active on this thread.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            TypeError: If there is an iterator among them: it can be read once, and a rerun reads it again.
        """
        hooked = saved_tensors_hooks_active()
        tensors = list(args)
        # The common case, a few tensors and nothing else. Where hooks are active, a tensor that occurs twice needs the walk.
        if kwargs or not all(map(_is_tensor, args)) or (hooked and len(set(map(id, args))) != len(args)):
            capture = _Capture()
            self._args: list[Any] | None = [capture.value(value, f"args[{index}]") for index, value in enumerate(args)]
            self._kwargs = {key: capture.value(value, f"kwargs[{key!r}]") for key, value in kwargs.items()}
            tensors = capture.tensors
        else:
            self._args = None
            self._kwargs = _NO_KWARGS
        if hooked:
            self._saved = [save_tensor(tensor) for tensor in tensors]
            self._versions = None
        else:
            self._saved = tensors
            self._versions = [tensor._version for tensor in tensors]

    def restore(self, region: Callable[[], tuple[str, ...]]) -> tuple[list[Any], dict[str, Any]]:
        """Returns arguments to call with again: the saved tensors, in new containers.

        Args:
            region: Names the region, for an error.

        Raises:
            InputMutationError: If a tensor was modified in place since.
        """
        if self._versions is None:
            tensors = [saved.unpack() for saved in self._saved]  # type: ignore[union-attr]
        else:
            tensors = self._saved  # type: ignore[assignment]
            for position, tensor in enumerate(tensors):
                if tensor._version != self._versions[position]:
                    self._raise_mutated(position, tensor._version, region())
        if self._args is None:
            return tensors, _NO_KWARGS
        built: dict[int, Any] = {}
        args = [_build(captured, tensors, built) for captured in self._args]
        return args, {key: _build(captured, tensors, built) for key, captured in self._kwargs.items()}

    def _raise_mutated(self, position: int, found: int, region: tuple[str, ...]) -> None:
        assert self._versions is not None
        tensor = self._saved[position]
        expected = self._versions[position]
        argument = self._path_of(position)
        assert isinstance(tensor, torch.Tensor)
        raise InputMutationError(
            f"{argument} of region {'/'.join(region)!r}, a {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} "
            f"tensor, has been modified by an inplace operation after the region's forward: it is at version {found}; "
            f"expected version {expected} instead. Backward reruns the region and needs the values that forward saw. Modify "
            "a clone, or use the out-of-place form of the operation.",
            region=region,
            argument=argument,
            expected=expected,
            found=found,
        )

    def _path_of(self, position: int) -> str:
        if self._args is None:
            return f"args[{position}]"
        todo: list[tuple[str, Any]] = [(f"args[{index}]", captured) for index, captured in enumerate(self._args)]
        todo += [(f"kwargs[{key!r}]", captured) for key, captured in self._kwargs.items()]
        seen = set()
        while todo:
            path, captured = todo.pop(0)
            if isinstance(captured, _TensorAt) and captured.position == position:
                return path
            if isinstance(captured, _Container) and id(captured) not in seen:
                seen.add(id(captured))
                fields = dataclasses.is_dataclass(captured.template)
                todo += [(f"{path}.{key}" if fields else f"{path}[{key!r}]", entry) for key, entry in captured.entries]
        return "an argument"
