"""The errors for tensors changed since forward: all their words.

A version counter rises with each operation in place, ``set_`` and ``resize_`` among them, and never falls. So a higher version
is a write, or another tensor with more writes. A lower version is another tensor for sure.
"""

from __future__ import annotations

import torch

from ckpt_hooks._torch.tensors import is_freed, is_kept_anyway
from ckpt_hooks.errors import MutationError

from .call_sites import name_in_models
from .descriptions import RegionPath, describe_kind, describe_tensor, format_path, region_in_words
from .holdings import Cause

__all__ = [
    "GONE",
    "argument_in_words",
    "changed_argument",
    "changed_before_rerun",
    "changed_held",
    "changed_moved",
    "changed_saved",
    "changed_unmoved",
    "exchanged_storage",
    "freed",
    "gone",
    "overwritten",
    "written_late",
    "written_unseen",
]

Names = tuple[str, ...]

#: In place of a version: the tensor of forward is gone, and another one stands in its place.
GONE = -1


def _change_in_words(found: int, expected: int, since: str = "", *, is_same: bool = True, has_moved: bool = False) -> str:
    """Returns the predicate of a sentence about a tensor: how the tensor has changed.

    Args:
        found: The version.
        expected: The version in forward.
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


def _advice_for(tensor: torch.Tensor, expected: int, clone: str = "let forward use a clone") -> str:
    """Returns the advice on a tensor modified or exchanged too early: sentences with "it" for the tensor.

    Args:
        tensor: The tensor.
        expected: The version in forward.
        clone: How a clone helps.
    """
    if tensor._version < expected:
        return "Bind or exchange it after backward, or hand the one of forward to the function as an argument."
    advice = f"Modify it after backward, or {clone}."
    if is_kept_anyway(tensor):
        advice += " Usual causes: an optimizer's step before backward, and a hook of forward which writes to it."
    return advice


def changed_saved(tensor: torch.Tensor, expected: int, path: RegionPath) -> MutationError:
    """Returns the error for a tensor that a region saved and left in the graph. Plain autograd raises too."""
    return _changed(tensor, expected, path, f"that {region_in_words(path)} saved")


def changed_held(
    tensor: torch.Tensor, expected: int, path: RegionPath, cause: Cause, *, kind: str = "", by_policy: bool = True
) -> MutationError:
    """Returns the error for a tensor that a region holds.

    Args:
        tensor: The tensor, or a witness of its version.
        expected: The version when saved.
        path: The region.
        cause: The reason for holding the tensor.
        kind: Dtype and shape in words, for a witness without them.
        by_policy: Whether a policy may keep what was computed from the tensor.
    """
    more = " Or have what was computed from it kept, by a policy or by leaving it out of the region." if by_policy else ""
    holder = f"that {region_in_words(path)} needs ({cause.in_words()})"
    return _changed(tensor, expected, path, holder, kind, more=more, clone="clone it before the region")


def changed_moved(tensor: torch.Tensor, expected: int, path: RegionPath | None, kind: str) -> MutationError:
    """Returns the error for a tensor moved to the host, for a region or by a block of ``offload_saved_tensors``.

    Args:
        tensor: A witness of the tensor's version.
        expected: The version when moved.
        path: The region, if any.
        kind: Dtype and shape in words.
    """
    holder = "that was moved to the host" if path is None else f"that {region_in_words(path)} needs, moved to the host,"
    return _changed(tensor, expected, path, holder, kind, " since it was saved, maybe while it was copied")


def changed_unmoved(tensor: torch.Tensor, expected: int) -> MutationError:
    """Returns the error for a tensor saved in a block of ``offload_saved_tensors``, and not moved."""
    return _changed(tensor, expected, None, "that was saved in a block of offload_saved_tensors, and stayed where it was,")


def _changed(
    tensor: torch.Tensor,
    expected: int,
    path: RegionPath | None,
    holder: str,
    kind: str = "",
    since: str = "",
    more: str = "",
    clone: str = "let forward use a clone",
) -> MutationError:
    what = f"a {kind or describe_kind(tensor)} {'leaf' if is_kept_anyway(tensor) else 'tensor'}"
    name = name_in_models(tensor)
    what, comma = (what, "") if name is None else (f"{name}, {what}", ",")
    return MutationError(
        f"{what}{comma} {holder} {_change_in_words(tensor._version, expected, since)} Backward needs the values that forward "
        f"saw. {_advice_for(tensor, expected, clone)}{more}",
        region=format_path(path),
        tensor=what,
        expected=expected,
        found=tensor._version,
    )


def changed_before_rerun(
    name: str, tensor: torch.Tensor, expected: int, region: Names, *, is_same: bool = True, will_copy: bool = False
) -> MutationError:
    """Returns the error for a tensor that a rerun needs, changed since forward.

    Args:
        name: The tensor in words, for the start of a sentence.
        tensor: The tensor.
        expected: The tensor's version in forward; :data:`GONE` for one in the place of forward's, which is gone.
        region: Names of the regions, outermost first.
        is_same: Whether this is the very tensor of forward, as far as known.
        will_copy: Whether later forwards of the region copy the tensor.
    """
    advice = _advice_for(tensor, expected)
    change = _change_in_words(tensor._version, expected, " since forward", is_same=is_same)
    if expected == GONE:
        change = "is another tensor than forward saw, and that one is gone."
        advice = "Keep the one of forward until backward, or hand it to the function as an argument."
    elif is_freed(tensor):
        change = f"has no memory any more: its storage was freed. It is at version {tensor._version}."
    more = " Or run the step again: from the next forward on the region copies it." if will_copy else ""
    if not is_same:
        more += (
            " Or the function wrote to it in one of the two runs alone (a hook that removed itself in forward, a first call "
            "that does more): have it do the same each time."
        )
    return MutationError(
        f"region {'/'.join(region)!r}: {name}, {describe_tensor(tensor)}, {change} Backward reruns the region and needs the "
        f"values that forward saw. {advice}{more}",
        region=region,
        tensor=name,
        expected=None if expected == GONE else expected,
        found=tensor._version,
    )


def gone(name: str, region: Names) -> MutationError:
    """Returns the error for a parameter of forward that is gone, and in whose place nothing stands."""
    what = f"the parameter {name!r}"
    return MutationError(
        f"region {'/'.join(region)!r}: {what} that forward saw is gone, and no other one has its name. Backward reruns the "
        "region and needs the values that forward saw. Keep the parameter until backward.",
        region=region,
        tensor=what,
        expected=None,
        found=None,
    )


def changed_argument(place: str, tensor: torch.Tensor, expected: int, region: Names, *, has_moved: bool) -> MutationError:
    """Returns the error for an argument modified since forward.

    Args:
        place: The argument's place, as in ``args[1]['mask']``.
        tensor: The present tensor.
        expected: The version in forward.
        region: Names of the regions, outermost first.
        has_moved: Whether the tensor is in another storage.
    """
    change = _change_in_words(tensor._version, expected, " since the region's forward began", has_moved=has_moved)
    return MutationError(
        f"{argument_in_words(place, tensor, region)} {change} Backward reruns the region and needs the values that forward "
        "saw. Modify a clone, or use the out-of-place form of the operation.",
        region=region,
        tensor=place,
        expected=expected,
        found=tensor._version,
    )


def argument_in_words(place: str, tensor: torch.Tensor, region: Names) -> str:
    """Returns an argument as messages have it, up to the predicate."""
    return f"{place} of region {'/'.join(region)!r}, a {describe_kind(tensor)} tensor,"


def written_late(name: str, tensor: torch.Tensor, expected: int, region: Names) -> MutationError:
    """Returns the error for a forward's first write to a tensor which earlier forwards only read."""
    return MutationError(
        f"region {'/'.join(region)!r}: forward has written to {name}, {describe_tensor(tensor)}: it is at version "
        f"{tensor._version}; expected version {expected} instead. Earlier forwards only read it, so this one took no copy, and "
        "cannot be rerun. From the next forward on the region copies it: run this forward again, after you have put back what "
        "the tensor held if the write must not count twice. Or bind the name to a new tensor instead of writing to the old, or "
        "use checkpoint_region, which reruns no code.",
        region=region,
        tensor=name,
        expected=expected,
        found=tensor._version,
    )


