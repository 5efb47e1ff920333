"""The pack and unpack hooks, and putting them around a forward.

The unpack hook is one function of the module: autograd keeps it in the graph, where a closure or a bound method over a frame
would be a cycle that no garbage collector sees. The pack hook is a closure, which autograd holds only while it is pushed.

A leaf that requires grad is kept instead of dropped: that costs no memory, since the graph holds it as well, and spares it a
handle, a comparison and a place in the recompute. It also is what plain autograd does, down to the object. A *view* of a leaf
does not qualify: where a framework gives a parameter another storage after forward (``param.data = ...``), the view would hold
on to the one that was to be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ckpt_hooks._torch import graph_task_id, pop_saved_tensors_hooks, push_saved_tensors_hooks

from .frame import DEAD_HANDLE, Frame, Handle, Kept, Observer, mutated_leaf
from .passes import MISSING
from .stack import stack

__all__ = ["close_frame", "open_frame", "unpack"]


def unpack(packed: Any) -> torch.Tensor:
    """Returns the tensor that a handle stands for, and lets go of it (Rule 4).

    Args:
        packed: A :class:`Handle`, or what stands for a leaf that was kept.
    """
    if type(packed) is tuple:
        leaf: torch.Tensor = packed[0]
        if leaf._version != packed[1]:
            raise mutated_leaf(packed)
        return leaf
    frame: Frame = packed.frame
    index: int = packed.index
    opened = frame.passes.get(graph_task_id())
    if opened is None:
        opened = frame.open_pass(index)
    values = opened.values
    try:
        value = values[index]
    except IndexError:  # packed after the recompute
        value = MISSING
    if value is MISSING:
        value = frame.reopen_pass(opened, index)
    else:
        values[index] = MISSING
        opened.taken.append(index)
    if frame.observer is not None:
        frame.observer.unpacked(frame, index, value)
    return value


def _pack_into(frame: Frame, facts: Callable[[Any], Any]) -> Callable[[torch.Tensor], Handle | Kept]:
    handles = frame.handles
    append, note, reference = handles.append, frame.facts.append, weakref.ref
    path = frame.path
    latest = missing = facts(MISSING)

    def pack(tensor: torch.Tensor) -> Handle | Kept:
        nonlocal latest
        if tensor.is_leaf and tensor.requires_grad:
            append(DEAD_HANDLE)
            note(missing)
            return tensor, tensor._version, path
        handle = Handle()  # attributes one by one: half the cost of an ``__init__``
        handle.frame = frame
        handle.index = len(handles)
        append(reference(handle))
        found = facts(tensor)
        if found != latest:  # neighbours are often alike, and one tuple serves for all of them
            latest = found
        note(latest)
        return handle

    return pack


def _pack_observed(
    frame: Frame, observer: Observer, pack: Callable[[torch.Tensor], Handle | Kept]
) -> Callable[[torch.Tensor], Handle | Kept]:
    def pack_observed(tensor: torch.Tensor) -> Handle | Kept:
        packed = pack(tensor)
        if type(packed) is Handle:
            observer.packed(frame, packed.index, tensor)
        return packed

    return pack_observed


def open_frame(frame: Frame, facts: Callable[[Any], Any]) -> None:
    """Makes a frame the innermost one of this thread.

    Args:
        frame: The frame, which has packed nothing yet.
        facts: Returns what is noted of each tensor, and of :data:`MISSING`.

    Raises:
        RuntimeError: Where saved-tensor hooks are disabled, with the message given to
            ``torch.autograd.graph.disable_saved_tensors_hooks``. The frame is not open then.
    """
    pack = _pack_into(frame, facts)
    if frame.observer is not None:
        pack = _pack_observed(frame, frame.observer, pack)
    push_saved_tensors_hooks(pack, unpack)
    stack.innermost = frame


def close_frame(frame: Frame) -> None:
    """Ends the forward of the innermost frame, well or by an exception; its parent is innermost again."""
    pop_saved_tensors_hooks()
    stack.innermost, frame.parent = frame.parent, None
