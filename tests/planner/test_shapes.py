"""Plans in steps of other shapes, in copies of the model, in other processes, and by the switch of Transformers' models."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from ckpt_hooks import BudgetTooSmallError, apply_checkpointing, enable_in_transformers, memory_ledger, plan_memory
from ckpt_hooks.planner import Plan
from tests.fake_transformers import LateLayer, Layer, Model, OfPeft
from tests.measure import CountOps
from tests.planner.models import GPT, after_a_step, as_before, built, same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning:torch")]


def stepping(shape, seed=1):
    ids = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))
    return lambda model: model(ids).backward()


def peak_of(model, step):
    gc.collect()  # garbage from before that is freed in the step would make the peak lower
    with as_before(model):
        return memory_ledger(lambda: step(model)).peak.nbytes


@pytest.fixture
def planned():
    """Returns a GPT, its plan for a shape, and a step of this shape."""
    torch.manual_seed(0)
    model, step = GPT(), stepping((4, 64))
    return model, plan_memory(model, step, 0.5, blocks=["blocks.*"]), step


def test_a_larger_shape_keeps_nothing_and_says_so_once(planned):
    model, plan, step = planned
    other = stepping((2, 96))
    plain = after_a_step(model, other)
    with plan.apply():
        with pytest.warns(UserWarning, match="The plan has measured no step") as said:
            found = [after_a_step(model, step) for step in (other, stepping((8, 8)))]
        assert same(found[0], plain)
    assert [str(one.message).partition(":")[0] for one in said] == [
        "The plan has measured no step in which block 'blocks.0' gets float32[2, 96, 64], or larger tensors"
    ]
    with plan.apply():
        step(model)


def test_a_shape_that_was_added_has_its_own_plan(planned):
    model, plan, step = planned
    other = stepping((4, 96))
    assert peak_of(model, other) > plan.plain_peak
    added = plan.add(other)
    assert plan.others == [added]
    assert (added.budget, added.margin, added.cost) == (plan.budget, plan.margin, plan.cost)
    assert added.recomputed > plan.recomputed
    plain, plain_other = after_a_step(model, step), after_a_step(model, other)
    with plan.apply():
        assert same(after_a_step(model, other), plain_other)
        assert same(after_a_step(model, step), plain)
        assert peak_of(model, other) == added.measured_peak <= plan.budget
        assert peak_of(model, step) == plan.measured_peak
    assert "where blocks.0 gets float32[4, 96, 64]: peak" in str(plan)
    with pytest.raises(BudgetTooSmallError):
        plan.add(stepping((64, 96)))
    assert plan.others == [added]


def test_plans_of_several_shapes_travel(planned):
    model, plan, step = planned
    plan.add(stepping((4, 96)))
    found = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert found == plan
    assert str(found) == str(plan)
    with pytest.raises(ValueError, match=r"Pass a model: `plan.add\(step, model\)`"):
        found.add(step)
    found.add(stepping((4, 32)), model)
    assert len(found.others) == 2
    for one in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with found.apply(one):
            peaks = [peak_of(one, stepping(shape)) for shape in ((4, 64), (4, 96))]
        with plan.apply():
            assert peaks == [peak_of(model, stepping(shape)) for shape in ((4, 64), (4, 96))]


def products(model, step):
    """Returns how many matrix products a step runs."""
    with as_before(model), CountOps() as ops:
        step(model)
    return ops.counts["addmm"] + ops.counts["mm"]


def test_smaller_shapes_go_by_the_smallest_plan_that_holds_them(planned):
    model, plan, step = planned
    steps = {shape: stepping(shape) for shape in ((2, 64), (4, 32), (1, 7), (4, 48))}
    plain = {shape: after_a_step(model, one) for shape, one in steps.items()}
    with apply_checkpointing(model, ["blocks.*"], recorded=True, replay_whole=False):
        nothing = products(model, step)
    with plan.apply(), warnings.catch_warnings():
        warnings.simplefilter("error")
        number, gradients = products(model, step), sum(one.nbytes for one in model.parameters())
        assert number < nothing
        for shape, one in steps.items():
            assert same(after_a_step(model, one), plain[shape])
            assert products(model, one) == number
            part = shape[0] * shape[1] / 256
            assert peak_of(model, one) <= plan.budget * part + gradients * (1 - part)  # which do not get smaller
    plan.add(stepping((4, 128)))  # of which less is kept
    added = plan.others[0].recomputed
    assert added > plan.recomputed
    with plan.apply():
        assert products(model, steps[4, 48]) == number < products(model, stepping((4, 100)))


class ByKeyword(torch.nn.Module):
    """Calls its blocks with keywords."""

    class Block(torch.nn.Module):
        """A layer."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, *, x):
            return self.linear(x.sin()).tanh()

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(ByKeyword.Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x=x)
        return x.sum()


def test_shapes_of_keywords():
    torch.manual_seed(0)
    model = ByKeyword()
    steps = [lambda model, rows=rows: model(torch.ones(rows, 64)).backward() for rows in (512, 768)]
    plan = plan_memory(model, steps[0], 0.5, blocks=ByKeyword.Block)
    plain = after_a_step(model, steps[1])
    with plan.apply():
        after_a_step(model, steps[0])
        with pytest.warns(UserWarning, match=r"no step in which block 'blocks\.0' gets float32\[768, 64\]"):
            found = after_a_step(model, steps[1])
    assert same(found, plain)


