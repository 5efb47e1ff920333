"""Calling ``checkpoint`` and ``checkpoint_sequential``: what code written for ``torch.utils.checkpoint`` counts on."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

import ckpt_hooks
from ckpt_hooks import checkpoint, checkpoint_sequential, set_checkpoint_debug_enabled
from tests.measure import Calls, Log, as_library

# The reserved keywords of a direct call, with their defaults, as torch 2.14 has them.
RESERVED = {
    "use_reentrant": None,
    "preserve_rng_state": True,
    "context_fn": "noop_context_fn",
    "determinism_check": "default",
    "debug": False,
    "early_stop": True,
    "respect_saved_tensors_hooks": None,
}

TORCH = types.SimpleNamespace(
    checkpoint=functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    checkpoint_sequential=functools.partial(torch.utils.checkpoint.checkpoint_sequential, use_reentrant=False),
    set_checkpoint_early_stop=torch.utils.checkpoint.set_checkpoint_early_stop,
    set_checkpoint_debug_enabled=torch.utils.checkpoint.set_checkpoint_debug_enabled,
)

# torch itself has the curried form since 2.14.
CURRIED = {"ours": checkpoint}
if inspect.signature(torch.utils.checkpoint.checkpoint).parameters["function"].default is None:
    CURRIED["torch"] = TORCH.checkpoint


@pytest.fixture(params=["ours", "torch"])
def api(request: pytest.FixtureRequest) -> Any:
    """This package and torch's, by the names that they share."""
    return ckpt_hooks if request.param == "ours" else TORCH


@pytest.fixture(params=list(CURRIED))
def curry(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``checkpoint`` of each library that has the curried form."""
    return CURRIED[request.param]


@as_library
class Counted:
    """A function that knows how often it began, and how often it came to its end."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.begun = 0
        self.ended = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun += 1
        result = self.function(*args, **kwargs)
        self.ended += 1
        return result


class Noted:
    """A context manager that notes its entering and leaving, and may refuse either or swallow what passes."""

    def __init__(self, name: str, events: list[Any], *, swallow: bool = False, fail_in: str = "") -> None:
        self.name, self.events, self.swallow, self.fail_in = name, events, swallow, fail_in

    def __enter__(self) -> None:
        self.events.append(f"enter {self.name}")
        if self.fail_in == "enter":
            raise OSError(f"no {self.name} today")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.events.append(f"exit {self.name}" + (f" with {error!r}" if isinstance(error, KeyError) else ""))
        if self.fail_in == "exit":
            raise OSError(f"{self.name} does not end")
        return self.swallow


@as_library
class Switch:
    """A function that does one thing first and another thing whenever it is called again."""

    def __init__(self, first: Callable[..., Any], then: Callable[..., Any]) -> None:
        self.first, self.then = first, then
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return (self.first if self.calls == 1 else self.then)(*args, **kwargs)


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (3,)), requires_grad=True)


def sin_cos(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos()


def sin_cos_exp(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().exp()


@checkpoint(name="module level")
def module_level(x: torch.Tensor) -> torch.Tensor:
    """Has a docstring."""
    return x.sin().cos()


# Signatures


def test_a_direct_call_reserves_torchs_keywords_and_no_others() -> None:
    parameters = inspect.signature(checkpoint).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert defaults.pop("context_fn") is ckpt_hooks.noop_context_fn
    assert defaults == {name: default for name, default in RESERVED.items() if name != "context_fn"}


def test_the_installed_torch_reserves_nothing_else() -> None:
    """The keywords and defaults of the torch that is installed are among ours."""
    parameters = inspect.signature(torch.utils.checkpoint.checkpoint).parameters.values()
    theirs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert theirs.pop("context_fn") is torch.utils.checkpoint.noop_context_fn
    assert theirs.items() <= RESERVED.items()


def test_checkpoint_sequential_has_torchs_parameters() -> None:
    """The parameters that may be given by position have torch's names, order and defaults."""
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for f in (checkpoint_sequential, torch.utils.checkpoint.checkpoint_sequential)
    )
    assert ours == theirs


@pytest.mark.parametrize("keyword", ["fn", "args", "kwargs", "self", "contexts", "explain", "options", "check_metadata"])
def test_names_that_the_engine_uses_inside_reach_the_function_too(keyword: str) -> None:
    """No parameter name of a layer below gets in the way, in a direct call or a curried one."""
    seen: list[dict[str, Any]] = Log()

    def fn(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs)
        return x.sin().cos()

    checkpoint(fn, leaf(), **{keyword: 1}).sum().backward()
    checkpoint()(fn)(leaf(), **{keyword: 1}).sum().backward()
    assert seen == [{keyword: 1}] * 4


def test_reserved_keywords_do_not_reach_the_function(impl: Callable[..., Any]) -> None:
    """What ``checkpoint`` takes for itself, the function does not see."""
    seen: list[dict[str, Any]] = Log()

    def fn(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs)
        return x.sin().cos()

    impl(fn, leaf(), preserve_rng_state=False, determinism_check="none", early_stop=False, debug=False).sum().backward()
    assert seen == [{}, {}]


def test_function_may_be_given_by_keyword(impl: Callable[..., Any]) -> None:
    x = leaf()
    assert torch.equal(impl(function=sin_cos, x=x), sin_cos(x))


def test_a_function_without_arguments(impl: Callable[..., Any]) -> None:
    x = leaf()
    fn = Counted(lambda: x.sin().cos())
    impl(fn).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_cos(x).sum(), x)[0])
    assert fn.begun == 2


