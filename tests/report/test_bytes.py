"""The bytes of reports are those of the allocator."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks.report import saved_residuals, saved_tensors_report, trace
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
    assert live.dropped_bytes >= residuals.dropped_bytes
    del before


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layer", INPUTS)
def test_all_reports_agree_on_what_is_dropped_and_held(layer, run):
    net, x, before = build(layer, run)
    torch.manual_seed(1)
    with trace() as found:
        y = net(x)
    live = saved_tensors_report(y, known=(net, x))
    torch.manual_seed(2)
    residuals = saved_residuals(net, x)
    y.backward()
    steps = [step for step in found.steps if step.regions]
    assert bool(steps) == (run != "none")
    assert live.is_dropped_exact
    assert residuals.is_dropped_exact
    assert {live.dropped_bytes, residuals.dropped_bytes} == {sum(step.dropped_bytes for step in found.steps)}
    assert live.by_reason == residuals.by_reason
    held = dict(steps[0].held_bytes) if steps else {}
    # A trace knows no arguments, and says that a region holds them.
    of_regions = {reason: nbytes for reason, nbytes in live.by_reason.items() if reason not in ("parameter", "saved")}
    inputs = sum(of_regions.pop(reason, 0) for reason in ("argument", "outside", "region input"))
    assert steps == [] or (inputs, of_regions) == (held.pop("region input", 0) + held.pop("state", 0), held)
    del before
