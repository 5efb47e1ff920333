"""Runs of a program whose functions are called in recorded regions, for where those differ from function frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_hooks import checkpoint, checkpoint_region
from tests.behaviours.runs import Run


class Recorded(Run):
    """Calls functions in recorded regions: one, one in another, or one in a function frame (``"inside"``)."""

    def __init__(self, form: str = "region", **options: Any) -> None:
        super().__init__("ours", form, **options)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.form == "inside":
            return checkpoint(lambda *args, **kwargs: self._region(function, *args, **kwargs), *args, **kwargs)
        return super().__call__(function, *args, **kwargs)

    def _region(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with checkpoint_region(**self._options):
            return function(*args, **kwargs)

    def having(self, **options: Any) -> Run:
        """Returns a run with options of ``checkpoint_region``."""
        return Recorded(self.form, **self._options, **options)

    def selecting(self, policy: Any, **options: Any) -> Run:
        """Returns a run whose regions have a policy."""
        return self.having(policy=policy, **options)


def runs(*forms: str, torch_fails: type[BaseException] | tuple[type[BaseException], ...] | None = None) -> pytest.MarkDecorator:
    """Parametrises a test over recorded regions in some forms, and torch's checkpoint.

    Args:
        *forms: ``"region"``, ``"nested"`` or ``"inside"``; the first two if none are given.
        torch_fails: How torch's run fails. None: it passes.
    """
    marks = () if torch_fails is None else pytest.mark.xfail(raises=torch_fails, strict=True)
    return pytest.mark.parametrize(
        "run",
        [
            *(pytest.param(Recorded(form), id=f"recorded-{form}") for form in forms or ("region", "nested")),
            pytest.param(Run("torch"), id="torch", marks=marks),
        ],
    )
