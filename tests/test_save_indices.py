"""``save_indices``: single runs of operators, told by submodule, operator and number."""

from __future__ import annotations

import collections
import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_module, checkpoint_region
from ckpt_hooks.policies import save_indices
from ckpt_hooks.report import Reason
from tests.measure import Watch

aten = torch.ops.aten
ADDMM, TANH, MUL = aten.addmm.default, aten.tanh.default, aten.mul.Tensor


class Inner(nn.Module):
    """A layer called twice, and a scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.linear(x).tanh()) * 2


class Block(nn.Module):
    """Two such layers, with dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = Inner(), nn.Dropout(0.5), Inner()

    def forward(self, x):
        return self.second(self.dropout(self.first(x)).tanh()).sin()


class Kept(Watch):
    """Counts the tensors that policies keep, by operator, and the operators that run again."""

    wants_operators = True

    def __init__(self):
        self.kept, self.again = collections.Counter(), collections.Counter()

    def held(self, region, holdings):
        self.kept["policy"] += sum(one.reason is Reason.POLICY for one in holdings)

    def ran(self, region, operator):
        self.again[operator.name] += operator.in_recompute


FORMS = {
    "function": lambda block, policy: checkpoint(policy=policy)(block),
    "recorded": lambda block, policy: checkpoint_region(policy=policy)(block),
    "module": lambda block, policy: checkpoint_module(block, policy=policy),
    "recorded module": lambda block, policy: checkpoint_module(block, policy=policy, recorded=True),
}
ALL = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def gradients(block, form=None, policy=None, times=1):
    torch.manual_seed(1)
    block = copy.deepcopy(block)
    run = block if form is None else form(block, policy)
    seen, x = Kept(), torch.ones(4, 8, requires_grad=True)
    with seen:
        for _ in range(times):
            run(x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())], seen


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


@ALL
def test_single_runs_are_kept(block, form):
    plain, _ = gradients(block)
    runs = [("first.linear", ADDMM, 1), ("second.linear", ADDMM, 0), ("second", TANH, 0)]
    found, seen = gradients(block, form, save_indices(runs))
    assert all(map(torch.equal, found, plain))
    assert seen.again["aten.addmm.default"] == 2  # of four
    assert seen.again["aten.tanh.default"] == 2
    found, seen = gradients(block, form, save_indices([]))
    assert all(map(torch.equal, found, plain))
    assert seen.again["aten.addmm.default"] == 4
    assert seen.kept["policy"] == 0


@ALL
def test_a_run_that_is_not_expected(block, form):
    policy = save_indices([("second.linear", ADDMM, 0)], counts={("second.linear", ADDMM): 2, ("first.linear", ADDMM): 1})
    plain, _ = gradients(block)
    with pytest.warns(UserWarning, match=r"made for 1 runs of aten.addmm.default in module 'first.linear', but the operator"):
        found, seen = gradients(block, form, policy)
    assert all(map(torch.equal, found, plain))
    assert seen.kept["policy"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(block, form, policy)  # a warning comes once


def test_pickled_compared_and_printed():
    policy = save_indices([("a", ADDMM, 1), ("a", ADDMM, 0), ("", TANH, 3)], counts={("a", ADDMM): 2, ("", TANH): 4})
    copied = pickle.loads(pickle.dumps(policy))
    assert copied == policy == copy.deepcopy(policy)
    assert hash(copied) == hash(policy)
    assert copied != save_indices([("a", ADDMM, 1)])
    assert str(copied) == (
        "<save_indices: keeps the outputs of 3 runs of operators>\n"
        "module    operator            runs kept\n"
        "a         aten.addmm.default  0, 1\n"
        "(itself)  aten.tanh.default   3"
    )
