"""Other formats of reports: snapshots of memory as torch writes them, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

from .printing import Maker, Origin, check_path

Frames = list[dict[str, Any]]

_GAP = 2**20  # the most bytes between blocks of a segment: the host's allocator puts headers between


class MemoryEvent(NamedTuple):
    """An allocation or a free."""

    is_alloc: bool
    address: int | None  # None for memory from before the step
    nbytes: int
    frames: Frames
    microseconds: int = 0


class Exported:
    """A report that can be written as a snapshot of memory."""

    __slots__ = ()

    def to_snapshot(self) -> dict[str, Any]:
        raise NotImplementedError

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_snapshot` as a pickle, to drop on https://pytorch.org/memory_viz, which uploads nothing.

        Args:
            path: The file to write, as in ``"step.pickle"``.

        Raises:
            TypeError: If ``path`` is not a path.

        Example:
            >>> import os, tempfile, torch
            >>> from ckpt_hooks import memory_ledger
            >>> x, path = torch.ones(4096, requires_grad=True), os.path.join(tempfile.mkdtemp(), "step.pickle")
            >>> memory_ledger(lambda: x.exp().sum().backward()).save_snapshot(path)
        """
        check_path(path, "step.pickle")
        with open(path, "wb") as file:
            pickle.dump(self.to_snapshot(), file, protocol=4)  # the latest protocol that the page reads


def frame_of(name: str, kind: str, line: str | None = None) -> dict[str, Any]:
    """Returns a frame of a snapshot, at a line as in ``"model.py:12"``, or else with ``kind`` as its file."""
    file, _, number = (line or "").rpartition(":")
    return {"name": name, "filename": file or kind, "line": int(number) if file else 0}


def frames_of(origin: Origin) -> Frames:
    """Returns an origin as a stack, innermost first: operator, node or optimizer, modules, region, maker."""
    # Modules are outermost, so that a flame graph is by modules. A recompute leaves out the node that asked for it.
    node = None if origin.maker is Maker.RECOMPUTE else origin.node
    frames = [frame_of(origin.operator or "?", "operator", origin.line)] if origin.operator or origin.line else []
    frames += [frame_of(name, kind) for kind, name in (("node", node), ("optimizer", origin.optimizer)) if name is not None]
    if origin.module is not None:
        frames.append(frame_of(origin.module, "module"))
        parts = origin.module.rpartition(" ")[0].split(".")
        frames += [frame_of(".".join(parts[:end]), "module") for end in range(len(parts) - 1, 0, -1)]
    if origin.region is not None:
        frames.append(frame_of(origin.region, "region"))
    return [*frames, frame_of(origin.maker.value, "made by")]


def snapshot_of(events: Iterable[MemoryEvent], device: int = 0, older_nbytes: int = 0) -> dict[str, Any]:
    """Returns events as a snapshot; memory from before the step gets addresses above all others."""
    events = [*events]
    trace: list[dict[str, Any]] = []
    alive: dict[int, tuple[int, Frames]] = {}
    spans = [(event.address, event.address + event.nbytes) for event in events if event.address is not None]
    older = first = max((end for _, end in spans), default=0) + 2 * _GAP
    for event in events:
        if (address := event.address) is None:
            address, older = older, older + event.nbytes
        entry = {"addr": address, "size": event.nbytes, "stream": 0, "frames": event.frames, "time_us": event.microseconds}
        trace += [{"action": action, **entry} for action in _ACTIONS[event.is_alloc]]
        if event.is_alloc:
            alive[address] = event.nbytes, event.frames
        else:
            alive.pop(address, None)
    alive[older] = older_nbytes, []  # the page shows blocks without frames as memory from before
    if (end := older + older_nbytes) > first:
        spans.append((first, end))
    segments = [_segment(begin, end, alive, device) for begin, end in _merged(spans)]
    return {"segments": segments, "device_traces": [*([[]] * device), trace]}


#: The actions that torch's allocator notes for a free, and for an allocation.
_ACTIONS = ("free_requested", "free_completed"), ("alloc",)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + _GAP:
            first, end = merged.pop()
            last = max(last, end)
        merged.append((first, last))
    return merged


def _segment(begin: int, end: int, alive: dict[int, tuple[int, Frames]], device: int) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at = begin

    def add(address: int, nbytes: int, state: str, frames: Frames) -> None:
        size = {"address": address, "size": nbytes, "requested_size": nbytes}
        blocks.append({**size, "state": state, "frames": frames})

    for address in sorted(start for start in alive if begin <= start < end):
        nbytes, frames = alive[address]
        if address < at:  # another thread freed memory here, which no profiler saw
            continue
        if address > at:
            add(at, address - at, "inactive", [])
        add(address, nbytes, "active_allocated", frames)
        at = address + nbytes
    if at < end:
        add(at, end - at, "inactive", [])
    used = sum(block["size"] for block in blocks if block["state"] != "inactive")
    sizes = {"total_size": end - begin, "allocated_size": used, "active_size": used, "requested_size": used}
    kind = "large" if end - begin > _GAP else "small"
    return {"device": device, "address": begin, "stream": 0, "segment_type": kind, "frames": [], **sizes, "blocks": blocks}
