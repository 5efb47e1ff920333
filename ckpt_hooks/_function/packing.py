"""The pack and unpack hooks of function frames, and opening a frame for a forward.

Autograd keeps both hooks with each tensor passed through them. So the unpack hook is one function of this file, and the pack
hook a closure which lets go of its frame when forward ends: a frame must not outlive its handles (Rule 9).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any

import torch

from ckpt_hooks._ambient.positions import where_streams_are
from ckpt_hooks._core.events import Watch
from ckpt_hooks._core.frame import mutated_leaf, stack
from ckpt_hooks._core.holdings import Kept, Reason
from ckpt_hooks._core.hooks import UNPACKS
from ckpt_hooks._core.scopes import MISSING
from ckpt_hooks._tensors.determinism import Fingerprints
from ckpt_hooks._torch.autograd import graph_task_id, push_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped

from .handles import FIRST, Handle, HandleFrame


@skipped
def unpack(packed: Any) -> torch.Tensor:
    """Returns the tensor of a handle, and lets go of the tensor (Rule 4); or a kept leaf."""
    if type(packed) is list:
        leaf: torch.Tensor = packed[0]
        if leaf._version != packed[1]:
            raise mutated_leaf(packed)
        return leaf
    frame: HandleFrame
    frame, index = packed
    index -= FIRST
    opened = frame.passes.get(graph_task_id())
    if opened is None:
        opened = frame.open_pass(index)
    values = opened.values
    try:
        value: torch.Tensor = values[index]
    except IndexError:  # packed after the recompute
        value = MISSING
    if value is MISSING:
        value = frame.reopen_pass(opened, index)
    else:
        values[index] = MISSING
        opened.taken.append(index)
    if opened.made is not None:
        opened.made.hand_out(value)
    return value


@skipped
def unpack_watched(packed: Any) -> torch.Tensor:
    if not isinstance(packed, WatchedHandle):
        return unpack([*packed])
    tensor = unpack(packed)
    packed.watch.restored(packed[1] - FIRST, tensor)
    return tensor


UNPACKS += [unpack, unpack_watched]


class WatchedHandle(tuple[HandleFrame, int]):
    """A handle which reports its release by autograd."""

    @property
    def watch(self) -> Watch:
        watch = self[0].watch
        assert watch is not None
        return watch

    def __del__(self) -> None:
        self.watch.let_go(self[1] - FIRST)


@skipped
def _pack_watched(
    watch: Watch, pack: Callable[[torch.Tensor], Handle | Kept], positions: Sequence[int]
) -> Callable[[torch.Tensor], Handle | Kept]:

    def pack_watched(tensor: torch.Tensor) -> Handle | Kept:
        packed = pack(tensor)
        position = len(positions) - 1
        if isinstance(packed, tuple):
            watch.saved(position, Reason.DROPPED, tensor)
            return WatchedHandle(packed)
        return watch.kept(position, packed, tensor)

    return pack_watched


@skipped
def _pack_fingerprinted(
    pack: Callable[[torch.Tensor], Handle | Kept], fingerprints: Fingerprints
) -> Callable[[torch.Tensor], Handle | Kept]:
    note = fingerprints.note

    def pack_fingerprinted(tensor: torch.Tensor) -> Handle | Kept:
        packed = pack(tensor)
        note(tensor, kept=type(packed) is list)
        return packed

    return pack_fingerprinted


@skipped
def open_frame(
    frame: HandleFrame,
    facts: Callable[[Any], Any],
    fingerprint: Callable[[torch.Tensor], Any] | None = None,
    left_out: Collection[int | None] = (),
) -> Callable[[], None] | None:
    """Makes a frame the innermost frame of this thread; returns the function to call when forward has ended, if any."""
    next_number, append, note = count(FIRST).__next__, frame.numbers.append, frame.facts.append
    # ``left_out``: storages of tensors that are not compared, since an operator writes to these after saving them.
    path, without_grad = frame.path, frame.without_grad
    latest = missing = facts(MISSING)
    where, positions = where_streams_are(watched=frame.positions is not None), frame.positions
    position = where[0]
    if positions is not None:
        positions[-1] = position, where[1]

    def pack(tensor: torch.Tensor) -> Handle | Kept:
        nonlocal latest, position
        number = next_number()
        append(number)
        if position != where[0] and positions is not None:
            position = where[0]
            positions[number - FIRST] = position, where[1]
        if tensor.is_leaf:  # or has no graph
            if tensor.requires_grad:
                # Kept, which costs no memory, since the graph holds the leaf as well, and spares a handle, a comparison and a
                # place in the recompute. A *view* of a leaf is not: where a framework gives a parameter another storage after
                # forward (``param.data = ...``), the view would hold the storage to be freed.
                note(missing)
                return [tensor, tensor._version, path]
            without_grad.append(number - FIRST)
        try:
            found = facts(tensor)
        except RuntimeError:  # a nested tensor has no shape
            note(missing)
            return [tensor.detach(), tensor._version, path]
        if found != latest:  # neighbours are often alike, and share one tuple
            latest = found
        note(latest)
        return frame, number

    finish = None
    if fingerprint is None and frame.watch is None:
        push_saved_tensors_hooks(pack, unpack)
    else:
        finish = _open_watched(frame, pack, fingerprint, left_out)
    stack.innermost = frame

    def release() -> None:
        nonlocal frame
        del frame

    frame.release = release
    return finish


def _open_watched(
    frame: HandleFrame,
    pack: Callable[[torch.Tensor], Handle | Kept],
    fingerprint: Callable[[torch.Tensor], Any] | None,
    left_out: Collection[int | None],
) -> Callable[[], None] | None:
    finish = None
    if fingerprint is not None:
        fingerprints = Fingerprints(fingerprint, left_out)
        frame.fingerprints = fingerprints.taken
        pack = _pack_fingerprinted(pack, fingerprints)
        finish = fingerprints.close
    if frame.watch is None:
        push_saved_tensors_hooks(pack, unpack)
    else:
        push_saved_tensors_hooks(_pack_watched(frame.watch, pack, frame.numbers), unpack_watched)
    return finish
