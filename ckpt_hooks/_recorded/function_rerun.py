"""Custom autograd functions as operators of a tape: the arguments of a call, and the rerun of forward.

A function's kernels may write by pointer, so its operators do not show its effects. Its results are the tensors that it
returned, saved or wrote to; a replay that needs any of these runs ``forward`` as a whole. Attributes of ``ctx`` besides saved
tensors stay with forward's node.
"""

from __future__ import annotations

import enum
import itertools
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from contextvars import Context
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import Module

from ckpt_hooks._ambient import random
from ckpt_hooks._ambient.switches import AUTOCAST, FUNCTION_MODES
from ckpt_hooks._core.descriptions import describe_tensor, format_path, region_in_words
from ckpt_hooks._core.frame import Frame, stack
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._operators.draws import ReplacedGenerators, device_of, draw_again, draw_anew, drops_nothing
from ckpt_hooks._operators.facts import OpFacts, OpKind, Written, facts_of
from ckpt_hooks._state.containers import CONTAINERS, PLAIN_VALUES, Part, build, builtin_of
from ckpt_hooks._state.places import attributes_of
from ckpt_hooks._tensors.copies import copy_of, fill_all, is_plain
from ckpt_hooks._torch.functions import has_setup_context
from ckpt_hooks._torch.tensors import storage_of, version_of
from ckpt_hooks.errors import DeterminismError

from .replay import ReplayContext
from .values import ANEW

#: A result: the number of its value, whether it was saved, its place among saved or returned tensors, its shape and dtype.
Result = tuple[int, bool, int, torch.Size, torch.dtype]

#: The states of the draws of a forward, in order, None for a call that drew nothing; or :data:`ANEW`.
Draws = Any


class _Ctx(FunctionCtx):
    to_save: Any = ()

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._forward_cls = function
        self.needs_input_grad = needs_input_grad
        self.metadata: dict[Any, Any] = {}

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.to_save)


class _DrawsAgain(QuietDispatchMode):
    """Lets the operators of a rerun draw the numbers of forward."""

    def __init__(self, facts: FunctionFacts, draws: Draws, frame: Frame, generators: ReplacedGenerators) -> None:
        super().__init__()
        self._facts, self._frame, self._replaced = facts, frame, generators
        self._states = None if draws is ANEW else iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, kwargs = facts_of(func), kwargs or {}
        if not facts.is_random or drops_nothing(func, args, kwargs):
            out = facts.call(*args, **kwargs)
            count_writes(func, args)
            return out
        if self._states is None:
            return draw_anew(func, args, kwargs, self._replaced)
        try:
            state = next(self._states)
        except StopIteration:
            raise self._facts.error(self._frame, "fewer random draws", f"another draw by {func}") from None
        if state is None or (self._facts.sources is not None and device_of(args, kwargs).type != "cpu"):
            return func(*args, **kwargs)  # drew nothing, or draws from a device's source, set as in forward
        return draw_again(func, list(args), kwargs, state)


