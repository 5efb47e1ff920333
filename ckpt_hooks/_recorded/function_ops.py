"""Custom autograd functions as operators of a tape: what one was called with, and the rerun of its forward.

A function's kernels may write by pointer, so its operators do not tell its effects. Its results are what it returned, what it
saved, and what it wrote of its arguments; a replay which needs one of these runs ``forward`` as a whole. Attributes of ``ctx``
besides saved tensors stay with the node made by forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import Context
from typing import Any

import torch

from ckpt_hooks._ambient import autocast, function_modes, rng
from ckpt_hooks._ambient.draws import device_of, drops_nothing
from ckpt_hooks._core.frame import Frame
from ckpt_hooks._core.modes import QuietDispatchMode, count_writes
from ckpt_hooks._core.paths import format_path
from ckpt_hooks._core.stack import stack
from ckpt_hooks._core.words import describe_tensor
from ckpt_hooks._operators.facts import OpFacts, Written, facts_of
from ckpt_hooks._operators.kinds import Kind
from ckpt_hooks._operators.noted_draws import OwnStreams, draw_again, draw_anew
from ckpt_hooks._tensors.containers import build
from ckpt_hooks._torch.functions import FunctionCtx, has_setup_context
from ckpt_hooks.errors import DeterminismError

from .surroundings import ReplayContext
from .values import ANEW

__all__ = ["Draws", "FunctionFacts", "Slot"]

#: A result: whether it was saved, and its place among what was saved or returned.
Slot = tuple[bool, int]

#: The noted states of the draws of a forward, in order, None for a call which drew nothing; or :data:`ANEW`.
Draws = Any


class _Ctx(FunctionCtx):
    """The ``ctx`` of a rerun."""

    to_save: Sequence[torch.Tensor | None] = ()

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._forward_cls = function
        self.needs_input_grad = needs_input_grad
        self.metadata: dict[Any, Any] = {}

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.to_save)


class _DrawsAgain(QuietDispatchMode):
    """Lets the operators of a rerun draw the numbers of forward."""

    def __init__(self, facts: FunctionFacts, draws: Draws, frame: Frame, streams: OwnStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._facts, self._frame, self._streams = facts, frame, streams
        self._states = None if draws is ANEW else iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts, kwargs = facts_of(func), kwargs or {}
        if not facts.is_random or drops_nothing(func, args, kwargs):
            out = facts.call(*args, **kwargs)
            count_writes(func, args)
            return out
        if self._states is None:
            return draw_anew(func, args, kwargs, self._streams)
        try:
            state = next(self._states)
        except StopIteration:
            raise self._facts.error(self._frame, "fewer random draws", f"another draw by {func}") from None
        if state is None or (self._facts.streams is not None and device_of(args, kwargs).type != "cpu"):
            return func(*args, **kwargs)  # on a device whose stream is where forward's was
        return draw_again(func, list(args), kwargs, state)


class FunctionFacts(OpFacts):
    """One call of a custom function, in the place of an operator's facts. The arguments of the ``Op`` are its tensors.

    Attributes:
        arguments: Positional and keyword arguments, with stand-ins for tensors.
        numbers: The number of each result's value, in order of noting.
        slots: The results, likewise.
        layouts: Shape, dtype and device of each result, likewise.
        grads: For each tensor among the arguments, whether it required grad.
        needs_input_grad: As forward's ``ctx`` had it.
        casts: Autocast of forward; None where off.
        modes: Function modes of forward; None without any.
        context: Context variables of forward.
        streams: Random streams before forward, other than the CPU's, which unseen draws moved; None where none did.
        fake_mode: The mode of fake tensors among the arguments; None for others.
    """

    __slots__ = (
        "arguments",
        "casts",
        "context",
        "fake_mode",
        "grads",
        "layouts",
        "modes",
        "needs_input_grad",
        "numbers",
        "slots",
        "streams",
    )

    is_function = True
    context: Context
    casts: Any
    modes: Any
    streams: rng.Snapshot | None
    fake_mode: Any

    def __init__(self, function: Any, arguments: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.operator = function
        self.name = self.full_name = f"{function.__qualname__.replace('.<locals>', '')}.apply"
        self.kind = Kind.REWRITES
        self.written: tuple[Written, ...] = ()
        self.lists: tuple[int, ...] = ()
        self.is_view = self.is_inplace_view = self.single = self.has_shape_from_data = self.has_effect = False
        self.is_routing = False
        self.arguments = arguments
        self.grads = [tensor.requires_grad for tensor in tensors]
        self.numbers: list[int] = []
        self.slots: list[Slot] = []
        self.layouts: list[tuple[Any, ...]] = []
        self.streams = None

    def note(self, number: int, slot: Slot, tensor: torch.Tensor) -> None:
        """Notes a result.

        Args:
            number: The number of its value.
            slot: Its place.
            tensor: The result.
        """
        self.numbers.append(number)
        self.slots.append(slot)
        self.layouts.append((tensor.shape, tensor.dtype, tensor.device))

    def rerun(self, tensors: list[torch.Tensor], draws: Draws, frame: Frame, context: ReplayContext, streams: Any) -> list[Any]:
        """Runs forward again; returns the results in the order of :attr:`numbers`.

        Args:
            tensors: The tensors among the arguments.
            draws: The noted draws.
            frame: The frame being replayed.
            context: The context of the replay.
            streams: Generators of the replay, see :func:`draw_anew`.

        Raises:
            DeterminismError: If results are missing, or have other shapes.
        """
        given = [_as_forward(tensor, grad) for tensor, grad in zip(tensors, self.grads, strict=True)]
        built: dict[int, Any] = {}
        args = [build(one, given, built) for one in self.arguments[0]]
        kwargs = {name: build(one, given, built) for name, one in self.arguments[1].items()}
        del given, built
        mode = nullcontext() if draws is None else _DrawsAgain(self, draws, frame, streams)
        innermost, recomputing = stack.innermost, frame.recomputing
        context.suspend()
        try:
            stack.innermost, frame.recomputing = frame, True
            casts = None if self.casts is None else autocast.enter(self.casts)
            modes = function_modes.enter(self.modes or ())
            drawn = None if self.streams is None else rng.enter(self.streams)
            try:
                with self.fake_mode or nullcontext(), mode:
                    results = self.context.copy().run(self._run, args, kwargs)
            finally:
                if drawn is not None:
                    rng.leave(drawn)
                if modes is not None:
                    function_modes.leave(modes)
                if casts is not None:
                    autocast.leave(casts)
        finally:
            stack.innermost, frame.recomputing = innermost, recomputing
            context.resume()
        return [self._result(results, index, frame) for index in range(len(self.slots))]

    def _run(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Runs forward as autograd does; returns what it returned and what it saved."""
        function = self.operator
        ctx = _Ctx(function, self.needs_input_grad)
        if has_setup_context(function):
            output = function.forward(*args, **kwargs)
            function.setup_context(ctx, tuple(args), output)
        else:
            output = function.forward(ctx, *args, **kwargs)
        saved = [tensor for tensor in ctx.to_save or () if tensor is not None]
        return saved, output if isinstance(output, tuple) else (output,)

    def _result(self, results: tuple[Any, Any], index: int, frame: Frame) -> torch.Tensor:
        is_saved, place = self.slots[index]
        saved, returned = results
        found = saved if is_saved else returned
        tensor = found[place] if place < len(found) else None
        layout = self.layouts[index]
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype, tensor.device) != layout:
            shape, dtype, device = layout
            expected = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
            now = describe_tensor(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
            what = f"{'saved' if is_saved else 'returned'} {expected} at place {place}"
            raise self.error(frame, what, now)
        return tensor.detach() if tensor.requires_grad else tensor

    def error(self, frame: Frame, expected: str, found: str) -> DeterminismError:
        """Returns the error for a rerun with other results than forward.

        Args:
            frame: The frame being replayed.
            expected: What forward did, in words.
            found: What the rerun did, in words.
        """
        region = format_path(frame.path)
        return DeterminismError(
            f"region {'/'.join(region)!r}: the forward of the custom function {self.name} runs again for backward, where it "
            f"came to {found}; in the first run it had {expected}. Its results must depend on its arguments, on random numbers "
            "of torch, and on nothing that changes between forward and backward. Pass what changes as an argument.",
            region=region,
            index=-1,
            expected=expected,
            found=found,
        )


def _as_forward(tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    """Returns a tensor which requires grad as forward's did; forward may ask."""
    if tensor.requires_grad == grad:
        return tensor
    return tensor.detach().requires_grad_(grad)