# Options


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_use_reentrant_none_and_false_say_nothing(use_reentrant: bool | None) -> None:
    """Neither value warns, and both are the same engine."""
    fn = Counted(sin_cos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(fn, leaf(), use_reentrant=use_reentrant).sum().backward()
        checkpoint_sequential([fn, sin_cos], 2, leaf(), use_reentrant=use_reentrant).sum().backward()
    assert (fn.begun, fn.ended) == (4, 2)


def test_determinism_check_none_accepts_other_metadata(impl: Callable[..., Any]) -> None:
    x = leaf()
    fn = Switch(lambda x: x * torch.full((3,), 2.0), lambda x: x * torch.full((1,), 2.0))
    impl(fn, x, determinism_check="none").sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert fn.calls == 2


def test_noop_context_fn_of_either_library_may_be_passed() -> None:
    first, second = ckpt_hooks.noop_context_fn()
    with first, second:
        pass
    for context_fn in (ckpt_hooks.noop_context_fn, torch.utils.checkpoint.noop_context_fn):
        fn = Counted(sin_cos)
        checkpoint(fn, leaf(), context_fn=context_fn).sum().backward()
        assert fn.begun == 2


# The curried form


def test_curried_form_makes_a_region_of_each_call(curry: Callable[..., Any]) -> None:
    fn = Counted(sin_cos)
    wrapped = curry(use_reentrant=False, preserve_rng_state=False)(fn)
    for _ in range(2):
        x = leaf()
        y = wrapped(x)
        assert torch.equal(y, sin_cos(x))
        y.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(sin_cos(x).sum(), x)[0])
    assert (fn.begun, fn.ended) == (4, 2)


def test_name_is_free_for_the_curried_functions_arguments() -> None:
    seen: list[str] = []
    checkpoint(name="region")(lambda x, name: (seen.append(name), x.sin())[1])(leaf(), name="tensor")
    assert seen == ["tensor"]


def test_none_for_a_function_is_the_curried_form(curry: Callable[..., Any]) -> None:
    fn = Counted(sin_cos)
    curry(None, use_reentrant=False)(fn)(leaf()).sum().backward()
    curry(function=None, use_reentrant=False)(fn)(leaf()).sum().backward()
    assert fn.begun == 4


