"""Budgets as an option: plans made from the steps that a program runs anyway, which stay bitwise those of the plain loop."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import logging
import pickle
import subprocess
import sys
import textwrap
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckpt_hooks import BudgetTooSmallError, apply_checkpointing, checkpoint, memory_ledger
from ckpt_hooks.planner import Plan
from ckpt_hooks.report.printing import format_bytes
from tests import golden
from tests.planner.models import GPT, MODELS, same, state_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def ids(count, length=64):
    """Returns tokens, the same for the same sizes."""
    return torch.randint(0, 50, (count, length), generator=torch.Generator().manual_seed(count * 1000 + length))


def gpt(blocks=4):
    torch.manual_seed(0)
    return GPT(blocks)


def peak_of(run):
    """Returns the peak of a part of a program, as torch's profiler has it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = (event for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.fixture(autouse=True, scope="module")
def a_checked_pass():
    """Makes what the self-check makes once in a process: a table of 2 MiB."""
    checkpoint(lambda x: x.sin().exp(), torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("budget", [0.25, 0.75])
@pytest.mark.parametrize("name", ["mlp", "gpt", "layers", "resnet", "unet"])
def test_a_loop_is_bitwise_the_plain_one_and_runs_nothing_for_the_plan(name, budget):
    """Accumulation, a schedule, averages, a generator of its own, an iterator: each batch and each forward is counted."""
    make, data, _ = MODELS[name]

    def train(memory_budget=None):
        torch.manual_seed(0)
        model, like = make(), data()
        generator = torch.Generator().manual_seed(3)
        batches = iter(lambda: like.roll(int(torch.randint(9, (1,), generator=generator)), 0), None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        average = AveragedModel(model)
        calls, peaks, losses = [], [], []
        model.register_forward_hook(lambda *_: calls.append(1))
        applied = None if memory_budget is None else apply_checkpointing(model, memory_budget=memory_budget)
        for number in range(4):
            two = [next(batches) for _ in range(2)]

            def accumulate(two=two):
                for batch in two:
                    loss = model(batch) / 2
                    loss.backward()
                    losses.append(loss.detach())

            if number < 2:
                accumulate()
            else:  # neither profiled nor measured
                peaks.append(peak_of(accumulate))
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            optimizer.zero_grad()
        left = {**state_of(model), **{f"loss {at}": one for at, one in enumerate(losses)}, "own": generator.get_state()}
        return left | {f"average {at}": one for at, one in enumerate(average.parameters())}, len(calls), peaks, applied

    plain, calls, (without, _), _ = train()
    found, calls_under, peaks, applied = train(budget)
    assert same(found, plain)
    assert calls_under == calls == 8
    plan = applied.plan
    assert plan.is_measured
    assert plan.plain_peak == pytest.approx(without, rel=1e-3)
    assert len(applied.peaks) == 2
    assert max(*applied.peaks, *peaks) <= applied.budget == plan.budget
    assert applied.peaks[1] == plan.measured_peak == pytest.approx(plan.predicted_peak, rel=1e-3)
    assert peaks[1] == pytest.approx(plan.measured_peak, rel=1e-3)


def train(model, batches, on, between=lambda number: None, make=torch.optim.SGD):
    """Trains, and returns what is left, and the handle."""
    optimizer = make(model.parameters(), 0.1)
    applied = None if on is None else apply_checkpointing(model, memory_budget=on)
    losses = []
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        loss = model(batch)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between(number)
    return {**state_of(model), **{f"loss {at}": one for at, one in enumerate(losses)}}, applied


def test_the_handle_prints_saves_undoes_and_starts_the_next_run():
    model = gpt()
    forwards = [type(block.forward) for block in model.blocks]
    _, applied = train(model, [], 0.5)
    assert str(applied).startswith("4 blocks, no plan before the first step has ended")
    assert applied.plan is None
    with pytest.raises(ValueError, match="no plan yet"):
        applied.to_json()
    applied.undo()
    assert [type(block.forward) for block in model.blocks] == forwards
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    plain, _ = train(gpt(), [ids(4)] * 3, None)
    found, applied = train(gpt(), [ids(4)] * 3, 0.5)
    assert same(found, plain)
    assert str(applied) == str(applied.plan)
    values = json.loads(json.dumps(applied.to_json()))
    model = gpt()
    again = apply_checkpointing(model, memory_budget=applied.budget, plan=values)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert again.peaks == (applied.peaks[1],)  # measured from the first step on, none of which keeps nothing
    assert again.plan.blocks == Plan.from_json(values).blocks


def test_the_plan_is_chosen_in_the_step_of_the_optimizer(caplog):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    applied = apply_checkpointing(model, memory_budget=1_000_000)
    before = state_of(model)
    model(ids(4)).backward()
    with pytest.raises(BudgetTooSmallError) as raised:
        optimizer.step()
    assert raised.value.minimum > 1_000_000
    assert all(torch.equal(one, before[f"parameter {name}"]) for name, one in model.named_parameters())
    assert not optimizer.state
    applied.undo()
    with caplog.at_level(logging.INFO, "ckpt_hooks"):
        _, applied = train(gpt(), [ids(4)] * 2, raised.value.minimum)
    assert applied.plan.measured_peak <= raised.value.minimum
    # The least plan takes less than blocks that keep nothing, and the log says so.
    assert "above the budget" in caplog.messages[0]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def evaluating(model):
    out = []

    def evaluate(number):
        model.eval()
        with torch.no_grad():
            out.append(model(ids(8)))
        model.train()

    return evaluate


def test_evaluation_opens_no_step():
    model, other = gpt(), gpt()
    evaluating(other)(0)
    plain, _ = train(model, [ids(4)] * 4, None, evaluating(model))
    found, applied = train(other, [ids(4)] * 4, 0.5, evaluating(other))
    assert same(found, plain)
    assert len(applied.peaks) == 2


def stacks():
    torch.manual_seed(0)

    def make(first, width, last):
        body = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Tanh()) for _ in range(6)]
        return nn.Sequential(nn.Linear(first, width), *body, nn.Linear(width, last))

    return make(16, 64, 64), make(64, 64, 1)


