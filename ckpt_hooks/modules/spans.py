"""Spans: regions from one module to another, in each call of their parent."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Sequential

from ckpt_hooks._ambient.switches import AUTOCAST, FUNCTION_MODES
from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.misuse import Misuse, wrong
from ckpt_hooks._core.modes import users_modes
from ckpt_hooks._state.places import class_attribute
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks._torch.compiling import skipped

from .forward import RegionForward, RegionRunner, check_forward, region_forward_for, region_forward_of
from .selecting import span


class SpanModules(NamedTuple):
    """The modules of a span in a model."""

    name: str
    parent: Module
    first: Module
    last: Module
    place: tuple[int, int]  # the positions of both ends in ``named_modules()``

    @property
    def kind(self) -> str:
        return " to ".join(dict.fromkeys(type(module).__name__ for module in (self.first, self.last)))


def span_in(model: Module, selected: span) -> SpanModules:
    """Returns the modules of a span whose ends are in a model."""
    modules = dict(model.named_modules())
    first, last = (_parent_of(modules, name) for name in (selected.first, selected.last))
    if first != last:
        advice = "Pass two layers of one list or Sequential, or two attributes of one module."
        raise wrong(selected, "select", "a span of two modules that the same module calls", advice, ValueError)
    ends = modules[selected.first], modules[selected.last]
    order = [*map(id, vars(modules[first])["_modules"].values())]  # the order of calls, in which a module may occur twice
    forward: Any = modules[first].forward
    if getattr(getattr(forward, "__wrapped__", forward), "__func__", None) is Sequential.forward and (
        id(ends[0]) in order and id(ends[1]) not in order[order.index(id(ends[0])) :]
    ):
        advice = f"Write span({selected.last!r}, {selected.first!r})."
        raise wrong(selected, "select", "a span whose last layer runs after its first", advice, ValueError)
    names = [*modules]
    place = names.index(selected.first), names.index(selected.last)
    return SpanModules(str(selected), modules[first], *ends, place)


def _parent_of(modules: dict[str, Module], name: str) -> str:
    """Returns the name of the module that calls another: the nearest module around with a forward, so not a list."""
    while name:
        name = name.rpartition(".")[0]
        if class_attribute(type(modules[name]), "forward") is not Module.forward:
            break
    return name


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_calls = _Calls()


class RegionSpan:
    """Opens a region before one module and closes it after another, in each call of their parent; copied with the modules."""

    def __init__(self, modules: SpanModules, runner: RegionRunner) -> None:
        self.name, self.place, self.runner = modules.name, modules.place, runner
        self.is_active = True  # False after the span was removed from one of its modules

    def put(self, modules: SpanModules) -> list[RegionForward]:
        """Makes the span a region; returns the objects that replace ``forward`` in the modules of the span."""
        forwards = [region_forward_for(module) for module in modules[1:4]]
        forwards[0].inside.append(self.call_parent)
        for forward, part in zip(forwards[1:], (self.call_first, self.call_last), strict=True):
            forward.around.append(part)
            forward.around.sort(key=lambda part: (part.__self__.place[0], -part.__self__.place[1]))  # the widest span first
        return forwards

    @skipped
    def call_parent(self, function: Callable[..., Any], parent: Module, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the parent; if the call leaves the region open, closes the region and raises."""
        call = _Call(self, parent)
        _calls.open.append(call)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            call.close(error)
            raise
        finally:
            _calls.open.remove(call)
        if call.leave is not None:
            call.close()
            raise (Misuse.SPAN_REVERSED if call.is_reversed else Misuse.SPAN_OPEN).error_of((self.name, None))
        return result

    @skipped
    def call_first(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Opens the region, and calls the first module."""
        call = self._call()
        if call is not None and call.leave is None:
            call.enter(function, args, kwargs)
        return function(*args, **kwargs)

    @skipped
    def call_last(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls the last module, and closes the region."""
        call = self._call()
        if call is None or call.is_in_last:
            return function(*args, **kwargs)
        call.is_in_last, call.is_reversed = True, not call.around
        try:
            result = function(*args, **kwargs)
        finally:
            call.is_in_last = False
        if call.leave is not None:
            call.close()
            now = _surroundings()
            for name, before in call.around.items():
                if now[name] != before:
                    raise Misuse.SPAN_END.error_of((self.name, None), name=name, before=before[0], now=now[name][0])
        return result

    def _call(self) -> _Call | None:
        return next((call for call in reversed(_calls.open) if call.span is self and self.is_active), None)


def check_spans(made: list[tuple[RegionSpan, SpanModules]]) -> None:
    """Raises if spans overlap with each other, or with spans that are regions already."""
    of_parent: dict[int, list[RegionSpan]] = {}
    for new, modules in made:
        for module in modules[1:4]:
            check_forward(module, new.name)
        if id(modules.parent) not in of_parent:
            forward = region_forward_of(modules.parent)
            of_parent[id(modules.parent)] = [] if forward is None else [part.__self__ for part in forward.inside]
        for other in of_parent[id(modules.parent)]:
            (begin, end), (first, last) = sorted((new.place, other.place))
            if new.place == other.place or begin < first <= end < last:
                raise ValueError(
                    f"The spans {other.name!r} and {new.name!r} overlap. Pass one inside of the other, or one after the other. "
                    "If one is of an earlier call, undo that call first."
                )
        of_parent[id(modules.parent)].append(new)


class _Call:
    def __init__(self, span: RegionSpan, parent: Module) -> None:
        self.span, self.parent = span, parent
        self.leave: Callable[..., object] | None = None  # closes the region; None unless the region is open
        self.around: dict[str, tuple[Any, ...]] = {}
        self.is_in_last = False  # whether the last module is running: it may call itself, which must not close the region
        self.is_reversed = False  # whether the last module was called before the first

    def enter(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.around = _surroundings()
        region = self.span.runner.region_of(self.parent, function, args, kwargs)
        if region is None:
            self.leave = contextlib.nullcontext().__exit__
            return
        leave = region.__exit__  # read before ``__enter__``, as ``with`` does: each entry has an ``__exit__`` object of its own
        region.__enter__()
        self.leave = leave

    def close(self, error: BaseException | None = None) -> None:
        leave, self.leave = self.leave, None
        if leave is not None:
            leave(None if error is None else type(error), error, None if error is None else error.__traceback__)


def _surroundings() -> dict[str, tuple[Any, ...]]:
    """Returns the settings that have to agree at both ends of a span: for each, its words for errors, then its value."""
    gradients, handled, casts = torch.is_grad_enabled(), sys.exc_info()[1], AUTOCAST.capture()
    modes, functions = users_modes(), FUNCTION_MODES.capture()
    hooks, frame = top_saved_tensors_hooks(False), stack.innermost
    return {
        "an exception": ("none is handled" if handled is None else f"a {type(handled).__name__} is handled", id(handled)),
        "autocast": ("off" if casts is None else "on", casts),
        "the grad mode": ("on" if gradients else "off", torch.is_inference_mode_enabled()),
        "the dispatch mode": (", ".join(modes) or "none",),
        "the function mode": ("none" if functions is None else "on", functions),
        "the region around": ("none" if frame is None else frame.path[0], id(frame)),
        "a pair of saved-tensor hooks": ("none" if hooks is None else "there", hooks),
    }