def test_decorated_function_keeps_its_attributes() -> None:
    assert module_level.__name__ == "module_level"
    assert module_level.__qualname__ == "module_level"
    assert module_level.__module__ == __name__
    assert module_level.__doc__ == "Has a docstring."
    assert module_level.__wrapped__(torch.zeros(1)) == 1  # type: ignore[attr-defined]
    assert list(inspect.signature(module_level).parameters) == ["x"]
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_decorator_on_a_method_of_a_plain_class(curry: Callable[..., Any]) -> None:
    class Scaler:
        def __init__(self, factor: float) -> None:
            self.factor = factor
            self.calls = Log()

        @curry(use_reentrant=False)
        def scaled(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
            self.calls.append(1)
            return (x * self.factor + shift).sin().cos()

    one, two = Scaler(2.0), Scaler(3.0)
    x = leaf()
    y = one.scaled(x, shift=1.0) + two.scaled(x)
    y.sum().backward()
    assert torch.equal(y, (x * 2.0 + 1.0).sin().cos() + (x * 3.0).sin().cos())
    assert (len(one.calls), len(two.calls)) == (2, 2)
    assert Scaler.scaled.__name__ == "scaled"


def test_decorator_on_forward_of_a_module(curry: Callable[..., Any]) -> None:
    """A module whose ``forward`` is decorated is a region, with gradients as eager; so is one that inherits it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.sin = Calls(torch.sin)

        @curry(use_reentrant=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sin(self.linear(x)).cos()

    class Deeper(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    for kind, after in ((Block, torch.Tensor.clone), (Deeper, torch.tanh)):
        block = kind()
        x = torch.rand(2, 4)
        y = block(x)
        y.sum().backward()
        expected = after(block.linear(x).sin().cos())
        assert torch.equal(y, expected)
        assert torch.equal(block.linear.weight.grad, torch.autograd.grad(expected.sum(), block.linear.weight)[0])
        assert block.sin.count == 2


def test_decorator_above_staticmethod_and_classmethod(curry: Callable[..., Any]) -> None:
    """``@staticmethod`` and ``@classmethod`` may stand below the decorator, which then keeps their binding."""

    class Functions:
        @curry(use_reentrant=False)
        @staticmethod
        def static(x: torch.Tensor) -> torch.Tensor:
            return x.sin().cos()

        @curry(use_reentrant=False)
        @classmethod
        def of_class(cls, x: torch.Tensor) -> torch.Tensor:
            assert cls is Functions
            return x.sin().cos()

    x = leaf()
    for name in ("static", "of_class"):
        assert torch.equal(getattr(Functions(), name)(x), sin_cos(x))


@pytest.mark.parametrize("function", [torch.sin, nn.Tanh(), Counted(sin_cos)], ids=["builtin", "module", "object"])
def test_a_class_attribute_that_does_not_bind_does_not_bind_when_wrapped(curry: Callable[..., Any], function: Any) -> None:
    class Holder:
        plain = function
        wrapped = curry(use_reentrant=False)(function)

    x = leaf()
    assert torch.equal(Holder().wrapped(x), Holder().plain(x))


def test_deepcopy_of_a_model_with_a_wrapped_part(curry: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(3, 3, bias=False)
            self.call = curry(use_reentrant=False)(self.block)

    model = Model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.block.weight.zero_()
    assert torch.equal(twin.call(torch.ones(1, 3)), torch.zeros(1, 3))


# checkpoint_sequential


def _in_nn_sequential(steps: list[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*steps)


class Step(nn.Module):
    """One function of a sequence, which saves its input and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.run = Calls(lambda x: (x * self.weight).sin())  # a number of the module's own would count forwards alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@pytest.mark.parametrize("kind", [_in_nn_sequential, nn.ModuleList, list, tuple])
@pytest.mark.parametrize(
    ("num_steps", "segments", "num_rerun"),
    [(4, 1, 0), (4, 2, 2), (5, 2, 2), (7, 3, 4), (4, 4, 3), (9, 4, 6), (9, 5, 4), (1, 1, 0), (3, 2, 1)],
)
def test_chunks_are_cut_as_torch_cuts_them(
    api: Any, kind: Callable[..., Any], num_steps: int, segments: int, num_rerun: int
) -> None:
    """All but the last segment are rerun; the last one takes what does not divide evenly and is not a region."""
    steps = [Step() for _ in range(num_steps)]
    x = leaf()
    y = api.checkpoint_sequential(kind(steps), segments, x)
    assert [step.run.count for step in steps] == [1] * num_steps
    y.sum().backward()
    assert [step.run.count for step in steps] == [2] * num_rerun + [1] * (num_steps - num_rerun)

    found = [x.grad, *(step.weight.grad for step in steps)]
    expected = nn.Sequential(*steps)(x)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(expected.sum(), [x, *(step.weight for step in steps)])
    assert all(map(torch.equal, found, gradients))


def test_sequential_of_nothing() -> None:
    """No functions in one segment answer the input; the arithmetic of the cut does not show."""
    x = leaf()
    assert checkpoint_sequential([], 1, x) is x


# context_fn. Where forward raises, torch 2.11 leaves its hooks behind, so those tests are for this package alone.


def test_context_fn_wraps_forward_and_recompute(impl: Callable[..., Any]) -> None:
    events: list[str] = Log()

    def fn(x: torch.Tensor) -> torch.Tensor:
        events.append("fn")
        return x.sin().cos()

    def context_fn() -> Any:
        events.append("context_fn")
        return Noted("forward", events), Noted("recompute", events)

    y = impl(fn, leaf(), context_fn=context_fn)
    assert events == ["context_fn", "enter forward", "fn", "exit forward"]
    events.clear()
    y.sum().backward(retain_graph=True)
    assert events == ["enter recompute", "fn", "exit recompute"]
    y.sum().backward()
    assert events == ["enter recompute", "fn", "exit recompute"] * 2


def test_exception_in_forward_reaches_the_first_context() -> None:
    """``__exit__`` of the first context sees the exception, which then propagates as it is."""
    events: list[str] = []
    error = KeyError("mine")

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.sin()
        raise error

    with pytest.raises(KeyError) as caught:
        checkpoint(fn, leaf(), context_fn=lambda: (Noted("f", events), Noted("r", events)))
    assert caught.value is error
    assert events == ["enter f", "exit f with KeyError('mine')"]


def test_the_suppressed_exception_is_the_cause() -> None:
    error = KeyError("mine")

    def fn(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(RuntimeError, match=r"KeyError\('mine'\)") as caught:
        checkpoint(fn, leaf(), context_fn=lambda: (Noted("f", [], swallow=True), Noted("r", [])))
    assert caught.value.__cause__ is error


def test_a_recompute_context_that_suppresses_everything_does_no_harm() -> None:
    """The signal that stops a recompute early may be swallowed by the second context: every value is there (Rule 8)."""
    x = leaf()
    checkpoint(sin_cos, x, context_fn=lambda: (Noted("f", []), Noted("r", [], swallow=True))).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_cos(x).sum(), x)[0])


