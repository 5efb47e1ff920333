"""Places of tensors among the arguments of a region, as a user would write them, for errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._core.descriptions import describe_kind
from ckpt_hooks._tensors.containers import Container, TensorAt
from ckpt_hooks.errors import CheckpointError

__all__ = ["Captured", "flag_error", "path_at", "path_to"]

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
        f"region {'/'.join(region)!r}: {path}, a {describe_kind(tensor)} tensor, had requires_grad={before} when the region's "
        f"forward began, and has requires_grad={now} now. A rerun of the region would save other tensors: change requires_grad "
        "after backward, or pass a detached tensor.",
        region=region,
    )