def test_two_models_under_one_budget():
    """A critic and a generator take turns; nobody calls the container, nor holds it."""

    def run(on):
        generator, critic = stacks()
        optimizers = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
        applied = on and apply_checkpointing(nn.ModuleDict({"g": generator, "d": critic}), memory_budget=0.5)
        noise = torch.Generator().manual_seed(1)
        for _ in range(4):
            z, real = torch.randn(256, 16, generator=noise), torch.randn(256, 64, generator=noise)
            optimizers[1].zero_grad()
            (critic(real).square().mean() + critic(generator(z).detach()).exp().mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(z)).exp().mean().backward()
            optimizers[0].step()
        return {**state_of(generator), **{f"d {name}": one for name, one in state_of(critic).items()}}, applied

    plain, _ = run(False)
    found, applied = run(True)
    assert same(found, plain)
    assert [block.name for block in applied.plan.blocks] == [f"{one}.{at}" for one in "gd" for at in range(1, 7)]
    assert applied.peaks[-1] <= applied.budget


def test_parts_of_a_model_that_are_called_by_themselves():
    model, other = gpt(), gpt()

    def step(model):
        x = model.embed(ids(4))
        for block in model.blocks:
            x = block(x)
        model.head(x).square().mean().backward()

    applied = apply_checkpointing(other, memory_budget=0.5)
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(3):
            step(one)
            optimizer.step()
            optimizer.zero_grad()
    assert same(state_of(model), state_of(other))
    assert applied.plan.measured_peak == pytest.approx(applied.plan.predicted_peak, rel=1e-3)


def two_optimizers(model):
    first = torch.optim.AdamW(model.blocks[:2].parameters()), torch.optim.SGD(model.blocks[2:].parameters(), 0.1)
    for _ in range(4):
        model(ids(4)).backward()
        for one in first:
            one.step()
            one.zero_grad()