_SINGLETONS = (type, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_MOST_PARTS = 1000


def parts_of(values: Iterable[Any]) -> list[Any] | None:
    """Returns all parts of objects, in the order of a walk; None if they may change unseen or lead to a graph."""
    # A graph to which an object leads may hold the object: a cycle that the garbage collector does not see.
    todo, seen, parts = list(values), set[int](), list[Any]()
    while todo:
        value = todo.pop()
        parts.append(value)
        if len(parts) > _MOST_PARTS:
            return None
        kind = type(value)
        if kind in PLAIN_VALUES or isinstance(value, _SINGLETONS) or id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            if not is_plain(value) or not value.is_leaf:
                return None
            continue
        seen.add(id(value))
        if kind is types.FunctionType and is_without_state(value):
            continue
        if kind in CONTAINERS:
            places: tuple[Part, ...] = (CONTAINERS[kind],)
        elif builtin_of(kind) is object and not issubclass(kind, (Module, Iterator)):
            places = attributes_of(kind)
        else:
            return None
        for place in places:
            content = place.read(value, 0)
            parts.append(len(content))
            todo += itertools.chain.from_iterable(content.items()) if type(content) is dict else content
    return parts


def is_without_state(function: types.FunctionType) -> bool:
    """Whether a function has nothing that may change, except for globals."""
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def memory_of(parts: Iterable[Any]) -> list[tuple[int | None, int]]:
    return [(storage_of(part), version_of(part)) for part in parts if isinstance(part, torch.Tensor)]


_lending = threading.RLock()


class _Lending:
    """Gives some tensors other contents in a ``with`` block, without a change of their versions."""

    def __init__(self, lent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._lent = lent
        self._present: list[tuple[torch.Tensor, int, torch.Tensor, None]] = []

    def __enter__(self) -> None:
        _lending.acquire()
        try:
            self._present = [(tensor, tensor._version, copy_of(tensor), None) for tensor, _ in self._lent]
            fill_all((tensor, tensor._version, content, None) for tensor, content in self._lent)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            fill_all(self._present)
        finally:
            _lending.release()


def _same(part: Any, other: Any) -> bool:
    return part is other or (type(part) in PLAIN_VALUES and type(part) is type(other) and repr(part) == repr(other))


class FunctionFacts(OpFacts):
    """A call of a custom function in place of an operator's facts; its tensors are the arguments of the ``Op``."""

    __slots__ = (
        "args",
        "casts",
        "context",
        "fake_mode",
        "grads",
        "kwargs",
        "lent",
        "memory",
        "modes",
        "needs_input_grad",
        "objects",
        "parts",
        "results",
        "sources",
    )

    # The same for all calls, so no slots.
    is_function = True
    kind = OpKind.REWRITES
    lists: tuple[int, ...] = ()
    is_view = is_inplace_view = single = has_shape_from_data = has_effect = is_routing = looks_at_grad = has_buffered_masks = (
        False
    )
    is_uninitialized = False

    args: list[Any]  # positional arguments, with stand-ins for tensors
    kwargs: dict[str, Any]  # keyword arguments, likewise
    context: Context  # context variables of forward
    casts: Any  # autocast of forward; None where off
    modes: Any  # function modes of forward; None without any
    grads: list[bool]  # for each tensor among the arguments, whether it required grad
    needs_input_grad: tuple[bool, ...]  # as forward's ``ctx`` had it

    def __init__(self, function: Any) -> None:
        self.operator = function
        self.written: tuple[Written, ...] = ()
        self.objects: list[Any] = []  # arguments that are neither tensors nor taken apart
        self.parts: list[Any] = []  # the parts of objects in forward
        self.memory: list[tuple[int | None, int]] = []  # storages and versions of tensors among the parts
        self.lent: list[int] = []  # places of tensors from outside to which forward and reruns write
        self.results: list[Result] = []  # the results on the tape, in order of noting
        # States before forward of random sources other than the CPU's; None if forward did not move them.
        self.sources: random.RandomStates | None = None
        self.fake_mode: Any = None  # the mode of fake tensors among the arguments, if any

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function's class, as in ``"RMSNorm.apply"``."""
        return f"{self.operator.__qualname__.replace('<locals>.', '')}.apply"

    full_name = name

    def numbers(self, first: int) -> list[int]:
        return [result[0] for result in self.results]

    def rerun(
        self, tensors: list[torch.Tensor], draws: Draws, frame: Frame, context: ReplayContext, generators: Any
    ) -> list[Any]:
        """Runs forward again; returns the results in the order of :attr:`results`."""
        if self.objects and not self.are_as_noted():
            advice = "Do not change the objects among its arguments before backward, or pass copies of them."
            raise self.error(frame, "the objects unchanged", "objects among its arguments that have changed", advice)
        # The last of ``inputs`` are parts of objects, in the order of ``inside``.
        inputs = [_as_forward(tensor, grad) for tensor, grad in zip(tensors, self.grads, strict=True)]
        inside = [part for part in self.parts if isinstance(part, torch.Tensor)]
        first, lent = len(inputs) - len(inside), []
        for place in self.lent:
            if place < first:
                inputs[place] = copy_of(inputs[place])
            else:
                lent.append((inside[place - first], inputs[place]))
        built: dict[int, Any] = {}
        args = [build(argument, inputs, built) for argument in self.args]
        kwargs = {name: build(argument, inputs, built) for name, argument in self.kwargs.items()}
        del inputs, built
        mode = nullcontext() if draws is None else _DrawsAgain(self, draws, frame, generators)
        innermost, recomputing = stack.innermost, frame.recomputing
        context.suspend()
        try:
            stack.innermost, frame.recomputing = frame, True
            casts = AUTOCAST.enter(self.casts)
            modes = FUNCTION_MODES.enter(self.modes)
            drawn = None if self.sources is None else random.enter(self.sources)
            try:
                with self.fake_mode or nullcontext(), _Lending(lent) if lent else nullcontext(), mode:
                    results = self.context.copy().run(self._run, args, kwargs)
            finally:
                if drawn is not None:
                    random.leave(drawn)
                FUNCTION_MODES.leave(modes)
                AUTOCAST.leave(casts)
        finally:
            stack.innermost, frame.recomputing = innermost, recomputing
            context.resume()
        return [self._result(results, result, frame) for result in self.results]

    def _run(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Runs forward as autograd does; returns the saved tensors and the results."""
        function = self.operator
        ctx = _Ctx(function, self.needs_input_grad)
        if has_setup_context(function):
            output = function.forward(*args, **kwargs)
            function.setup_context(ctx, tuple(args), output)
        else:
            output = function.forward(ctx, *args, **kwargs)
        saved = [tensor for tensor in ctx.to_save or () if tensor is not None]
        return saved, output if isinstance(output, tuple) else (output,)

    def _result(self, results: tuple[Any, Any], result: Result, frame: Frame) -> torch.Tensor:
        _, is_saved, place, shape, dtype = result
        values = results[0] if is_saved else results[1]
        tensor = values[place] if place < len(values) else None
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype is not dtype:
            what = f"{'saved' if is_saved else 'returned'} {str(dtype).removeprefix('torch.')}{list(shape)} at place {place}"
            actual = describe_tensor(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
            raise self.error(frame, what, actual)
        return tensor.detach() if tensor.requires_grad else tensor

    def are_as_noted(self) -> bool:
        """Whether the objects have the same parts as in forward."""
        parts = parts_of(self.objects)
        if parts is None or len(parts) != len(self.parts) or not all(map(_same, parts, self.parts)):
            return False
        first = len(self.grads) - len(self.memory)
        return all(
            after[0] == before[0] and (after[1] == before[1] or place in self.lent)
            for place, (after, before) in enumerate(zip(memory_of(self.parts), self.memory, strict=True), first)
        )

    def error(
        self, frame: Frame, expected: str, other: str, advice: str = "Pass values that change as arguments."
    ) -> DeterminismError:
        region = format_path(frame.path)
        return DeterminismError(
            f"{region_in_words(region)}: the forward of the custom function `{self.name}` ran again for backward, with "
            f"{other}, while the first run had {expected}. Its results may depend only on its arguments, torch's random "
            f"numbers and values that stay the same until backward. {advice}",
            region=region,
            index=-1,
            expected=expected,
            found=other,
        )


def _as_forward(tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    """Returns a tensor with the ``requires_grad`` of forward, which the function may read."""
    if tensor.requires_grad == grad:
        return tensor
    return tensor.detach().requires_grad_(grad)
