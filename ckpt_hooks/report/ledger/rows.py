"""The rows of a step: allocations, frees and marks in the order of time, read from the profiler's events.

Marks are empty ranges of the profiler that note a moment of a step: events of regions and modules, gradients, frees of older
memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ckpt_hooks._core.call_sites import objects_of, site_of
from ckpt_hooks._core.events import Observer, Region, TensorInfo, observe
from ckpt_hooks._core.holdings import Holding, Reason, Saved, address_in, address_of
from ckpt_hooks._torch.autograd import sequence_number
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import PastFunctionModes, active_fake_mode
from ckpt_hooks._torch.profiling import IS_ALLOCATION, NOT_OPERATORS, profiler_range
from ckpt_hooks._torch.tensors import dense_parts, dry_storages
from ckpt_hooks.report.printing import NOWHERE, Origin
from ckpt_hooks.report.progress import ticker

_PREFIX = "ckpt_hooks##"
_NODE = "autograd::engine::evaluate_function: "
_STEP = "Optimizer."
_LINE = "line"  # the event of a mark whose range is a call into torch
_MEMORY = "memory"  # the event of a mark for an allocation or free in a dry run


class StepMark(NamedTuple):
    """A call of a reader's method, made when the rows are read."""

    event: str  # the name of the method
    args: tuple[Any, ...]
    sequence: int | None  # the number of the next node of autograd on the ledger's thread; None on another thread


class Marks:
    """The marks of a ledger, by the names of their profiler ranges."""

    def __init__(self) -> None:
        self.by_name: dict[str, StepMark] = {}
        self._next = itertools.count().__next__
        self._thread = threading.get_ident()
        self._tick = ticker()
        self.is_open = True  # False once the ledger has ended: frames keep their observers, which may report later events
        if (listen := getattr(active_fake_mode(), "listen", None)) is not None:
            listen(functools.partial(self.add, _MEMORY))

    def range_of(self, event: str, *args: Any) -> Any:
        name = f"{_PREFIX}{self._next()}"
        on_thread = threading.get_ident() == self._thread
        self.by_name[name] = StepMark(event, args, sequence_number() if on_thread else None)
        return profiler_range(name)

    def add(self, event: str, *args: Any) -> None:
        if self.is_open:
            if self._tick is not None:
                self._tick()
            with self.range_of(event, *args):
                pass


class RegionMarks(Observer):
    """Adds a mark for each event of a region."""

    def __init__(self, marks: Marks) -> None:
        self._mark = marks.add

    def entered(self, region: Region) -> None:
        self._mark("entered", region)

    def exited(self, region: Region, error: BaseException | None) -> None:
        self._mark("exited", region.id)

    def recomputing(self, region: Region, *, in_order: bool) -> None:
        self._mark("recomputing", region, in_order)

    def recomputed(self, region: Region, error: BaseException | None) -> None:
        self._mark("recomputed", region.id)

    def let_go(self, region: Region, position: int) -> None:
        self._mark("let_go", region.id, position)


class _Holdings(RegionMarks):
    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self._addresses: dict[tuple[int, int], int] = {}  # of saved tensors, by region and position

    def saved(self, region: Region, saved: Saved, tensor: TensorInfo) -> None:
        self._addresses[region.id, saved.position] = tensor.address
        self._saved_with(region, saved.position, saved.fate)

    def settled(self, region: Region, position: int, fate: Reason) -> None:
        self._mark("let_go", region.id, position)
        self._saved_with(region, position, fate)

    def _saved_with(self, region: Region, position: int, fate: Reason) -> None:
        address = self._addresses.get((region.id, position))
        if address and fate not in _GONE:
            self._mark("holds", region.id, position, fate, address)

    def let_go(self, region: Region, position: int) -> None:
        self._addresses.pop((region.id, position), None)
        super().let_go(region, position)

    def held(self, region: Region, holdings: Sequence[Holding]) -> None:
        for number, holding in enumerate(holdings):
            for part, (storage, _) in enumerate(holding.parts or ((holding.storage, 0),)):
                address = address_of(storage)
                if address and holding.reason not in _GONE:
                    self._mark("holds", region.id, ("held", number, part), holding.reason, address)
        frame = region.frame()
        if frame is not None:
            weakref.finalize(frame, self._mark, "frame_gone", region.id).atexit = False


#: The fates of tensors that take no memory of their device.
_GONE = frozenset({Reason.DROPPED, Reason.LOST, Reason.OFFLOADED})