def no_optimizer(model):
    for _ in range(7):
        model(ids(4)).backward()
        with torch.no_grad():
            for one in model.parameters():
                one.sub_(one.grad, alpha=0.1)
                one.grad = None


def in_backward(model):
    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)
    for _ in range(7):
        model(ids(4)).backward()


def lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(ids(4))
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)


def scaled(model):
    """The first steps are skipped, since gradients overflow."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(6):
        scaler.scale(model(ids(4))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def contrastive(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        (model(ids(4)) + model(ids(3)) * model(ids(2))).backward()
        optimizer.step()
        optimizer.zero_grad()


def failing(model):
    """Steps fail after forward, and within it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number):
        loss = model(ids(4))
        if number in (0, 3):
            raise ValueError
        loss.backward()
        optimizer.step()

    for number in range(6):
        with contextlib.suppress(ValueError):
            step(number)
        optimizer.zero_grad()
        hook = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids(4))
        hook.remove()


def interrupted(model):
    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.blocks[3].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids(4))
    hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()


def profiling(model):
    """The program profiles its first step itself."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if number == 0 else torch.enable_grad():
            model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_ledgers(model):
    """The program takes a ledger within its first step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        loss = model(ids(4))
        if number == 0:
            assert memory_ledger(loss.backward).peak.nbytes
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lengths(*numbers, micro=1, make=torch.optim.SGD):
    """Returns a loop over batches of these sizes, with a step of an optimizer after each ``micro``."""

    def loop(model):
        optimizer = make(model.parameters(), 0.1)
        for at, number in enumerate(numbers, 1):
            model(ids(number)).backward()
            if at % micro == 0:
                optimizer.step()
                optimizer.zero_grad()

    return loop


def evaluating_with_gradients(model):
    for _ in range(70):
        model(ids(1, 4))
    lengths(4, 4, 4)(model)


