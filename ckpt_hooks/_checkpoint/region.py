"""``checkpoint_region``: checkpointing as a ``with`` block, by recording what runs in it."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Never, ParamSpec, Self

from ckpt_hooks._core.frame import stack
from ckpt_hooks._core.holdings import Holding
from ckpt_hooks._core.hooks import ThreadMark, close, mark_thread, rewind
from ckpt_hooks._core.misuse import (
    UNRUN,
    Misuse,
    NeedsParentheses,
    check_curried,
    check_is,
    check_runs,
    described_as,
    name_of_callable,
    refuse_unrun,
    unknown_error,
    warn_of_transform,
    wrong,
)
from ckpt_hooks._core.self_check import place_of_line
from ckpt_hooks._core.settings import self_check
from ckpt_hooks._options import Form, is_policy, options_from, options_of
from ckpt_hooks._recorded.frame import Externals, RecordedFrame, held_in_graph
from ckpt_hooks._recorded.traced_regions import traced_name, traced_region, warn_of_instance
from ckpt_hooks._tensors.nested import leaf_tensors_in
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks._torch.modes import is_any_transform_active, is_traced, num_dispatch_modes, num_function_modes

if TYPE_CHECKING:
    from ckpt_hooks.policies.base import PolicyLike

__all__ = ["checkpoint_name", "checkpoint_region"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_OPTIONS = options_of(Form.RECORDED)


class _Entrance(weakref.ref[Any]):
    """An entry into a region: a weak reference to the ``__exit__`` object of a ``with`` statement."""

    # If Ctrl-C comes after the block but before the call of ``__exit__``, Python drops the ``__exit__`` object without a call.
    # Then only the callback of this weak reference (``_died``) shows that the region has ended.
    __slots__ = ("frame", "is_left", "mark", "opened", "region")

    frame: RecordedFrame | None  # None if the region runs plainly or has ended
    is_left: bool  # whether the program has left the region; regions inside it may still be open
    mark: ThreadMark  # the thread's state before the entry
    opened: list[_Entrance] | None  # the open regions of the thread that entered; None before the entry
    region: checkpoint_region

    def is_open(self) -> bool:
        return hasattr(self.frame, "release")


class _Entered(threading.local):
    def __init__(self) -> None:
        self.open: list[_Entrance] = []
        self.next: _Entrance | None = None


_entered = _Entered()


@skipped
def _leave(entries: list[_Entrance], kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
    entry, opened = entries[0], _entered.open
    if entry.opened is None:  # a call by hand or by ``ExitStack``, not by a ``with`` statement
        entry = next((other for other in reversed(opened) if other.region is entry.region and not other.is_left), entry)
    frame = entry.frame
    if entry.is_left or entry.opened is not opened:
        _leave_wrongly(entry, error)
    elif frame is not stack.innermost and frame is not None and entry.is_open() and not isinstance(error, KeyboardInterrupt):
        # Regions inside are still open, in another generator or task. This region stays open until the inner regions end,
        # which changes no result. After Ctrl-C it ends now, since the exits of inner regions may have been interrupted.
        entry.is_left, frame.late = True, _leave_late
    else:
        _end(entry, kind, error, traceback)
        if opened and opened[-1].is_left:
            close(error, _leave_late)


def _leave_wrongly(entry: _Entrance, error: BaseException | None) -> None:
    frame, wrong = entry.frame, Misuse.NOT_OPEN
    if entry.opened is not None and not entry.is_left:
        entry.is_left, wrong = True, Misuse.OTHER_THREAD
        if frame is None:
            return
        frame.late = _leave_late
    if error is None:
        raise wrong.error_of((entry.region._name, None) if frame is None else frame.path)


def _leave_late() -> None:
    """Ends regions that the program left while regions inside them were open, once the inner regions have ended."""
    opened = _entered.open
    while opened and (entry := opened[-1]).is_left and (entry.frame is stack.innermost or not entry.is_open()):
        _end(entry, None, None, None)


def _end(entry: _Entrance, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
    frame, opened = entry.frame, _entered.open
    if is_open := entry.is_open():
        assert frame is not None
        try:
            frame.__exit__(kind, error, traceback)
            if error is not None:
                rewind(entry.mark, error)
        except BaseException as another:
            _abandon(entry, another)
            raise
    if opened and opened[-1] is entry:
        opened.pop()
    elif is_open:
        _drop(entry)
    # Else regions that were entered later stay open, and the entry goes with them.
    entry.is_left, entry.frame = True, None  # last: after Ctrl-C above, :func:`_died` takes an entry off that is not left


def _abandon(entry: _Entrance, error: BaseException | None = None) -> None:
    """Ends an open region of this thread, and the regions inside, without their ``__exit__``."""
    if any(other is entry for other in _entered.open):
        rewind(entry.mark, error)
        _drop(entry)


def _died(entry: _Entrance) -> None:
    if not entry.is_left:
        _abandon(entry)


def _drop(entry: _Entrance) -> None:
    """Removes a region, and the regions inside, from this thread's open regions."""
    opened = _entered.open
    position = next((position for position, other in enumerate(opened) if other is entry), len(opened))
    for other in opened[position:]:
        other.frame = None
    del opened[position:]


