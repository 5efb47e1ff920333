"""Calls of TorchScript in a function frame.

TorchScript saves other tensors in the first calls of a function than in later ones: the first call takes notes, and later ones
have derivatives of their own. A plan made so has guards (which arguments require grad, say). Where one fails, it begins anew
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/OVERVIEW.md#profiling-programs). A rerun is a later call.

So what a call saves is dropped only if two earlier calls met the same guards, as far as arguments and modules tell, and the
latter saved the like. Else everything is kept, as plain autograd does, and the rerun leaves the tensors of the call out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.hooks import UNPACKS, are_of_frame
from ckpt_hooks._core.modes import pause_modes, resume_modes
from ckpt_hooks._core.paths import RegionPath, format_path
from ckpt_hooks._core.saved_descriptions import Kept
from ckpt_hooks._torch.autograd import pop_saved_tensors_hooks, push_saved_tensors_hooks, top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.scripting import divert_scripted, flags_of, latest_plan
from ckpt_hooks.errors import DeterminismError

from .collector import Collector
from .packing import unpack

__all__ = ["ScriptedCalls", "watch_scripted"]

#: What tells by which plan a call is carried out, as far as the caller can know.
_Key = tuple[Any, ...]
#: Shape, dtype, and whether grad is required, of each tensor saved in a call.
_Facts = list[tuple[Any, ...]]

#: For each function, by keys, the number of calls so far, and what the latest has saved.
_calls: weakref.WeakKeyDictionary[Any, dict[_Key, tuple[int, _Facts]]] = weakref.WeakKeyDictionary()

#: How many calls have to precede one whose tensors are dropped: one takes notes, and one has the derivatives of the plan.
_BEFORE = 2
#: How many keys are remembered of a function whose sizes change all the time.
_MOST = 64


class _Count(threading.local):
    """How many calls this thread has made."""

    number = 0


_count = _Count()


def _key_of(function: Any, args: Any, kwargs: Any) -> _Key:
    tensors, others = [], []
    todo = [*args, *kwargs.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            # Sizes matter to plans that fuse operators.
            sizes = value.shape if value.device.type != "cpu" else value.dim()
            tensors.append((value.requires_grad, value.dtype, value.device, sizes))
        elif isinstance(value, (list, tuple)):
            todo += [len(value), *value]
        elif isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        else:
            others.append(value if isinstance(value, (bool, float, int, str)) else type(value))
    return tuple(tensors), tuple(others), tuple(flags_of(function))


def _note(function: Any, key: _Key, facts: _Facts) -> bool:
    """Notes a call; returns whether a later one is carried out by the same plan."""
    calls = _calls.setdefault(function, {})
    number, before = calls.pop(key, (0, []))
    if len(calls) >= _MOST:
        calls.clear()
    calls[key] = number + 1, facts
    return number >= _BEFORE and before == facts


def _facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


class _Saved:
    """A tensor saved in a call: kept, or dropped when the call has ended by a known plan."""

    __slots__ = ("packed", "tensor", "unpack", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.packed: Any = None
        self.unpack: Callable[[Any], torch.Tensor] = unpack

    def keep(self, path: Any) -> None:
        """Keeps the tensor, as plain autograd does."""
        tensor, self.tensor = self.tensor, None
        if tensor is not None:
            is_parameter = tensor.is_leaf and tensor.requires_grad
            kept: Kept = [tensor if is_parameter else tensor.detach(), self.version, path]
            self.packed = kept

    def drop(self, hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> None:
        """Hands the tensor to the frame's hooks."""
        tensor, self.tensor = self.tensor, None
        self.packed, self.unpack = hooks[0](tensor), hooks[1]


@skipped
def _unpack(saved: _Saved) -> torch.Tensor:
    # While the call runs, backward in it finds the tensor itself.
    return saved.unpack(saved.packed) if saved.tensor is None else saved.tensor


UNPACKS.append(_unpack)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class ScriptedCalls:
    """The calls of TorchScript in one region's forward: for each the plan that a rerun has to meet, None if all was kept."""

    __slots__ = ("_is_selective", "_path", "_plans")

    def __init__(self, path: RegionPath, *, is_selective: bool) -> None:
        # A plan's operators are others than those of the plan before: under a policy none is asked about, and all is kept.
        self._path, self._is_selective = path, is_selective
        self._plans: list[Any] = []

    @contextmanager
    def _aside(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Hides a call from the frame's hooks, and from the policy."""
        push_saved_tensors_hooks(pack, unpack)
        paused = pause_modes() if self._is_selective else None
        try:
            yield
        finally:
            pop_saved_tensors_hooks()
            if paused:
                resume_modes(paused)

    def run(self, hooks: Any, call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call in forward."""
        saved: list[_Saved] = []
        facts: _Facts = []
        key, number = _key_of(function, args, kwargs), _count.number
        place = len(self._plans)
        self._plans.append(None)

        def pack(tensor: torch.Tensor) -> _Saved:
            one = _Saved(tensor)
            saved.append(one)
            facts.append(_facts_of(tensor))
            return one

        try:
            with self._aside(pack, _unpack):
                result = call(function, *args, **kwargs)
            plan = latest_plan()
            # In a call from within, by a function that is left to Python, something else may be carried out for the first time.
            is_repeated = _note(function, key, facts) and number == _count.number and not self._is_selective
            if is_repeated and all(one.tensor is not None and one.tensor._version == one.version for one in saved):
                for one in saved:
                    one.drop(hooks)
                self._plans[place] = plan
            return result
        finally:
            for one in saved:
                one.keep(self._path)

    def rerun(self, collector: Collector, call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call in a rerun.

        Raises:
            DeterminismError: If TorchScript carries out another plan than in forward.
        """
        place = collector.num_scripted
        collector.num_scripted += 1
        plan = self._plans[place] if place < len(self._plans) else None
        if plan is None:
            facts: _Facts = []
            key = _key_of(function, args, kwargs)

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                facts.append(_facts_of(tensor))
                # For backward inside of the rerun. An output that is held by its own node would never go.
                return tensor if tensor.is_leaf else tensor.detach()

            with self._aside(pack, _itself):
                result = call(function, *args, **kwargs)
            _note(function, key, facts)
            return result
        try:
            return call(function, *args, **kwargs)
        finally:
            found = latest_plan()
            if found is not plan:
                region, name = format_path(self._path), getattr(function, "name", "a function")
                raise DeterminismError(
                    f"region {'/'.join(region)!r}: TorchScript has carried out {name!r} by another plan than in forward, which "
                    "saves other tensors. Call it twice before the region, or leave it out of the region.",
                    region=region,
                    index=-1,
                    expected="the plan of forward",
                    found="another plan",
                )


def _run(call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    _count.number += 1
    frame: Any = stack.innermost
    if frame is None or frame.kind != "function" or not torch.is_grad_enabled():
        return call(function, *args, **kwargs)
    hooks = top_saved_tensors_hooks(False)
    if hooks is None or not are_of_frame(hooks) or hooks[1] is _unpack:
        return call(function, *args, **kwargs)
    if not frame.recomputing:
        if frame.scripted is None:
            frame.scripted = ScriptedCalls(frame.path, is_selective=frame.call.selection is not None)
        return frame.scripted.run(hooks, call, function, args, kwargs)
    if frame.scripted is None:
        return call(function, *args, **kwargs)
    return frame.scripted.rerun(frame.collector, call, function, args, kwargs)


_is_watched = False


def watch_scripted() -> None:
    """Has calls of TorchScript in regions run as above, from the first region of the process on."""
    global _is_watched
    if not _is_watched:
        _is_watched = True
        divert_scripted(_run)
