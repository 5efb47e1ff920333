"""Watching a step for a ledger: events of regions, calls of modules, lines of the program, gradients, and older memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ckpt_hooks._core.call_sites import site_of
from ckpt_hooks._core.events import Observer, Region, TensorInfo
from ckpt_hooks._core.holdings import Holding, Reason, Saved
from ckpt_hooks._core.settings import observe
from ckpt_hooks._core.tensor_numbers import address_in, address_of
from ckpt_hooks._torch.modes import PastFunctionModes
from ckpt_hooks._torch.tensors import dense_parts

from .rows import Marks, Moment

#: A tensor of one of these fates takes no memory of its device.
_GONE = frozenset({Reason.DROPPED, Reason.LOST, Reason.OFFLOADED})


class _Regions(Observer):
    """Marks what regions do."""

    def __init__(self, marks: Marks) -> None:
        self._mark = marks.add
        self._addresses: dict[tuple[int, int], int] = {}  # of saved tensors, by region and position

    def entered(self, region: Region) -> None:
        self._mark(Moment.REGION_BEGINS, region)

    def exited(self, region: Region, error: BaseException | None) -> None:
        self._mark(Moment.REGION_ENDS, region.id)

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        self._mark(Moment.RECOMPUTE_BEGINS, region)

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        self._mark(Moment.RECOMPUTE_ENDS, region.id)

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        self._addresses[region.id, saved.position] = tensor.address
        self._has_fate(region, saved.position, saved.fate)

    def settled(self, region: Region, position: int, fate: Reason) -> None:
        self._mark(Moment.LET_GO, (region.id, position))
        self._has_fate(region, position, fate)

    def _has_fate(self, region: Region, position: int, fate: Reason) -> None:
        address = self._addresses.get((region.id, position))
        if address and fate is Reason.DROPPED:
            self._mark(Moment.DROPPED, (region.id, position, address))
        elif address and fate not in _GONE:
            self._mark(Moment.HELD, (region, position, fate, address))

    def let_go(self, region: Region, position: int) -> None:
        self._addresses.pop((region.id, position), None)
        self._mark(Moment.LET_GO, (region.id, position))

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        for number, holding in enumerate(holdings):
            for part, (storage, _) in enumerate(holding.parts or ((holding.storage, 0),)):
                address = address_of(storage)
                if address and holding.reason not in _GONE:
                    self._mark(Moment.HELD, (region, ("held", number, part), holding.reason, address))
        frame = region.frame()
        if frame is not None:
            weakref.finalize(frame, self._mark, Moment.FRAME_GONE, region.id).atexit = False


class _Lines(TorchFunctionMode):
    """Marks each call into torch with the line of the program."""

    # A rerun of a region runs under the function modes of forward.
    def __init__(self, marks: Marks, note_gradients: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        # Functions alone: a region looks for tensors in the attributes of this package's objects, of modes of its forward too.
        self._range_of, self._is_open, self._note_gradients = marks.range_of, marks.takes_more, note_gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_open() or getattr(func, "__name__", None) == "__get__":  # the latter of an attribute, as ``shape``
            found = func(*args, **(kwargs or {}))
            if func == _GET_GRADIENT:
                self._note_gradients((found,))
            return found
        if getattr(func, "__module__", None) == "torch._ops.profiler":  # begins or ends a range, which would end with ours
            return func(*args, **(kwargs or {}))
        with self._range_of(Moment.CALL, site_of(sys._getframe(1))):
            return func(*args, **(kwargs or {}))


_gradient: Any = torch.Tensor.grad
_GET_GRADIENT = _gradient.__get__


class _Modules:
    """Marks calls of modules, by their names in the outermost called module."""

    def __init__(self, marks: Marks) -> None:
        self._mark = marks.add
        # Weakly: modules made in the step go when they would, with their memory.
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

    def begin(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self._names:
            for name, inner in module.named_modules():
                self._names.setdefault(inner, name)
        self._mark(Moment.MODULE_BEGINS, (self._names[module], type(module).__name__))

    def end(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._mark(Moment.MODULE_ENDS)


class OlderMemory:
    """The storages of tensors on the host when a ledger begins, of whose end the profiler tells nothing."""

    def __init__(self, marks: Marks) -> None:
        self.sizes: dict[int, int] = {}  # by address
        self._ends: list[weakref.finalize[Any, Any]] = []
        for storage in _storages_of(tensor for pair in _leaves_and_others() for tensor in pair):
            address = address_in(storage)
            if storage.device.type == "cpu" and address and address not in self.sizes:
                self.sizes[address] = storage.nbytes()
                self._ends.append(end := weakref.finalize(storage, marks.add, Moment.OLDER_FREED, address))
                end.atexit = False

    def forget(self) -> None:
        for end in self._ends:
            end.detach()


def _leaves_and_others() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields every tensor that Python knows, with its gradient."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            gradient = None
            with contextlib.suppress(Exception):  # of a tensor of others, half made maybe
                gradient = found.grad if found.is_leaf and found.requires_grad else None
            yield found, gradient


def _storages_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yields the storages of tensors; nothing for a tensor not made yet, as of a lazy module."""
    for tensor in tensors:
        with contextlib.suppress(Exception):
            yield from [part.untyped_storage() for part in dense_parts(tensor)]


@contextlib.contextmanager
def watch(marks: Marks) -> Iterator[None]:
    """Marks what happens in a block."""

    def note_gradients(gradients: Iterable[Any]) -> None:
        addresses = list(map(address_in, _storages_of(gradients)))
        if addresses:
            marks.add(Moment.GRADIENTS, addresses)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with PastFunctionModes():
            note_gradients(parameter.grad for group in optimizer.param_groups for parameter in group["params"])

    modules = _Modules(marks)
    hooks = [
        register_module_forward_pre_hook(modules.begin),
        register_module_forward_hook(modules.end, always_call=True),
        register_optimizer_step_pre_hook(before_step),
    ]
    try:
        with observe(_Regions(marks)), _Lines(marks, note_gradients):
            yield
        note_gradients(gradient for _, gradient in _leaves_and_others())
    finally:
        for hook in hooks:
            hook.remove()
