"""Reports on models of several kinds in whole."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

from ckpt_hooks import DeterminismError, checkpoint, is_recomputing, memory_ledger
from ckpt_hooks.report import saved_residuals, trace
from tests import golden
from tests.fuzz.features import parse
from tests.fuzz.generate import generate
from tests.fuzz.implementations import IMPLEMENTATIONS
from tests.fuzz.observe import observe
from tests.fuzz.scripts import load
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
    gc.collect()
    torch.rand(1)  # else a region may share the state of the generator with an earlier test
    ledger = memory_ledger(lambda: net(x).backward())
    sizes = [ledger.peak.nbytes, len(ledger.allocations), *ledger.phases]
    texts = [ledger, sizes, traced, saved_residuals(net, x)]
    before = re.compile(r"[\d.]+ [KM]?i?B(?= in use before| from before)")  # which earlier tests may hold
    golden.check(f"{layer.__name__}, {run}", before.sub("-", "\n\n".join(map(str, texts))))


class Turning(nn.Module):
    """Recomputes something else: another shape, another value of an argument, or fewer operators."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        again = is_recomputing()
        x = self.linear(x).softmax(-1 if not again or self.how != "argument" else 0)
        rows = torch.cat([x[:1], x[1:3]]) if again and self.how == "shape" else x
        best = rows.topk(2, dim=1, largest=True).values
        return best.sin() if again and self.how == "fewer" else (best.exp() * x.sum(1, keepdim=True)[: len(best)]).sin()


@pytest.mark.parametrize("how", ["shape", "argument", "fewer"])
def test_what_debug_mode_says(how):
    """The first operator that differs, with both logs."""
    torch.manual_seed(0)
    model = nn.Sequential(Turning(how), nn.Tanh())
    y = checkpoint(debug=True, name="odd", determinism_check="values")(model)(torch.randn(4, 4, requires_grad=True))
    with pytest.raises(DeterminismError) as caught:
        y.sum().backward()
    error = caught.value
    texts = [error, *error.operators, "", *error.recomputed_operators, "", error.expected, error.found, error.index]
    golden.check(f"debug, {how}", "\n".join(map(str, texts)))


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions of torch run other operators")
@pytest.mark.parametrize("name", ["ours", "ours-region", "ours-mixed", "ours-selective"])
def test_what_random_programs_keep(name):
    """The bytes that regions drop and hold, by reason, and the operators that run again: equal results may cost more."""
    chosen, texts = parse("core", name) - {"inference"}, []
    for seed in range(20):
        function = load(generate(seed, chosen).source(), seed)
        with trace(operators=True) as traced:
            observe(function, IMPLEMENTATIONS[name].start())
        (step,) = traced.steps
        sizes = [f"{reason} {nbytes}" for reason, nbytes in sorted(step.held_bytes.items()) if nbytes]
        counts = sum(1 for _ in step.walk()), step.recomputes, step.operators, step.recomputed_operators, step.dropped_bytes
        texts.append(f"{seed}: {counts}, {', '.join(sizes)}")
    gc.collect()
    golden.check(f"programs, {name}", "\n".join(texts))
