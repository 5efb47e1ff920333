"""Recurrent modules with dropout, whose masks cuDNN takes from a state of its own, seeded by the generator at times."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from ckpt_hooks import checkpoint
from tests.cuda.device import DEVICE, WAYS, differing, each, eager, needs_cuda, outcome, tensor

pytestmark = needs_cuda

MODULES = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def seeding_anew(function, *args):
    """Runs a function when the generator's state was set to what it is, whereupon cuDNN seeds its own state anew."""
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    return function(*args)


def program_of(kind, *, regions=2, steps=2):
    """Returns a program of several steps through regions, each with a recurrent module and a dropout after it.

    A seed begins each step: what a recompute sets the generator to has cuDNN seed anew in the next one.
    """

    def program(run):
        modules = [MODULES[kind](64, 64, 2, dropout=0.5).to(DEVICE) for _ in range(regions)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        found = []
        for number in range(steps):
            torch.manual_seed(number)
            x = y = tensor(16, 8, 64)
            for module in modules:
                y = run(lambda y, module=module: F.dropout(module(y)[0], 0.3), y)
            found += [y, *grad(y.square().sum(), [x, *parameters])]
        return found

    return program


@pytest.mark.parametrize("kind", MODULES)
@each(WAYS)
def test_both_runs_draw_one_mask(run, kind):
    """Gradients are those of the program as it is, or of the one that sets the generator's state as each region begins."""
    program = program_of(kind)
    expected = [outcome(program, way)[:-2] for way in (eager, seeding_anew)]
    if any(differing(outcome(program, way)[:-2], one) for way, one in zip((eager, seeding_anew), expected, strict=True)):
        pytest.skip("without regions the program differs from run to run on this device")
    found = outcome(program, run)[:-2]
    assert [] in [differing(found, one) for one in expected]


def test_regions_without_one_leave_it_alone():
    """The backward of a region that draws nothing does not have the next recurrent module seed anew."""
    lstm, x = nn.LSTM(64, 64, 2, dropout=0.5).to(DEVICE), tensor(16, 8, 64)

    def program(run):
        found = []
        for _ in range(3):
            found.append(lstm(x.detach())[0])
            found += grad(run(lambda x: x.sin().exp(), x).sum(), x)
        return found

    expected = outcome(program, eager)
    assert differing(outcome(program, eager), expected) == []
    for run in (checkpoint, WAYS["region"]):
        assert differing(outcome(program, run), expected) == []