def _leave_by_hand(
    region: checkpoint_region, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
) -> None:
    """Leaves a region: the function found by ``ExitStack`` and Dynamo as ``__exit__``."""
    if not torch.compiler.is_dynamo_compiling():
        region.__exit__(kind, error, traceback)


class _Leave(functools.partial[None]):
    __func__ = staticmethod(_leave_by_hand)


class _Exit:
    """A descriptor for the ``__exit__`` of regions, which makes a new object for each entry."""

    # Dynamo calls ``__exit__.__func__`` (``torch/_dynamo/variables/ctx_manager.py``, in 2.15 too), so the descriptor poses as a
    # function.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return FunctionType

    def __getattr__(self, name: str) -> Any:
        return getattr(_leave_by_hand, name)

    def __get__(self, region: checkpoint_region | None, owner: type) -> Callable[..., None]:
        if region is None:
            return _leave_by_hand
        entries: list[_Entrance] = []
        leave = _Leave(_leave, entries)
        entry = _Entrance(leave, _died)
        entry.region, entry.frame, entry.opened, entry.is_left = region, None, None, False
        entries.append(entry)
        _entered.next = entry
        return leave


class checkpoint_region(metaclass=NeedsParentheses):  # noqa: N801 -- used like a function
    """Runs a block of code without keeping its activations. Backward replays the operators it needs.

    ::

        with checkpoint_region():               # around any lines of code
            h = block(x)

        @checkpoint_region(policy=dots_saveable)  # or around a function
        def forward(self, x): ...

    The block runs once. The region records each operator below autograd, and backward replays the operators on which saved
    tensors depend. Python code does not run again, so counters, log lines, running statistics and Python's random numbers are
    safe. The forward of a custom ``autograd.Function`` is the exception: it runs again as a whole, and
    :func:`ckpt_hooks.is_recomputing` is then True.

    Cost:
        Forward takes some microseconds more for each operator on a CPU, and two to four times as much for an operator that
        overwrites a tensor which backward needs. Backward runs the replayed operators a second time.

    Kept until the graph is freed:
        - tensors from outside that a replay may read: parameters and other leaves as they are, others through the saved-tensor
          hooks around the region;
        - outputs that the policy names, while a saved tensor depends on them;
        - a random state for each operator that drew; up to 16 small draws in a row on a CPU share a state;
        - memory written by something other than an operator (NumPy, DLPack), or not yet filled (``torch.empty``);
        - results of higher-order operators, compiled code, collectives and tensor subclasses (sparse, ``DTensor``);
        - results of operators with an ordered effect (``torch.library``), unless a policy says MUST_RECOMPUTE;
        - results of a custom ``autograd.Function`` whose forward has effects outside of its arguments, takes objects that
          cannot be inspected, or runs a backward, a region or a collective.

        :meth:`kept` lists all of these.

    Nesting:
        The policy of the innermost region applies to a line. An inner region reads from the replay of the outer one. A region
        object may be entered several times, also by several threads. A region that is left before the regions inside it stays
        open until they are left; results do not change.

    Tracing:
        ``torch.compile`` recomputes by itself and keeps what the policy names; other options have no effect. In an eager block,
        results of compiled code are kept; under ``torch._inductor.config.wrap_inductor_compiled_regions`` such code is an
        operator, ``inductor_compiled_code``, that a policy decides on. Under ``make_fx`` and ``torch.func`` a region keeps
        everything.

    Args:
        policy: What to keep: a policy of :mod:`ckpt_hooks.policies` or its name (``"dots_saveable"``), a list of operators,
            or a function. None keeps nothing.
        name: The region's name in errors.
        respect_saved_tensors_hooks: Whether outputs that the policy keeps pass through the saved-tensor hooks around the
            region. None means True.
        preserve_rng_state: Whether a replay draws the random numbers of forward again. False draws new numbers and reads no
            generator state in forward, as CUDA graph capture requires. The innermost region decides.
        replay_whole: True replays the region once, as soon as backward needs any tensor of it, which is faster. False replays
            for each tensor what it depends on, which needs less memory. None chooses True for regions that saved at most 1 MiB.
            A region that overwrites a tensor after an operator read it is always replayed as a whole.
        offload_inputs: Whether tensors from outside wait for backward in pinned host memory. Moves only tensors of at least 256
            KiB that require grad and are no leaves. Has no effect inside another region or under saved-tensor hooks.
        split_backward: Whether one replay serves two backwards, one for inputs and one for weights, as pipeline schedules run
            them. Keeps each tensor until it was used twice. The outermost of directly nested recorded regions decides.

    Raises:
        CheckpointError: On leaving a region that is not open on this thread.
        TypeError: If ``policy`` is not a policy, or an option has a value of another kind.
        ValueError: If a list of operators has something else in it, or an option is unknown.
        RuntimeError: On entering, if saved-tensor hooks are disabled; or if an operator draws random numbers during CUDA graph
            capture while ``preserve_rng_state`` is True.
        DeterminismError: In backward, if a dispatch mode of the user changed results, or if the self-check finds other values
            than in forward (:func:`ckpt_hooks.set_self_check`).
        MutationError: In backward, if a tensor that a replay needs was modified in place: a tensor from outside, or a kept
            output, after the region; inside the region, a parameter after its ``.data`` was replaced.

    Limits:
        - Not seen: writes by other threads, by ``.data`` after the region, by NumPy after an operator read the memory, and by
          kernels that are no operators, except Triton's and those inside an ``autograd.Function``.
        - Not seen: writes of an ``autograd.Function`` to tensors above 1 MiB that are not its arguments.
        - A backward inside the region keeps what it recomputes until the region ends. ``torch.utils.swap_tensors`` refuses
          tensors that an open region has read.
        - FSDP2: a region may hold several units; each replay gathers and frees their parameters. FSDP1: one region for each
          unit.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_region
        >>> x = torch.ones(2, requires_grad=True)
        >>> with checkpoint_region():
        ...     y = x.sin().cos()
        >>> y.sum().backward()
    """

    if not TYPE_CHECKING:

        @skipped
        def __new__(cls, *misplaced: Never, policy: Any = None, **options: Any) -> Any:
            """Makes a region; under Dynamo, a context manager that Dynamo can trace."""
            if options and (unknown := [name for name in options if name not in _OPTIONS]):
                raise unknown_error(unknown, _OPTIONS, "checkpoint_region")
            if not torch.compiler.is_dynamo_compiling():
                return super().__new__(cls)
            return traced_region(policy, functools.partial(checkpoint_region, policy=policy, **options))

    @skipped
    def __init__(
        self,
        *misplaced: Never,
        policy: PolicyLike | None = None,
        name: str | None = None,
        respect_saved_tensors_hooks: bool | None = None,
        preserve_rng_state: bool = True,
        replay_whole: bool | None = None,
        offload_inputs: bool = False,
        split_backward: bool = False,
    ) -> None:
        if misplaced:
            raise _misplaced_error(misplaced[0])
        self._options = options_from(
            policy=policy,
            name=name,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
            preserve_rng_state=preserve_rng_state,
            replay_whole=replay_whole,
            offload_inputs=offload_inputs,
            split_backward=split_backward,
        )
        self._name = self._options.name or "region"
        self._latest: weakref.ref[RecordedFrame] | None = None
        self._externals: Externals = []  # for ``kept``: the graph may hold external tensors after the frame has died

    @skipped
    def __enter__(self) -> Self:
        if torch.compiler.is_dynamo_compiling():
            warn_of_instance()
            return self
        entry, _entered.next = _entered.next, None
        if entry is None or entry.region is not self or entry() is None:
            entry = _Entrance(self, _died)  # a call by hand or by ``ExitStack``
            entry.region, entry.frame, entry.is_left = self, None, False
        opened = entry.opened = _entered.open
        if opened and opened[-1].is_left:  # another thread left that region, and only this thread can end it
            _leave_late()
        entry.mark = mark_thread()
        opened.append(entry)
        try:
            if torch.is_grad_enabled():
                if is_any_transform_active():
                    warn_of_transform(stacklevel=3)
                elif not ((num_dispatch_modes() or num_function_modes()) and is_traced()):
                    is_checked = self._options.preserve_rng_state and self_check.level
                    place = place_of_line(sys._getframe(1), globals()) if is_checked else None
                    entry.frame = RecordedFrame(self._name, self._options, place=place)
                    entry.frame.__enter__()
                    self._latest, self._externals = weakref.ref(entry.frame), entry.frame.externals
        except BaseException as error:
            _abandon(entry, error)
            raise
        return self

    if TYPE_CHECKING:

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None: ...

    else:
        __exit__ = _Exit()

    def __call__(self, function: Callable[P, R], *others: Never, **named: Never) -> Callable[P, R]:
        """Returns a function whose calls are regions.

        Raises:
            TypeError: If the argument is no function, or a generator or coroutine function, which a call does not run; or if
                there are more arguments.
        """
        check_curried(function, others, named, "checkpoint_region()")
        check_runs(function)

        @skipped
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = self._run(function, args, kwargs)
            return result

        return functools.update_wrapper(run, function, updated=())

    @skipped
    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with traced_region(self._options.policy, lambda: self):
                return function(*args, **kwargs)
        with self:
            result = function(*args, **kwargs)
        if type(result) in UNRUN:
            refuse_unrun(function, result)
        return result

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a model that holds a region leave out its latest forward.
        return {**self.__dict__, "_latest": None, "_externals": []}

    def kept(self) -> list[Holding]:
        """Returns each tensor this region holds for backward, with its size and the reason, as of its latest entry.

        Tensors from outside which autograd saved come first, then others in the order of the operators which made or read
        them, each operator's generator state included. Parameters are left out, and so are tensors of regions inside.

        Returns:
            One :class:`Holding` a tensor: ``reason`` (a :class:`ckpt_hooks.report.Reason`), ``why`` (the reason in more words),
            ``nbytes``, ``storage`` (a number), ``storage_nbytes``, ``shape``, ``dtype``, ``device``, ``description``. Empty
            once backward has freed the graph.
        """
        frame = None if self._latest is None else self._latest()
        return held_in_graph(self._externals, set()) if frame is None else frame.held()


