"""Ranges of the profiler."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["profiler_range"]

# A named range of the profiler, as a context manager: without an operator, which dispatch modes would see, and in a tenth of
# the time of ``torch.profiler.record_function``. 2.11 to 2.15. Goes with a public way.
profiler_range: Any = torch._C._profiler._RecordFunctionFast
