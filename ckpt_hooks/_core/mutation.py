"""Words for a tensor that is not what forward saw: what has become of it, and what to do about it.

A version counter rises with each operation in place, ``set_`` and ``resize_`` among them, and never falls. So a higher version
is a write, or another tensor that was written to more often; a lower one is another tensor for sure.
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
    """Returns the end of a sentence that begins with a tensor: what has become of it.

    Args:
        found: Its version.
        expected: The version when forward saw it.
        since: Since when, as in ``" since forward"``.
        is_same: Whether it is known to be the tensor that forward saw.
        has_moved: Whether it is known to be in another storage.
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
    """Returns what to do about a tensor that was modified or exchanged too early: sentences that say "it".

    Args:
        tensor: The tensor.
        expected: Its version when forward saw it.
    """
    if tensor._version < expected:
        return "Bind or exchange it after backward, or hand the one of forward to the function as an argument."
    if is_kept_anyway(tensor):
        return f"{AFTER_BACKWARD} An optimizer's step before backward is the usual cause: step after backward."
    return AFTER_BACKWARD


def mutated(
    tensor: torch.Tensor, version: int, path: RegionPath | None, holder: str, *, kind: str = "", since: str = "", more: str = ""
) -> MutationError:
    """Returns the error for a tensor that was held until backward and has changed: one wording for all that hold tensors.

    Args:
        tensor: The tensor, or what tells of its version.
        version: Its version when it was saved.
        path: The region that holds it, None for none.
        holder: Who holds it, after the tensor in a sentence.
        kind: Its dtype and shape in words, where ``tensor`` does not have them.
        since: Since when, as in ``" since forward"``.
        more: What else to do about it.
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
