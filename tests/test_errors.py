"""The exceptions: who catches which, what they say, and that they can be kept and sent around."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import ckpt_hooks.errors
from ckpt_hooks import CheckpointError, DeterminismError, GraphExecGroup, InternalError, MutationError, OverlapError, checkpoint
from tests.measure import as_library


class CustomError(DeterminismError):
    """An error of somebody else's, with a field more."""

    def __init__(self, message: str, *, extra: int, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.extra = extra


ERRORS: dict[str, CheckpointError] = {
    "CheckpointError": CheckpointError("plain"),
    "CheckpointError with a region": CheckpointError("plain", region=("a", "b")),
    "DeterminismError": DeterminismError("differs", region=("a",), index=3, expected="float32[3] on cpu", found="2 tensors"),
    "MutationError": MutationError("changed", region=("a",), tensor="args[1]['mask']", expected=0, found=2),
    "OverlapError": OverlapError("twice", region=("a",)),
    "InternalError": InternalError("a bug"),
    "a subclass": CustomError("more", extra=7, region=(), index=0, expected="1", found="2"),
}


@pytest.fixture(params=list(ERRORS))
def error(request: pytest.FixtureRequest) -> CheckpointError:
    """One error of each kind."""
    return ERRORS[request.param]


@as_library
class Switch:
    """A function that does one thing first and another thing whenever it is called again."""

    def __init__(self, first: Callable[..., Any], then: Callable[..., Any]) -> None:
        self.first, self.then = first, then
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return (self.first if self.calls == 1 else self.then)(*args)


def leaf() -> torch.Tensor:
    return torch.rand(3, requires_grad=True)


def fails_with(kind: type[CheckpointError], run: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        run()
    assert type(caught.value) is kind
    return caught.value


def too_few(**options: Any) -> Any:
    fn = Switch(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos())
    return fails_with(DeterminismError, lambda: checkpoint(fn, leaf(), **options).sum().backward())


def too_many() -> Any:
    fn = Switch(lambda x: x.sin().cos(), lambda x: x.sin().cos().exp().tan())
    return fails_with(DeterminismError, lambda: checkpoint(fn, leaf(), early_stop=False).sum().backward())


def another_shape() -> Any:
    fn = Switch(lambda x: x.sin().cos().exp(), lambda x: x[:2].double().sin().cos().exp())
    return fails_with(DeterminismError, lambda: checkpoint(fn, leaf()).sum().backward())


def mutated() -> Any:
    mask = torch.ones(3)
    y = checkpoint(lambda x, mask: (x * mask).sin().cos(), leaf(), mask)
    mask.zero_()
    return fails_with(MutationError, lambda: y.sum().backward())


def overlapping() -> Any:
    x = leaf()
    y = checkpoint(lambda x: x.sin().cos(), x)
    with GraphExecGroup():
        y.sum().backward(retain_graph=True)
        return fails_with(OverlapError, lambda: y.sum().backward())


FAILURES = [too_few, too_many, another_shape, mutated, overlapping]


# The tree


def test_the_tree_of_exceptions() -> None:
    """Each class has one base: torch's ``CheckpointError`` for ours, ours for the rest."""
    assert CheckpointError.__bases__ == (torch.utils.checkpoint.CheckpointError,)
    assert torch.utils.checkpoint.CheckpointError.__bases__ == (RuntimeError,)
    for kind in (DeterminismError, MutationError, OverlapError, InternalError):
        assert kind.__bases__ == (CheckpointError,)


def test_every_public_exception_is_exported_and_in_the_docstrings_tree() -> None:
    """The module's names are the package's, and its docstring shows them all."""
    names = ckpt_hooks.errors.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(ckpt_hooks, name) is getattr(ckpt_hooks.errors, name)
        assert name in ckpt_hooks.__all__
        assert f"── {name}  " in (ckpt_hooks.errors.__doc__ or "")


@pytest.mark.parametrize("failure", FAILURES)
def test_torchs_class_catches_what_goes_wrong(failure: Callable[[], CheckpointError]) -> None:
    """Code that catches ``torch.utils.checkpoint.CheckpointError``, or ``RuntimeError``, catches ours."""
    error = failure()
    assert isinstance(error, torch.utils.checkpoint.CheckpointError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, CheckpointError)


def test_torchs_own_error_is_not_ours() -> None:
    """The converse does not hold: ours is the narrower class."""
    assert not isinstance(torch.utils.checkpoint.CheckpointError("theirs"), CheckpointError)


@pytest.mark.parametrize("mistake", [{"use_reentrant": True}, {"determinism_check": "x"}, {"context_fn": lambda: None}])
def test_mistakes_of_the_caller_are_no_checkpoint_errors(mistake: dict[str, Any]) -> None:
    """A wrong option is a ``ValueError`` or a ``TypeError``."""
    with pytest.raises((ValueError, TypeError)) as caught:
        checkpoint(torch.sin, leaf(), **mistake)
    assert not isinstance(caught.value, RuntimeError)


# Fields


def test_fields_may_be_given_by_name_only() -> None:
    """The message is the one positional argument."""
    with pytest.raises(TypeError):
        CheckpointError("message", ("region",))  # type: ignore[misc]
    assert CheckpointError("message").region == ()
    assert CheckpointError("message").args == ("message",)


def test_fields_where_the_rerun_saved_too_few() -> None:
    """``index`` is the number of tensors that the rerun saved."""
    error = too_few()
    assert (error.index, error.expected, error.found) == (2, "3 tensors", "2 tensors")


def test_fields_where_the_rerun_saved_too_many() -> None:
    """``index`` is the position of the first tensor that forward did not save."""
    error = too_many()
    assert (error.index, error.expected, error.found) == (2, "2 tensors", "3 tensors or more")


def test_fields_where_metadata_differ() -> None:
    """``index`` is the position of the first tensor that differs, with what was expected and found there."""
    error = another_shape()
    assert (error.expected, error.found) == ("float32[3] on cpu", "float64[2] on cpu")
    assert f"tensor at position {error.index}:" in str(error)


def test_fields_where_an_input_was_mutated() -> None:
    """``tensor`` says where the tensor stands; versions are numbers."""
    error = mutated()
    assert (error.tensor, error.expected, error.found) == ("args[1]", 0, 1)


@pytest.mark.parametrize("failure", FAILURES)
def test_region_is_the_path_of_the_region_that_failed(failure: Callable[[], CheckpointError]) -> None:
    """``region`` names the region, and so does the message."""
    error = failure()
    assert len(error.region) == 1
    assert isinstance(error.region[0], str)
    assert repr(error.region[0]) in str(error)


def test_region_of_a_nested_region_has_all_names_outermost_first() -> None:
    """``region`` is the way from the outermost region to the one that failed."""
    inner = checkpoint(name="inner")(Switch(lambda x: x.sin().cos().exp(), lambda x: x.sin().cos()))
    y = checkpoint(name="outer")(lambda x: inner(x * 2).tan())(leaf())
    error = fails_with(DeterminismError, lambda: y.sum().backward())
    assert error.region == ("outer", "inner")
    assert "'outer/inner'" in str(error)


def test_region_of_a_function_in_a_partial_is_the_functions() -> None:
    """A partial lends a region no name: the function in it does."""

    def block(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sin().cos()

    mask = torch.ones(3)
    y = checkpoint(functools.partial(block, mask=mask), leaf())
    mask.zero_()
    error = fails_with(MutationError, lambda: y.sum().backward())
    assert error.region == (block.__qualname__,)


@pytest.mark.parametrize("failure", [too_few, too_many, another_shape])
def test_message_of_a_determinism_error_has_numbers_and_the_fix(failure: Callable[[], DeterminismError]) -> None:
    """What was expected, what was found, and what to do."""
    error = failure()
    for part in (error.expected.split()[0], error.found.split()[0] if failure is not too_many else "", "debug=True"):
        assert part in str(error)


# Keeping and sending


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_message_and_fields(error: CheckpointError, protocol: int) -> None:
    """An error that a worker process raised arrives as it was."""
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args
    assert vars(back) == vars(error)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_copying_keeps_type_message_and_fields(error: CheckpointError, copier: Callable[[Any], Any]) -> None:
    """An error can be copied."""
    back = copier(error)
    assert back is not error
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_notes_are_sent_along() -> None:
    """Notes that were added to an error are pickled with it."""
    error = CheckpointError("message")
    error.__notes__ = ["a note"]  # what ``add_note`` does, which Python 3.10 does not have
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["a note"]


@pytest.mark.parametrize("failure", [*FAILURES, lambda: too_few(debug=True)])
def test_errors_that_happened_can_be_pickled(failure: Callable[[], CheckpointError]) -> None:
    """Errors as the runtime raises them, too."""
    error = failure()
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def without_tracebacks(error: BaseException) -> BaseException:
    """The error, and those that led to it, without the frames that they passed: those hold whatever their functions do."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


@pytest.mark.parametrize("failure", [*FAILURES, lambda: too_few(debug=True)])
def test_no_tensor_can_be_reached_from_an_error(failure: Callable[[], CheckpointError]) -> None:
    """An error that is kept keeps no activation: neither fields nor causes nor anything in them is or holds a tensor."""
    todo: list[Any] = [without_tracebacks(failure())]
    seen: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType):
            continue
        seen[id(value)] = value
        todo += gc.get_referents(value)
    assert not [value for value in seen.values() if isinstance(value, torch.Tensor)]
    assert len(seen) < 100


@pytest.mark.parametrize("failure", [*FAILURES, lambda: too_few(debug=True)])
def test_fields_are_plain_values(failure: Callable[[], CheckpointError]) -> None:
    """Fields are strings, numbers and tuples of strings, which any log can take."""
    for value in vars(failure()).values():
        names = value if isinstance(value, tuple) else ()
        assert isinstance(value, str | int | tuple | None)
        assert all(isinstance(name, str) for name in names)


def test_an_error_of_a_region_that_brings_back_arguments_of_another_is_told_once():
    """The inner region asks the outer one for its input, which fails: the tensor is one of the outer region's operators."""
    shorter = threading.Event()

    def outer(x: torch.Tensor) -> torch.Tensor:
        h = (x[:2] if shorter.is_set() else x).sin().tan()
        return checkpoint(name="inner")(lambda h: h.cos().exp())(h)

    y = checkpoint(name="outer")(outer)(torch.ones(3, requires_grad=True))
    shorter.set()
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.grad_fn) == (("outer",), "TanBackward0")
    assert str(caught.value).count("was saved by") == 1
