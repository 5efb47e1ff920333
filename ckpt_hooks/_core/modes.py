"""The base class of the package's dispatch modes, which Dynamo neither compiles nor notices, and calls that bypass modes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from typing_extensions import ParamSpec, Self

from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import (
    TorchDispatchMode,
    dispatch_mode_at,
    function_mode_at,
    is_tracing_mode,
    num_dispatch_modes,
    num_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)


class QuietDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that Dynamo does not notice, and that passes operators on unless a subclass does more."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            skipped(vars(cls)["__torch_dispatch__"])  # or Dynamo would compile the handler

    supports_higher_order_operators = True  # without it torch raises for flex_attention and the like under the mode

    def __init__(self) -> None:
        # The number of open pauses: a mode is paused while the package runs operators for itself, or a recompute runs in the
        # middle of a region. No ``super().__init__()``: it prepares for torch's ``__enter__``, which is replaced below.
        self.paused = 0
        self._ranges = 0

    # Without this Dynamo would be imported to wrap the handler.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # A compiled function that runs under this mode stays compiled.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Self:
        push_dispatch_mode(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.leaves()
        mode = pop_dispatch_mode(None)
        if mode is self:
            return
        others = [mode]  # modes that the user has entered in the region and not left
        while num_dispatch_modes() and (mode := pop_dispatch_mode(None)) is not self:
            others.append(mode)
        for mode in reversed(others):
            push_dispatch_mode(mode)

    @skipped
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        count_writes(func, args)
        return output

    def leaves(self) -> None:
        """Called when the mode is taken off its thread, by ``__exit__`` or by :func:`leave_modes`."""

    def note_range(self, operator: Any, args: Any) -> None:
        """Pauses the mode in FSDP's profiler ranges, where FSDP gathers parameters: a recompute has them gathered already."""
        # Only the name of a range tells that FSDP made it (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
        if "exit" in operator._schema.name:
            if self._ranges:
                self._ranges -= 1
                self.paused -= 1
        elif self._ranges or str(args[0]).startswith("FSDP::"):
            self._ranges += 1
            self.paused += 1


def _active_modes() -> Iterator[Any]:
    return map(dispatch_mode_at, range(num_dispatch_modes()))


def count_writes(operator: Any, args: Any) -> None:
    """Counts writes of in-place operators over lists (``_foreach_mul_``), which torch does not count under a dispatch mode."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable or not schema.name.startswith("aten::_foreach_"):
        return
    # Every mode of the package calls this after it has passed an operator on. Only the outermost counts the write, once.
    if not any(map(is_quiet, _active_modes())):
        for tensor in args[0]:
            increment_version(tensor)


def is_compiled_code_running() -> bool:
    """Whether code of Inductor runs the current operator: its kernels reuse buffers, which no mode sees."""
    if torch.is_grad_enabled():  # Inductor's code runs with gradients off, so most calls need no look at the stack
        return False
    frame = sys._getframe(1)
    for _ in range(12):
        caller = frame.f_back
        if caller is None:
            return False
        frame = caller
        # Torch has no flag for compiled code. In 2.11 to 2.15 a caller of the kernels is in a module of Inductor.
        if frame.f_globals.get("__name__", "").startswith("torch._inductor"):
            return True
    return False


def is_quiet(mode: Any) -> bool:
    return isinstance(mode, QuietDispatchMode)


def leave_modes(count: int) -> None:
    while num_dispatch_modes() > count:
        mode = pop_dispatch_mode(None)
        if is_quiet(mode):
            mode.leaves()


def pause_modes() -> Sequence[QuietDispatchMode]:
    modes = [mode for mode in _active_modes() if isinstance(mode, QuietDispatchMode)]
    for mode in modes:
        mode.paused += 1
    return modes


def only_quiet_modes() -> bool:
    """Whether all active modes of this thread are the package's own, which ignore ``detach``."""
    return not num_dispatch_modes() or all(map(is_quiet, _active_modes()))


def users_modes() -> list[str]:
    """Returns the names of this thread's dispatch modes, except for torch's tracing modes and the package's modes."""
    return [type(mode).__name__ for mode in _active_modes() if not (is_quiet(mode) or is_tracing_mode(mode))]


def is_without_values() -> bool:
    """Whether torch traces on this thread: fake, functional and proxy tensors have no values to compare."""
    return num_dispatch_modes() > 0 and any(map(is_tracing_mode, _active_modes()))


def resume_modes(paused: Sequence[QuietDispatchMode]) -> None:
    for mode in paused:
        mode.paused -= 1


P = ParamSpec("P")
R = TypeVar("R")


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function pause the package's modes, so that no region records its operators."""

    @functools.wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        modes = pause_modes()
        if not modes:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            resume_modes(modes)

    return paused


def past_modes(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function with no dispatch mode or function mode active except for torch's tracing and default-device modes."""
    # Excluding the dispatcher's keys for modes would be quicker, but would skip the handlers of tensor subclasses too.
    if not (num_dispatch_modes() or num_function_modes()):
        return function(*args, **kwargs)
    dispatch, functions = _modes_to_leave(), list(_active_function_modes())
    devices = [mode for mode in functions if type(mode).__module__ == "torch.utils._device"]  # the module may not be imported
    try:
        _set_modes([], devices)
        return function(*args, **kwargs)
    finally:
        try:
            _set_modes(dispatch, functions)
        except BaseException:  # such as Ctrl-C in the middle: the second call sets the rest
            _set_modes(dispatch, functions)
            raise


def _modes_to_leave() -> list[Any]:
    return [mode for mode in _active_modes() if not is_tracing_mode(mode)]


def _active_function_modes() -> Iterator[Any]:
    return map(function_mode_at, range(num_function_modes()))


def _set_modes(dispatch: Sequence[Any], functions: Sequence[Any]) -> None:
    """Makes these modes the modes of this thread; torch's modes for tracing stay."""
    present = _modes_to_leave()
    same = _num_same(present, dispatch)
    for _ in present[same:]:
        pop_dispatch_mode(None)
    for mode in dispatch[same:]:
        push_dispatch_mode(mode)
    present = list(_active_function_modes())
    same = _num_same(present, functions)
    for _ in present[same:]:
        pop_function_mode()
    for mode in functions[same:]:
        push_function_mode(mode)


def _num_same(modes: Sequence[Any], others: Sequence[Any]) -> int:
    differ = (at for at, (a, b) in enumerate(zip(modes, others, strict=False)) if a is not b)
    return next(differ, min(len(modes), len(others)))


def modes_in_words(forward: Collection[str], recompute: Collection[str]) -> str:
    """Returns a sentence for an error if forward and recompute ran under different dispatch modes; else an empty string."""
    if {*forward} == {*recompute}:
        return ""
    around, during = (f"dispatch mode {' and '.join(modes)}" if modes else "no mode" for modes in (forward, recompute))
    return (
        f" Forward ran under {around}, and the recompute under {during}: modes around the region are not entered again. Enter "
        "a mode that changes results inside the region, or around both forward and backward."
    )


def reusable(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns a fresh copy of a context manager that may have been used, or the manager itself if it makes no copies."""
    # A manager made by ``contextlib.contextmanager`` works once, but as a ``ContextDecorator`` it can make another.
    recreate: Callable[[], AbstractContextManager[Any]] | None = getattr(context, "_recreate_cm", None)
    return context if recreate is None else recreate()
