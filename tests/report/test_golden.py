"""Reports on models of several kinds in whole."""

from __future__ import annotations

import re

import pytest
import torch

from ckpt_hooks import memory_ledger
from ckpt_hooks.report import saved_residuals, trace
from tests import golden
from tests.report.models import INPUTS, RUNS, Block, Convolution, Net


@pytest.mark.parametrize("run", ["none", "checkpoint", "checkpoint, policy", "region", "region, policy"])
@pytest.mark.parametrize("layer", [Block, Convolution])
def test_what_reports_say(layer, run, monkeypatch):
    """What a step holds at its peak, what each region drops, and what backward gets."""
    monkeypatch.setenv("COLUMNS", "200")
    torch.manual_seed(0)
    net, x = Net(layer, RUNS[run]), torch.randn(INPUTS[layer])
    with trace(operators=True) as traced:
        net(x).backward()
    net.zero_grad()
    torch.rand(1)  # else a region may share the state of the generator with an earlier test
    ledger = memory_ledger(lambda: net(x).backward())
    sizes = [ledger.peak.nbytes, len(ledger.allocations), *ledger.phases]
    texts = [ledger, sizes, traced, saved_residuals(net, x)]
    before = re.compile(r"[\d.]+ KiB(?= in use before| from before)")  # a state of the generator is of an earlier test, or not
    golden.check(f"{layer.__name__}, {run}", before.sub("-", "\n\n".join(map(str, texts))))