@pytest.mark.parametrize("fail_in", ["enter", "exit"])
def test_a_first_context_that_fails(fail_in: str) -> None:
    """What the first context raises propagates, and no hooks stay behind (the autouse fixture looks)."""
    fn = Counted(sin_cos)
    with pytest.raises(OSError, match="f"):
        checkpoint(fn, leaf(), context_fn=lambda: (Noted("f", [], fail_in=fail_in), Noted("r", [])))
    assert fn.begun == (0 if fail_in == "enter" else 1)


def test_a_second_context_that_fails_can_be_tried_again(impl: Callable[..., Any]) -> None:
    """What the second context raises comes out of backward; the frame is as it was."""
    x = leaf()
    second = Noted("r", [], fail_in="enter")
    y = impl(sin_cos, x, context_fn=lambda: (contextlib.nullcontext(), second)).sum()
    with pytest.raises(OSError, match="no r today"):
        torch.autograd.grad(y, x, retain_graph=True)
    second.fail_in = ""
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(sin_cos(x).sum(), x)[0])


# Early stop as a setting


def test_early_stop_setting_is_read_at_forward(api: Any) -> None:
    """What holds where backward runs does not matter."""
    outside, inside = Counted(sin_cos), Counted(sin_cos)
    with api.set_checkpoint_early_stop(False):
        y = api.checkpoint(inside, leaf())
    z = api.checkpoint(outside, leaf())
    with api.set_checkpoint_early_stop(False):
        z.sum().backward()
    y.sum().backward()
    assert inside.ended == 2
    assert outside.ended == 1


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
def test_early_stop_setting_wins_over_the_option(api: Any, setting: bool | None, own: bool) -> None:
    fn = Counted(sin_cos)
    with api.set_checkpoint_early_stop(setting):
        api.checkpoint(fn, leaf(), early_stop=own).sum().backward()
    stops = own if setting is None else setting
    assert fn.ended == (1 if stops else 2)


def test_innermost_early_stop_setting_wins(api: Any) -> None:
    """Blocks nest, None inside False defers to the region, and each setting ends with its block."""
    fns = [Counted(sin_cos) for _ in range(4)]
    with api.set_checkpoint_early_stop(False):
        api.checkpoint(fns[0], leaf()).sum().backward()
        with api.set_checkpoint_early_stop(True):
            api.checkpoint(fns[1], leaf()).sum().backward()
        with api.set_checkpoint_early_stop(None):
            api.checkpoint(fns[2], leaf()).sum().backward()
        api.checkpoint(fns[3], leaf()).sum().backward()
    assert [fn.ended for fn in fns] == [2, 1, 1, 2]


def test_settings_end_with_an_exception(api: Any) -> None:
    for setting in (api.set_checkpoint_early_stop(False), api.set_checkpoint_debug_enabled(True)):
        with pytest.raises(KeyError), setting:
            raise KeyError
    fn = Counted(sin_cos)
    api.checkpoint(fn, leaf()).sum().backward()
    assert fn.ended == 1
    assert "debug=True` to checkpoint" not in message_of_a_divergence(api)


# Debug mode


DEBUG_PHRASE = "You are seeing this error because you passed `debug=True`"


def message_of_a_divergence(api: Any, **options: Any) -> str:
    """What the error says where a rerun leaves out an operator."""
    y = api.checkpoint(Switch(sin_cos_exp, sin_cos), leaf(), **options)
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        y.sum().backward()
    return str(caught.value)


