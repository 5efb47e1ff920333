"""The bytes of reports are those of the allocator."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks.report import saved_residuals, saved_tensors_report
from tests.measure import allocated
from tests.report.models import INPUTS, RUNS, Net

pytestmark = pytest.mark.usefixtures("no_gc")


def build(layer, run):
    torch.manual_seed(0)
    net, x = Net(layer, RUNS[run]), torch.randn(INPUTS[layer])
    # The first forwards find out which buffers are written to; the graph of the last holds random states.
    return net, x, [net(x) for _ in range(3)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layer", INPUTS)
def test_bytes_are_the_allocators(layer, run):
    net, x, before = build(layer, run)
    torch.manual_seed(1)  # whose state no region holds yet
    y, nbytes = allocated(lambda: net(x))
    live = saved_tensors_report(y, known=(net, x))
    assert live.added_bytes + y.nbytes == nbytes
    torch.manual_seed(2)
    residuals = saved_residuals(net, x)
    assert residuals.added_bytes == live.added_bytes
    assert residuals.by_reason == live.by_reason
    assert residuals.total_bytes == sum(residuals.by_reason.values()) == sum(entry.nbytes for entry in residuals.tensors)
    del before