PROGRAM = """
import json, pathlib, sys, torch
from ckpt_hooks import memory_ledger
from ckpt_hooks.planner import Plan
from tests.planner.models import built

torch.set_num_threads(1)
model, step, _ = built("gpt")
with Plan.from_json(json.loads(pathlib.Path(sys.argv[1]).read_text())).apply(model):
    print(memory_ledger(lambda: step(model)).peak.nbytes)
    print(sum(float(one.grad.double().abs().sum()) for one in model.parameters()).hex())
"""


def test_a_plan_from_a_file_in_another_process_is_the_same(tmp_path):
    model, step, blocks = built("gpt")
    plan = plan_memory(model, step, 0.5, blocks=blocks)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path)], check=True, capture_output=True, text=True
    )
    step(model)  # the same seed, so the same parameters and dropout
    total = sum(float(one.grad.double().abs().sum()) for one in model.parameters())
    assert [line for line in found.stdout.split() if line[:1].isdigit() or line[:2] == "0x"][-2:] == [
        str(plan.measured_peak),
        total.hex(),
    ]


def test_copies_of_a_planned_model_go_by_the_plan(planned):
    model, plan, step = planned
    with plan.apply():
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for one in copies:
        assert peak_of(one, step) == plan.measured_peak


def test_calls_without_gradients_are_plain(planned):
    model, plan, _ = planned
    ids = torch.randint(0, 50, (1, 8))
    with plan.apply(), torch.no_grad():
        found = model.eval()(ids)
    with torch.no_grad():
        assert torch.equal(found, model(ids))


def test_a_margin_is_left_free():
    model, step, blocks = built("gpt")
    tight, loose = (plan_memory(model, step, 0.5, blocks=blocks, margin=margin) for margin in (0.0, 0.1))
    assert tight.budget == loose.budget
    assert loose.measured_peak <= 0.9 * loose.budget < tight.measured_peak
    with pytest.raises(BudgetTooSmallError, match=r"bytes, of which margin leaves 10.0% free: the least peak is") as caught:
        plan_memory(model, step, tight.least_peak, blocks=blocks, margin=0.1)
    found = plan_memory(model, step, caught.value.minimum, blocks=blocks, margin=0.1)
    assert found.measured_peak <= 0.9 * found.budget


# By the switch of Transformers' models


class Wide(Model):
    """A model large enough to plan."""

    def __init__(self, kind=Layer):
        super().__init__(kind=kind)
        self.embedding = torch.nn.Embedding(6, 64)
        for layer in self.layers:
            layer.linear = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


class Peft(OfPeft):
    """A model of PEFT that can be called."""

    def forward(self, ids):
        return self.base_model(ids)


def stepping_layers(length=32):
    ids = torch.arange(16 * length).reshape(16, length) % 6
    return lambda model: model(ids).sum().backward()


@pytest.mark.parametrize("make", [Wide, lambda: Peft(Wide()), lambda: Wide(LateLayer)])
def test_the_switch_of_a_model_goes_by_a_plan(make):
    torch.manual_seed(0)
    model, step = make(), stepping_layers()
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    assert len(names) == 5
    plan = plan_memory(model, step, 0.5, blocks=names[:4])
    least = -5056 if sys.version_info < (3, 11) else 0  # there the measured step may share the state of an earlier step
    plain, peak = after_a_step(model, step), peak_of(model, step)
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    with enable_in_transformers(model, plan=plan) as handle:
        assert [name.rpartition("layers.")[2] for name in handle.regions] == ["0", "1", "2", "3"]
        assert same(after_a_step(model, step), plain)
        assert least <= plan.measured_peak - peak_of(model, step) <= 5056  # the state of a generator
        assert plan.measured_peak < peak
        with pytest.warns(UserWarning, match="The plan has measured no step"):
            found = after_a_step(model, stepping_layers(40))
    assert {name: {**vars(module)} for name, module in model.named_modules()} == before
    assert same(found, after_a_step(model, stepping_layers(40)))


def test_a_handle_of_a_budget_prints_its_plan():
    torch.manual_seed(0)
    model, step = Wide(), stepping_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with enable_in_transformers(model, memory_budget=0.5) as handle:
        assert str(handle).startswith("Wide, 5 regions\n")
        for _ in range(2):
            step(model)
            optimizer.step()
        assert (str(handle), handle.plan.is_measured) == (f"Wide, {handle.plan}", True)


def test_runs_are_named_in_the_module_that_is_given():
    from ckpt_hooks import checkpoint_region
    from ckpt_hooks.policies import save_indices

    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    outer = torch.nn.Sequential(block)
    kept = []
    for root in (block, outer):
        policy = save_indices([("0", torch.ops.aten.addmm.default, 0)], root=root)
        assert policy == pickle.loads(pickle.dumps(policy))
        with checkpoint_region(policy=policy) as region:
            y = outer(torch.ones(2, 4, requires_grad=True))
        kept.append([one.reason.value for one in region.kept()].count("policy"))
        del y
    assert kept == [1, 0]