def test_debug_setting_is_read_at_forward() -> None:
    y = checkpoint(Switch(sin_cos_exp, sin_cos), leaf())
    with set_checkpoint_debug_enabled(True), pytest.raises(ckpt_hooks.CheckpointError) as caught:
        y.sum().backward()
    assert DEBUG_PHRASE not in str(caught.value)


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_debug_leaves_no_mode_behind_where_a_context_fails(where: str) -> None:
    """A context that cannot be entered does not leave the operator log switched on."""
    first, second = Noted("f", []), Noted("r", [])
    (first if where == "forward" else second).fail_in = "enter"
    try:
        with pytest.raises(OSError, match="today"):
            checkpoint(sin_cos, leaf(), debug=True, context_fn=lambda: (first, second)).sum().backward()
        left_behind = list(_get_current_dispatch_mode_stack())
    finally:
        while _get_current_dispatch_mode_stack():  # for the sake of the tests that come after
            _pop_mode()
    assert left_behind == []


# Inputs and outputs of all kinds


def test_outputs_are_the_functions_own_objects(impl: Callable[..., Any]) -> None:
    returned = [leaf(), (leaf(),), {"a": object()}]
    assert impl(lambda: returned) is returned


# Functions that are called once


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x + 1, id="add"),
        pytest.param(lambda x: x.reshape(-1).sum(), id="views"),
        pytest.param(lambda x: x, id="identity"),
        pytest.param(lambda x: x * 2.0, id="by a number"),
    ],
)
def test_function_that_saves_nothing_is_never_rerun(impl: Callable[..., Any], function: Callable[..., Any]) -> None:
    fn = Counted(function)
    x = leaf()
    impl(fn, x).sum().backward()
    assert fn.begun == 1
    assert torch.equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


def test_a_function_is_told_that_it_is_rerun() -> None:
    told: list[bool] = Log()
    checkpoint(lambda x: (told.append(ckpt_hooks.is_recomputing()), sin_cos(x))[1], leaf()).sum().backward()
    assert told == [False, True]
    assert not ckpt_hooks.is_recomputing()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_function_is_called_plainly(mode: Callable[[], Any]) -> None:
    """With grad mode off the function runs once, outside of any context, with the caller's own objects."""
    events: list[str] = []
    arguments = [leaf(), [1]]
    seen: list[Any] = []

    def fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.extend([*args, *kwargs.values()])
        return args[0].sin().cos()

    with mode():
        y = checkpoint(fn, *arguments, items=arguments, context_fn=lambda: (Noted("f", events), Noted("r", events)))
        assert not y.requires_grad
        assert torch.equal(y, sin_cos(arguments[0]))
    assert [id(value) for value in seen] == [id(arguments[0]), id(arguments[1]), id(arguments)]
    assert events == []


def test_without_gradients_iterators_are_welcome() -> None:
    """What is called once may read an iterator."""
    with torch.no_grad():
        assert checkpoint(lambda items: sum(items), iter([1, 2])) == 3


# Errors


def test_disabled_saved_tensor_hooks(impl: Callable[..., Any]) -> None:
    """Where hooks are disabled a region raises the message given there, and the function has not run."""
    fn = Counted(sin_cos)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        impl(fn, leaf())
    assert fn.begun == 0
    x = leaf()
    y = impl(fn, x).sum()
    with torch.autograd.graph.disable_saved_tensors_hooks("nor here"), pytest.raises(RuntimeError, match="nor here"):
        y.backward()
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_cos(x).sum(), x)[0])


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jacrev"])
def test_functional_transforms_run_the_function_plainly_with_one_warning(transform: str) -> None:
    fn, entered = Counted(sin_cos), Log()
    contexts = lambda: (Noted("forward", entered), Noted("recompute", entered))  # noqa: E731
    x = torch.rand(4, 3)
    (expected,) = torch.autograd.grad(sin_cos(x.requires_grad_()).sum(), x)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(fn, x, context_fn=contexts).sum() + checkpoint()(fn)(x).sum()

    run = {
        "grad": lambda x: torch.func.grad(twice)(x.detach()),
        "vjp": lambda x: torch.func.vjp(twice, x.detach())[1](torch.ones(()))[0],
        "vmap": lambda x: torch.autograd.grad(torch.vmap(twice)(x).sum(), x)[0],
        "jacrev": lambda x: torch.func.jacrev(twice)(x.detach()),
    }[transform]
    with pytest.warns(UserWarning, match=r"torch\.func") as caught:
        found = run(x)
    assert [warning.filename for warning in caught] == [__file__]
    assert torch.equal(found, expected * 2)
    assert fn.begun == 2
    assert entered == ["enter forward", "exit forward"]