class _LineMarks(TorchFunctionMode):
    # A region's rerun enters the function modes of its forward again, maybe after the ledger has ended.
    def __init__(self, marks: Marks, note_gradients: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        # Attributes are only functions, since a region looks for tensors in the attributes of modes of its forward.
        self._is_open: Callable[[], bool] = lambda: marks.is_open
        self._range_of, self._note_gradients = marks.range_of, note_gradients

    @skipped
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_open() or getattr(func, "__name__", None) == "__get__":  # ``__get__`` of an attribute such as ``shape``
            attribute = func(*args, **(kwargs or {}))
            if func == _GET_GRADIENT:
                self._note_gradients((attribute,))
            return attribute
        if getattr(func, "__module__", None) == "torch._ops.profiler":  # the program's range would begin or end inside of ours
            return func(*args, **(kwargs or {}))
        with self._range_of(_LINE, site_of(sys._getframe(1))):
            return func(*args, **(kwargs or {}))


_gradient: Any = torch.Tensor.grad
_GET_GRADIENT = _gradient.__get__


class OlderMemory:
    """The storages on the host when a ledger begins, whose frees the profiler does not show."""

    def __init__(self, marks: Marks) -> None:
        self.sizes: dict[int, int] = {}  # by address
        self._ends: list[weakref.finalize[Any, Any]] = []
        for storage in _storages_of(tensor for pair in _leaves_and_others() for tensor in pair):
            address = address_in(storage)
            if dry_storages.get(address, storage.device).type == "cpu" and address and address not in self.sizes:
                self.sizes[address] = storage.nbytes()
                self._ends.append(end := weakref.finalize(storage, marks.add, "older_freed", address))
                end.atexit = False

    def forget(self) -> None:
        for end in self._ends:
            end.detach()


def _leaves_and_others() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for tensor in objects_of(torch.Tensor):
        gradient = None
        with contextlib.suppress(Exception):  # raised by subclasses, and by tensors that are being made
            gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        yield tensor, gradient


def _storages_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yields the storages of tensors, except tensors without memory yet, such as of a lazy module."""
    for tensor in tensors:
        with contextlib.suppress(Exception):
            yield from [part.untyped_storage() for part in dense_parts(tensor)]


@contextlib.contextmanager
@skipped
def watch(marks: Marks, model: torch.nn.Module | None) -> Iterator[None]:
    """Adds marks for regions, modules, lines and gradients, inside a ``with`` statement."""
    # Names of modules in the model, or else in the outermost called module. Weak, since modules that the step makes and drops
    # have to free their memory.
    names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
    names.update({inner: name for name, inner in (() if model is None else model.named_modules())})

    def begin(module: torch.nn.Module, args: Any) -> None:
        if module not in names:
            for name, inner in module.named_modules():
                names.setdefault(inner, name)
        marks.add("module_begins", " ".join(filter(None, (names[module], type(module).__name__))))

    def end(module: torch.nn.Module, args: Any, result: Any) -> None:
        marks.add("exited", None)

    def note_gradients(gradients: Iterable[Any]) -> None:
        addresses = list(map(address_in, _storages_of(gradients)))
        if addresses:
            marks.add("gradients", addresses)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with PastFunctionModes():
            note_gradients(parameter.grad for group in optimizer.param_groups for parameter in group["params"])

    with (
        register_module_forward_pre_hook(begin),
        register_module_forward_hook(end, always_call=True),
        register_optimizer_step_pre_hook(before_step),
    ):
        with observe(_Holdings(marks)), _LineMarks(marks, note_gradients):
            yield
        note_gradients(gradient for _, gradient in _leaves_and_others())


class Row(NamedTuple):
    """An allocation, a free, or a mark."""

    time: int  # in ns, on the profiler's clock
    place: Origin  # from the ranges around: line, optimizer, node, and the outermost operator inside the innermost range
    mark: StepMark | None  # None for an allocation or free
    address: int = 0
    nbytes: int = 0  # negative for a free
    device: Any = None
    total: int = 0  # the allocator's bytes in use afterwards; 0 if unknown
    sequence: int = -1  # the number of the running node; for the accumulation of a gradient, of the node before


def rows_of(events: Iterable[Any], marks: Marks) -> list[Row]:
    """Returns the rows of a step."""
    # Each thread has its own tree of events. The sort is stable, so rows of a thread stay in order.
    return sorted(_walk(events, marks.by_name), key=attrgetter("time"))


def _walk(events: Iterable[Any], marks: dict[str, StepMark]) -> Iterator[Row]:
    latest: dict[int, int] = {}  # the sequence number of the latest node of autograd that has such a number, by thread
    todo: list[tuple[Any, Origin, int]] = [(event, NOWHERE, -1) for event in reversed([*events])]
    while todo:
        event, place, node = todo.pop()
        if event.tag == IS_ALLOCATION:
            memory = event.extra_fields
            where = memory.ptr, memory.alloc_size, memory.device, memory.total_allocated or 0
            yield Row(event.start_time_ns, place, None, *where, node)
            continue
        children = event.children
        name: str = event.name
        mark = marks.get(name)
        if mark is not None and mark.event == _LINE:
            place = place._replace(operator=None, line=mark.args[0])
        elif mark is not None and mark.event == _MEMORY:
            address, nbytes, device, total = mark.args
            yield Row(event.start_time_ns, place, None, address, nbytes, device, total, node)
        elif mark is not None:
            yield Row(event.start_time_ns, place, mark)
        elif name.startswith(_NODE):
            # The accumulation of a gradient has no number. It belongs to the node before, which made the gradient.
            sequence = event.extra_fields.sequence_number
            node = latest[event.start_tid] = sequence if sequence >= 0 else latest.get(event.start_tid, -1)
            place = place._replace(operator=None, node=name[len(_NODE) :])
        elif not children:
            continue
        elif name.startswith(_STEP):
            place = place._replace(operator=None, optimizer=name.partition("#")[2])
        elif place.operator is None and event.extra_fields.scope not in NOT_OPERATORS:
            place = place._replace(operator=name)
        todo += [(child, place, node) for child in reversed(children)]
