"""The bytes of reports are those of torch's MemTracker, but for memory that no dispatch mode sees: states of generators."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks.report import saved_tensors_report
from tests.report.models import INPUTS, RUNS, Block, Layer, Net

mem_tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layer", [Layer, Block])
def test_bytes_are_mem_trackers(layer, run):
    torch.manual_seed(0)
    net, x = Net(layer, RUNS[run]), torch.randn(INPUTS[layer])
    tracker = mem_tracker.MemTracker()
    tracker.track_external(net)
    with tracker:
        y = net(x)
    (found,) = tracker.get_tracker_snapshot("current").values()
    activations = sum(nbytes for kind, nbytes in found.items() if "ACT" in str(kind))
    report = saved_tensors_report(y, known=(net, x))
    assert report.added_bytes - report.by_reason.get("random state", 0) + y.nbytes == activations
