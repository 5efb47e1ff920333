"""Places of tensors among the arguments of a region, as a user would write them, for errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.mutation import change_in_words
from ckpt_hooks._tensors.containers import Container, TensorAt
from ckpt_hooks.errors import CheckpointError, MutationError

__all__ = ["Captured", "flag_error", "modified_error", "path_at", "path_to"]

#: Arguments taken apart; None for positional tensors and nothing else.
Captured = tuple[list[Any], dict[str, Any]] | None


def path_at(captured: Captured, position: int) -> str:
    """Returns the place of the tensor with a position."""
    if captured is None:
        return f"args[{position}]"
    return path_to(captured, lambda found: isinstance(found, TensorAt) and found.position == position)


def path_to(captured: Captured, is_meant: Callable[[Any], bool]) -> str:
    """Returns the place of the first part of the arguments for which ``is_meant`` is true."""
    assert captured is not None
    args, kwargs = captured
    todo: list[tuple[str, Any]] = [(f"args[{index}]", found) for index, found in enumerate(args)]
    todo += [(f"kwargs[{key!r}]", found) for key, found in kwargs.items()]
    seen = set()
    while todo:
        path, found = todo.pop(0)
        if is_meant(found):
            return path
        if isinstance(found, Container) and id(found) not in seen:
            seen.add(id(found))
            entries = found.entries if issubclass(found.kind, dict) else enumerate(found.entries)
            todo += [(f"{path}[{key!r}]", entry) for key, entry in entries]
            todo += [(f"{path}.{name}", entry) for name, entry in found.attributes()]
    return "an argument"


def _in_words(path: str, tensor: torch.Tensor, region: tuple[str, ...]) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{path} of region {'/'.join(region)!r}, a {dtype}{list(tensor.shape)} tensor,"


def modified_error(
    path: str, tensor: torch.Tensor, expected: int, region: tuple[str, ...], *, has_moved: bool
) -> MutationError:
    """Returns the error for an argument modified since forward.

    Args:
        path: The argument's place.
        tensor: The present tensor.
        expected: The version in forward.
        region: Names of the regions, outermost first.
        has_moved: Whether the tensor is in another storage.
    """
    change = change_in_words(tensor._version, expected, " since the region's forward began", has_moved=has_moved)
    return MutationError(
        f"{_in_words(path, tensor, region)} {change} Backward reruns the region and needs the values that forward saw. Modify "
        "a clone, or use the out-of-place form of the operation.",
        region=region,
        tensor=path,
        expected=expected,
        found=tensor._version,
    )


def flag_error(
    path: str, tensor: torch.Tensor, before: bool | None, now: bool | None, region: tuple[str, ...]
) -> CheckpointError:
    """Returns the error for an argument with a changed ``requires_grad`` since forward.

    Args:
        path: The argument's place.
        tensor: The present tensor.
        before: Whether the argument required grad.
        now: Whether the argument requires grad.
        region: Names of the regions, outermost first.
    """
    return CheckpointError(
        f"{_in_words(path, tensor, region)} had requires_grad={before} when the region's forward began, and has "
        f"requires_grad={now} now. A rerun of the region would save other tensors: change requires_grad after backward, or "
        "pass a detached tensor.",
        region=region,
    )
