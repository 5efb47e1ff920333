"""Words for a tensor changed since forward: the change, and the advice.

A version counter rises with each operation in place, ``set_`` and ``resize_`` among them, and never falls. So a higher version
is a write, or another tensor with more writes. A lower version is another tensor for sure.
"""

from __future__ import annotations

import torch

from ckpt_hooks._torch import is_kept_anyway
from ckpt_hooks.errors import MutationError

from .paths import RegionPath, format_path
from .words import describe_kind

__all__ = ["AFTER_BACKWARD", "advice_for", "change_in_words", "mutated"]

AFTER_BACKWARD = "Modify it after backward, or let forward use a clone."


def change_in_words(found: int, expected: int, since: str = "", *, is_same: bool = True, has_moved: bool = False) -> str:
    """Returns the predicate of a sentence about a tensor: how the tensor has changed.

    Args:
        found: Its version.
        expected: Its version in forward.
        since: Since when, as in ``" since forward"``.
        is_same: Whether the tensor is known to be forward's.
        has_moved: Whether the tensor is known to be in another storage.
    """
    versions = f"it is at version {found}; expected version {expected} instead"
    if found == expected:
        versions = "a step of a fused optimizer wrote to it, which its version does not tell"
    if found < expected:
        return (
            f"is another tensor than forward saw: {versions}, and no operation lowers a version. It was bound anew, or "
            "exchanged by torch.utils.swap_tensors, between forward and backward."
        )
    if has_moved:
        return f"was given another storage{since}, by set_ or an exchange of its data: {versions}."
    other = "" if is_same else ", or is another tensor than then"
    return f"has been modified by an inplace operation{since}{other}: {versions}."


def advice_for(tensor: torch.Tensor, expected: int) -> str:
    """Returns the advice on a tensor modified or exchanged too early: sentences with "it" for the tensor.

    Args:
        tensor: The tensor.
        expected: Its version in forward.
    """
    if tensor._version < expected:
        return "Bind or exchange it after backward, or hand the one of forward to the function as an argument."
    if is_kept_anyway(tensor):
        return f"{AFTER_BACKWARD} An optimizer's step before backward is the usual cause: step after backward."
    return AFTER_BACKWARD


def mutated(
    tensor: torch.Tensor, version: int, path: RegionPath | None, holder: str, *, kind: str = "", since: str = "", more: str = ""
) -> MutationError:
    """Returns the error for a tensor held until backward and changed meanwhile: one wording for all holders.

    Args:
        tensor: The tensor, or a witness of its version.
        version: Its version when saved.
        path: The region of the holder; None for none.
        holder: The holder, in words to follow the tensor in a sentence.
        kind: Dtype and shape in words, for a witness without them.
        since: Since when, as in ``" since forward"``.
        more: More advice.
    """
    what = f"a {kind or describe_kind(tensor)} {'leaf' if is_kept_anyway(tensor) else 'tensor'}"
    return MutationError(
        f"{what} {holder} {change_in_words(tensor._version, version, since)} Backward needs the values that forward saw. "
        f"{advice_for(tensor, version)}{more}",
        region=format_path(path),
        tensor=what,
        expected=version,
        found=tensor._version,
    )