# No version tells of these.


def freed(tensor: torch.Tensor, path: RegionPath) -> MutationError:
    """Returns the error for a held tensor with freed memory."""
    return _unversioned(
        f"a {describe_kind(tensor)} tensor",
        path,
        "the memory of {tensor} that {region} needs was freed after forward and not filled again. A framework that gathers "
        "parameters does so for each of its units: make each unit a region of its own.",
    )


def exchanged_storage(path: RegionPath) -> MutationError:
    """Returns the error for a tensor from outside, read by a recorded region and given another storage in it."""
    return _unversioned(
        "a tensor from outside",
        path,
        "{tensor} of {region} was given another storage (`tensor.data = ...`) between two operators of the region that read "
        "it. A replay needs the storage from before. Use two tensors, or leave the first operator out of the region.",
    )


def overwritten(name: str, path: RegionPath) -> MutationError:
    """Returns the error for a saved tensor, modified in a recorded region by the operator ``name``, as in plain autograd."""
    return _unversioned(
        "a saved tensor",
        path,
        f"a tensor that {{region}} saved has been modified by an inplace operation ({name}) later in the region. "
        "Backward needs the values from before. Modify a clone, or use the out-of-place form.",
    )


def written_unseen(name: str, path: RegionPath) -> MutationError:
    """Returns the error for memory from before a recorded region, to which a kernel of the custom function ``name`` wrote."""
    return _unversioned(
        f"an argument of {name}",
        path,
        f"a kernel of the custom function `{name}` wrote to an argument from outside of the {{region}}, and no version tells. "
        "A replay needs the values from before. Pass the function a clone, or call ctx.mark_dirty on it in forward.",
    )


def _unversioned(what: str, path: RegionPath, message: str) -> MutationError:
    message = message.format(tensor=what, region=region_in_words(path))
    return MutationError(message, region=format_path(path), tensor=what, expected=None, found=None)
