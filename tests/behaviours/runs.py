"""Runs of a program: plainly, and with its functions called as regions of one library.

A program is a function of a :class:`Run`, by which it calls functions. It makes whatever it needs itself, and returns what is
to be compared.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # by torch's first region, if not here: that may be one under a fake device, or two on two threads
import torch.utils.checkpoint
from torch.utils._pytree import tree_flatten

import ckpt_hooks

#: How a function becomes a region: in one call, in a region within a region, as first segment of a sequence.
FORMS = ("region", "nested", "sequential")

#: How a test fails where a library goes wrong and says nothing: by a value that is not eager's, by an error that is missing.
SILENT, UNNOTICED = AssertionError, pytest.fail.Exception

_OURS_ALONE = {"name", "preserve_buffers"}


class Run:
    """Calls functions as regions; :data:`plain` just calls them.

    Attributes:
        ours: Whether regions are this package's, not torch's.
        form: One of :data:`FORMS`.
    """

    def __init__(self, library: str, form: str = "region", **options: Any) -> None:
        self.ours = library == "ours"
        self.form = form
        self._library, self._options = library, options

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.form == "region":
            return self._region(function, *args, **kwargs)
        if self.form == "nested":
            return self._region(lambda *args, **kwargs: self._region(function, *args, **kwargs), *args, **kwargs)
        steps = [lambda packed: function(*packed[0], **packed[1]), lambda value: value]
        if len(args) == 1 and not kwargs:
            steps[0] = function
            packed = args[0]
        else:
            packed = args, kwargs
        if self.ours:
            return ckpt_hooks.checkpoint_sequential(steps, 2, packed, **self._options)
        return torch.utils.checkpoint.checkpoint_sequential(steps, 2, packed, use_reentrant=False, **self._options)

    def _region(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._library == "plain":
            return function(*args, **kwargs)
        if self.ours:
            return ckpt_hooks.checkpoint(**self._options)(function)(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **self._options, **kwargs)

    def having(self, **options: Any) -> Run:
        """Returns a run with options; torch's does without those that it lacks."""
        if self._library == "torch":
            options = {name: value for name, value in options.items() if name not in _OURS_ALONE}
            if options.get("determinism_check", "none") != "none":
                del options["determinism_check"]
        return Run(self._library, self.form, **self._options, **options)

    def selecting(self, policy: Any, **options: Any) -> Run:
        """Returns a run whose regions have a selective policy: a function, or a list of operators."""
        if self._library == "plain":
            return self
        library = ckpt_hooks if self.ours else torch.utils.checkpoint
        return self.having(context_fn=functools.partial(library.create_selective_checkpoint_contexts, policy), **options)

    def track_rng(self, source: Any) -> contextlib.AbstractContextManager[Any]:
        """Tells the library of a source of random numbers, for a block; torch takes none."""
        return ckpt_hooks.track_rng(source) if self.ours else contextlib.nullcontext()

    def is_recomputing(self) -> bool:
        """Whether this is a rerun; torch does not say."""
        return self.ours and ckpt_hooks.is_recomputing()

    def group(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the library's ``GraphExecGroup``."""
        return (ckpt_hooks if self.ours else torch.utils.checkpoint).GraphExecGroup()


plain = Run("plain")


def runs(*forms: str, torch_fails: type[BaseException] | tuple[type[BaseException], ...] | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over both libraries, and over forms of regions.

    Args:
        *forms: Some of :data:`FORMS`; the first of them if none are given.
        torch_fails: How torch's runs fail. None: they pass.
    """
    marks = () if torch_fails is None else pytest.mark.xfail(raises=torch_fails, strict=True)
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(Run(library, form), id=f"{library}-{form}", marks=marks if library == "torch" else ())
            for library in ("ours", "torch")
            for form in forms or FORMS[:1]
        ],
    )


def outcome(program: Callable[[Run], Any], run: Run) -> list[Any]:
    """Runs a program from given seeds; returns what it returned, as a flat list, and where it left the streams."""
    torch.manual_seed(1)
    random.seed(1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(1)
    values, structure = tree_flatten(program(run))
    streams = [torch.get_rng_state(), random.getstate()]
    if numpy is not None:
        _, key, *rest = numpy.random.get_state()
        streams.append((key.tobytes(), *rest))
    return [structure, *(value.detach() if isinstance(value, torch.Tensor) else value for value in values), *streams]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors bitwise."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def assert_as_eager(program: Callable[[Run], Any], run: Run) -> None:
    """Asserts that a program comes to the same with regions as without, bit for bit."""
    expected, found = outcome(program, plain), outcome(program, run)
    assert len(found) == len(expected)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def assert_as_eager_or_error(program: Callable[[Run], Any], run: Run, *, naming: str) -> None:
    """Asserts the same, or that an error says what is in the way; ours by name."""
    try:
        assert_as_eager(program, run)
    except RuntimeError as error:
        message = str(error)
    else:
        return
    assert not run.ours or naming in message


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Returns an output, and its gradients after a backward."""
    y.sum().backward()
    return [y, *(x.grad for x in inputs)]
