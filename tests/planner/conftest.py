"""Plans of small models: by operations, and without prices of regions, at which most blocks would be called again."""

from __future__ import annotations

import pytest

from ckpt_hooks import plan_memory
from ckpt_hooks.planner import online, profiling, searching


@pytest.fixture(autouse=True, scope="module")
def free_regions(request):
    """Has plans not depend on times, and regions cost nothing, but for modules of tests that say ``PRICED``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan_memory.__kwdefaults__, "cost", "operations")
        by_times = searching.cost_per_second
        patch.setattr(online, "cost_per_second", lambda *found: None if found[2] is None else by_times(*found))
        if not getattr(request.module, "PRICED", False):
            patch.setattr(profiling, "PRICES", (0.0, 0.0))
        yield