def _misplaced_error(value: Any) -> TypeError:
    advice = "Write `with checkpoint_region():` around the lines that compute it."
    if is_policy(value):
        advice = "For a policy, write `checkpoint_region(policy=...)`."
    elif isinstance(value, str):
        advice = f"To name the region, write `checkpoint_region(name={value!r})`."
    elif callable(value):
        advice = (
            f"Write `with checkpoint_region():` around its call, or `checkpoint_region()({name_of_callable(value)})(*args)`. "
        )
        advice += "A decorator is written with parentheses, `@checkpoint_region()`."
    return TypeError(f"checkpoint_region takes options by name only, but got {described_as(value)}. {advice}")


def checkpoint_name(tensor: T, name: str) -> T:
    """Names a tensor, or each tensor in a container, so that a policy can keep it. Returns the tensor or container.

    Has an effect in recorded regions under a policy of names, such as :func:`ckpt_hooks.policies.save_only_these_names`.

    Args:
        tensor: A tensor, or a list, tuple, dict or dataclass with tensors in it, at any depth.
        name: The name.

    Returns:
        The tensor or container itself; another such container in functions that ``torch.compile`` traces.

    Raises:
        TypeError: If ``tensor`` has no tensor in it, or ``name`` is not a string.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_name, checkpoint_region
        >>> from ckpt_hooks.policies import save_only_these_names
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with checkpoint_region(policy=save_only_these_names("product")):
        ...     y = checkpoint_name(x @ x, "product").sin()
    """
    check_is(name, str, "name", "a string", "Pass a name from the policy, such as 'hidden'.")
    tensors = [tensor] if isinstance(tensor, torch.Tensor) else leaf_tensors_in(tensor)
    if not tensors:
        raise wrong(tensor, "tensor", "a tensor, or a list, tuple, dict or dataclass of tensors", "Pass the tensor to keep.")
    if torch.compiler.is_dynamo_compiling():
        return traced_name(tensor, name)  # type: ignore[no-any-return]
    frame = stack.innermost
    if type(frame) is RecordedFrame:
        for named in tensors:
            frame.name_tensor(named, name)
    return tensor
