"""Function regions, however they come about: by ``checkpoint``, one in another, and by ``apply_checkpointing``."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from torch import nn

from ckpt_hooks import apply_checkpointing, checkpoint
from tests.behaviours.recorded import Recorded
from tests.behaviours.runs import Run


class Applied(Run):
    """Makes a module a region before its first call; a function is called as one."""

    def __init__(self) -> None:
        super().__init__("ours", "applied")
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(function, nn.Module):
            return checkpoint(function, *args, **kwargs)
        if function not in self._modules:
            apply_checkpointing(function, lambda _, module: module is function)
            self._modules.add(function)
        return function(*args, **kwargs)


FUNCTION_REGIONS = {"region": Run("ours"), "nested": Run("ours", "nested"), "applied": Applied()}
RECORDED_REGIONS = {"recorded": Recorded(), "recorded inside": Recorded("inside")}
ALL_REGIONS = {**FUNCTION_REGIONS, **RECORDED_REGIONS}


def in_regions(**regions: Run) -> pytest.MarkDecorator:
    """Parametrises a test over runs."""
    return pytest.mark.parametrize("run", regions.values(), ids=regions)


function_regions = in_regions(**FUNCTION_REGIONS)
all_regions = in_regions(**ALL_REGIONS)