def without_blocks(model):
    """No backward needs a result of a block."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        model(ids(4))
        model.embed(ids(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_other_models(model):
    """Their optimizers step between forward and backward, and their shapes are others."""
    own, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    for _ in range(3):
        loss = model(ids(4))
        other.step()
        loss.backward()
        other.step()
        own.step()
        own.zero_grad()


def rarely(model):
    """An optimizer steps once in ten steps of the other."""
    often, seldom = (torch.optim.SGD(part.parameters(), 0.01) for part in (model.blocks[:2], model.blocks[2:]))
    for number in range(1, 31):
        model(ids(2)).backward()
        often.step()
        if number % 10 == 0:
            seldom.step()
        model.zero_grad()


def renewed(model):
    for _ in range(2):
        lengths(4, 4, 6, 6)(model)


LOOPS = {
    **{loop.__name__: (loop, 0.5) for loop in (two_optimizers, in_backward, lbfgs, scaled, contrastive, failing)},
    **{loop.__name__: (loop, 0.5) for loop in (interrupted, profiling, with_ledgers, with_other_models, rarely, renewed)},
    "no_optimizer": (no_optimizer, 1.0),  # backwards reach no region
    "evaluating_with_gradients": (evaluating_with_gradients, 0.5),
    "without_blocks": (without_blocks, 0.5),
    "larger": (lengths(2, 2, 4, 4, 4, 3, 4), 3_000_000),
    "ever_larger": (lengths(*(number for number in range(1, 7) for _ in range(3))), 0.5),
    "too_large": (lengths(1, 1, 8, 8, 8, 2, 2, 2), 1_500_000),
    "smaller": (lengths(4, 4, 4, 3, 2, 1), 0.3),
    "accumulating": (lengths(4, 4, 4, 4, 4, 4, 4, 4, 4, micro=3), 0.5),
    "accumulating_larger": (lengths(2, 2, 2, 2, 2, 4, 4, 4, 4, micro=3), 0.5),
    "adam": (lengths(4, 4, 4, 4, make=torch.optim.Adam), 3_000_000),
    "least": (lengths(4, 4, 4), 0.0),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_other_kinds(name):
    """Bitwise the loop without; which steps were profiled and measured, what was said, and the plans."""
    (loop, budget), found = LOOPS[name], []
    for on in (False, True):
        model = gpt()
        applied = apply_checkpointing(model, memory_budget=budget) if on else None
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop(model)
        found.append(state_of(model))
    assert same(*found)
    memory_ledger(lambda: None)  # no profiler is left open
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    lines = [f"{len(applied.peaks)} steps, up to {format_bytes(max(applied.peaks, default=0))}", *applied.log, *said]
    for plan in () if applied.plan is None else (applied.plan, *applied.plan.others):
        kept = [format_bytes(block.kept_bytes) for block in plan.blocks]
        lines.append(f"{format_bytes(plan.budget)}: {format_bytes(plan.predicted_peak)}, {plan.is_measured}, {kept}")
        assert plan.measured_peak <= plan.budget
    golden.check(f"loop_{name}", "\n".join(lines))


def test_copies_and_pickles_are_plain_models():
    model = gpt(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    applied = apply_checkpointing(model, memory_budget=0.5)
    other = gpt(2)
    plain = memory_ledger(lambda: other(ids(4)).backward()).peak.nbytes
    for _ in range(2):
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            gc.collect()
            assert memory_ledger(lambda one=one: one(ids(4)).backward()).peak.nbytes >= plain
        torch.save(model, io.BytesIO())
        model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(applied.peaks) == 2


def test_the_plan_needs_no_handle_and_the_model_goes_with_its_last_reference():
    model = gpt(2)
    apply_checkpointing(model, memory_budget=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = peak_of(lambda: model(ids(4)).backward())
    optimizer.zero_grad()
    for _ in range(2):
        model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert peak_of(lambda: model(ids(4)).backward()) > before  # under the plan
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        model = optimizer = None
        assert reference() is None
    finally:
        gc.enable()


def test_compiled_blocks_have_no_plan():
    model = gpt(2)
    applied = apply_checkpointing(model, memory_budget=0.5)
    for block in model.blocks:
        block.compile(backend="eager")
    with pytest.warns(UserWarning, match="No plan was made, .* the model is compiled"):
        model(ids(4)).backward()
    assert applied.plan is None


@pytest.mark.parametrize("ends", ["", "loss.backward()"], ids=["in forward", "after backward"])
def test_a_process_ends_within_a_step(ends):
    program = f"""
        import torch
        from ckpt_hooks import apply_checkpointing
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)))
        applied = apply_checkpointing(model, memory_budget=0.5)
        loss = model(torch.ones(2, 8)).sum()
        {ends}
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()


def test_what_does_not_go_with_a_budget():
    model = gpt(2)
    with pytest.raises(ValueError, match="policy cannot be used with memory_budget"):
        apply_checkpointing(model, memory_budget=0.5, policy=[torch.ops.aten.mm.default])
    with pytest.raises(ValueError, match="margin cannot be used without memory_budget"):
        apply_checkpointing(model, "blocks.*", margin=0.1)
    with pytest.raises(ValueError, match="'auto' reads an accelerator's free memory"):
        apply_checkpointing(model, memory_budget="auto")
    with pytest.raises(ValueError, match="cost should be"):
        apply_checkpointing(model, memory_budget=0.5, cost="dollars")
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_blocks_may_be_selected_and_a_margin_left():
    found, applied = train(gpt(), [ids(4)] * 2, None)
    model = gpt()
    torch.manual_seed(1)
    applied = apply_checkpointing(model, ["blocks.1", "blocks.2"], memory_budget=4_000_000, margin=0.1, cost="seconds")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(ids(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same({**state_of(model)}, {name: one for name, one in found.items() if not name.startswith("loss")})
    assert [block.name for block in applied.plan.blocks] == ["blocks.1", "blocks.2"]
    assert applied.plan.measured_peak <= 3_600_000
