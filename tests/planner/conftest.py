"""Plans of small models: without prices of regions, at which most of their blocks would be called again."""

from __future__ import annotations

import pytest

from ckpt_hooks.planner import profiling


@pytest.fixture(autouse=True, scope="module")
def free_regions(request):
    """Has regions cost nothing, but for modules of tests that say ``PRICED``."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PRICED", False):
            patch.setattr(profiling, "PRICES", (0.0, 0.0))
        yield
