"""Advice: each kind of waste is found, with the bytes that following the advice gives; none where there is no waste."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import nn

from ckpt_hooks import apply_checkpointing, checkpoint, checkpoint_region, memory_ledger, trace
from ckpt_hooks.policies import (
    everything_saveable,
    nothing_saveable,
    save_only_these_names,
)
from ckpt_hooks.report import Reason, Waste
from tests.planner.models import MODELS, built

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

WIDTH, ROWS = 64, 2048


class Block(nn.Module):
    """A block of a transformer without attention, under a mask maybe."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.relu = nn.LayerNorm(WIDTH), nn.GELU(), nn.ReLU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask=None):
        h = self.norm(x)
        return x + self.down(self.act(self.up(h if mask is None else h * mask)))


def stepping(kind, call, select=None, **options):
    """Returns a step of six blocks, each run by a function, and regions on some modules in it."""
    torch.manual_seed(0)
    blocks, data = nn.ModuleList(kind() for _ in range(6)), torch.randn(ROWS, WIDTH)

    def model(x):
        for block in blocks:
            x = call(block, x)
        return x

    def step():
        if select is None:
            model(data.requires_grad_() * 1.0).sum().backward()
        else:
            with apply_checkpointing(blocks, select, **options):
                model(data.requires_grad_() * 1.0).sum().backward()
        blocks.zero_grad()
        data.grad = None

    return step


def mask_for(x):
    return torch.zeros(x.shape).exp()


def plain(block, x):
    return block(x)


def ledger_of(step):
    step()
    gc.collect()
    return memory_ledger(step)


@pytest.mark.parametrize("options", [{}, {"recorded": True}])
@pytest.mark.parametrize("name", MODELS)
def test_no_advice_on_models_without_wastes(name, options):
    model, step, blocks = built(name, "plain")
    assert memory_ledger(lambda: step(model)).advice == ()
    with apply_checkpointing(model, blocks, **options):
        assert memory_ledger(lambda: step(model)).advice == ()


def test_a_tensor_that_all_regions_share_is_no_waste():
    torch.manual_seed(0)
    blocks, data = nn.ModuleList(Block() for _ in range(4)), torch.randn(ROWS, WIDTH)

    def step():
        x, mask = data.requires_grad_() * 1.0, mask_for(data)
        for block in blocks:
            x = checkpoint(block, x, mask)
        x.sum().backward()

    assert memory_ledger(step).advice == ()


def test_a_forward_alone_shows_no_waste_of_regions():
    blocks = nn.ModuleList(Block() for _ in range(2))
    assert (
        memory_ledger(lambda: [checkpoint(block, torch.randn(8, WIDTH, requires_grad=True)) for block in blocks]).advice == ()
    )


MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

POLICIES = {
    "operators": [MM],
    "names": save_only_these_names("hidden"),
    "a function": lambda ctx, op, *args, **kwargs: False,
}


def step_traced(policy, recorded, *, operators=True):
    step = stepping(Block, plain, list("012345"), policy=policy, recorded=recorded)
    with trace(operators=operators) as found:
        step()
    return found.steps[0]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_that_matches_nothing(policy, recorded):
    found = step_traced(policy, recorded)
    (advice,) = found.advice
    assert (advice.waste, advice.count, advice.peak_nbytes) == (Waste.UNMATCHED_POLICY, 6, 0)
    assert advice.code == "policy=[torch.ops.aten.addmm.default]"
    followed = step_traced([ADDMM], recorded)
    assert followed.held_bytes[Reason.POLICY.value] == advice.recomputed_nbytes > 0
    assert followed.advice == ()
    assert "policy matches nothing" in str(found)
    assert found.to_json()["advice"] == [advice.to_json()]
    (without,) = step_traced(policy, recorded, operators=False).advice
    assert without.code == "name operators that run: trace(operators=True) lists them"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("policy", [None, nothing_saveable, everything_saveable, [ADDMM]])
def test_policies_that_do_as_they_say(policy, recorded):
    found = step_traced(policy, recorded)
    assert found.advice == ()
    assert {entry.policy is None for entry in found.walk()} == {policy is None}
    assert all(sum(entry.dropped_by.values()) <= entry.dropped_bytes for entry in found.walk())


@pytest.mark.parametrize("recorded", [False, True])
def test_a_region_that_drops_the_inputs_of_regions_inside(recorded):
    torch.manual_seed(0)
    blocks, data = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())), torch.randn(ROWS, WIDTH)
    with apply_checkpointing(blocks, ["0", "1", "*.*"], recorded=recorded):
        found = memory_ledger(lambda: blocks(data.requires_grad_() * 1.0).sum().backward())
    assert len([entry for entry in found.entries.values() if not entry.is_again]) == 6
    assert found.advice == ()


# Promises: each program, and the same one as its advice says. The second gives what the first one's ledger promised, within 10%
# or at most that, and has the same gradients.


class Halved(Block):
    """The same block, whose hidden values are a result."""

    def halves(self, x):
        hidden = self.act(self.up(self.norm(x)))
        return hidden, x + self.down(hidden)


class Masked(Block):
    """The same block, with a mask of the user's on what is added."""

    def forward(self, x, mask):
        return x + self.down(self.act(self.up(self.norm(x)))) * mask


def program(kind, forward, count=6):
    """Returns a model of blocks, and a step that calls them in a function of the model and data."""
    torch.manual_seed(0)
    model, data = nn.Sequential(*(kind() for _ in range(count))), torch.randn(ROWS, WIDTH)
    return model, lambda: forward(model, data)


def held_values(form, used, *, is_held):
    """A loss of results of regions, each held in a list too."""

    def forward(model, data):
        x, kept, loss = data, [], 0
        for block in model:
            hidden, x = form(block.halves, x)
            value = hidden.exp().sin()
            loss = loss + value.mean() if used else loss
            if is_held:
                kept.append(value)
        del hidden, value
        (loss + x.sum()).backward()

    return program(Halved, forward)


def as_block(function, x):
    with checkpoint_region():
        return function(x)


def masks(kind, form, *, is_inside):
    makers = {
        "bool": lambda x: torch.rand(x.shape) > 0.1,
        "float": lambda x: (torch.rand(x.shape) > 0.1).float() / 0.9,
        "in place": lambda x: torch.empty(x.shape).bernoulli_(0.9),
    }

    def forward(model, data):
        x = data * 1.0
        for block in model:
            if is_inside:
                x = form(lambda x, block=block: block(x, makers[kind](x)), x)
            else:
                mask = makers[kind](x)
                x = form(lambda x, block=block, mask=mask: block(x, mask), x)
        x.sum().backward()

    return program(Masked, forward)


def regions_on(select, recorded=False):
    def forward(model, data):
        with apply_checkpointing(model, select, recorded=recorded):
            model(data).sum().backward()

    return program(Block, forward)


def logits_in_a_variable(form, *, is_held):
    torch.manual_seed(0)
    head, labels = nn.Linear(WIDTH, 2048), torch.randint(2048, (ROWS,))

    def forward(model, data):
        x = data
        for block in model:
            x = form(block, x)
        logits = head(x)
        loss = nn.functional.cross_entropy(logits, labels)
        if not is_held:
            del logits
        loss.backward()

    return program(Block, forward, 2)


def optimizer_steps(kind, **options):
    torch.manual_seed(0)
    model, data = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30))), torch.randn(8, 64)
    optimizer = kind(model.parameters(), **options)

    def step():
        model(data).sum().backward()
        optimizer.step()

    return model, step


REGION = r'apply_checkpointing\(model, "(.*)"\)'
CALL = checkpoint
#: The waste, whether its figure is a bound, the part of it that is given at least, the program, and the one that follows the
#: advice, given its code.
PROMISES = {
    f"masks, {kind}, {form.__name__}": (
        Waste.HELD_INPUT,
        *(False, 0.9),
        lambda kind=kind, form=form: masks(kind, form, is_inside=False),
        lambda code, kind=kind, form=form: masks(kind, form, is_inside=True),
    )
    for kind in ("bool", "float", "in place")
    for form in (CALL, as_block)
    if (kind, form) != ("bool", as_block)  # a small part
}
PROMISES |= {
    f"{select}, recorded {recorded}": (
        Waste.SAVES_NOTHING,
        *(True, 0.9),
        lambda select=select, recorded=recorded: regions_on(select, recorded),
        lambda code, recorded=recorded: regions_on(re.fullmatch(REGION, code)[1], recorded),
    )
    for select in ("*.norm", "*.act")
    for recorded in (False, True)
    if (select, recorded) != ("*.act", True)
}
PROMISES |= {
    f"values, used {used}, {form.__name__}": (
        Waste.HELD_OUTSIDE,
        *(True, 0 if used else 0.8),  # the graph of a loss may hold it as well
        lambda used=used, form=form: held_values(form, used, is_held=True),
        lambda code, used=used, form=form: held_values(form, used, is_held=False),
    )
    for used in (False, True)
    for form in (CALL, as_block)
}
PROMISES |= {
    f"logits, {name}": (
        Waste.HELD_OUTSIDE,
        *(True, 0.9),
        lambda form=form: logits_in_a_variable(form, is_held=True),
        lambda code, form=form: logits_in_a_variable(form, is_held=False),
    )
    for name, form in {"plain": plain, "regions": CALL}.items()
}
PROMISES |= {
    f"lists, {kind.__name__}": (
        Waste.FOREACH,
        *(True, 0.9),
        lambda kind=kind: optimizer_steps(kind, foreach=True),
        lambda code, kind=kind: optimizer_steps(kind, **eval(f"dict({code})")),
    )
    for kind in (torch.optim.Adagrad, torch.optim.AdamW, torch.optim.RMSprop)
}


def measured(model, step):
    """Returns the ledger of the second step, and gradients after it."""
    for run in (lambda step: step(), memory_ledger):
        gc.collect()
        model.zero_grad()
        torch.manual_seed(1)
        found = run(step)
    return found, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", PROMISES)
def test_advice_gives_what_it_promises_and_the_same_gradients(name):
    waste, is_at_most, least, wasting, following = PROMISES[name]
    before, gradients = measured(*wasting())
    (advice,) = (one for one in before.advice if one.waste is waste)
    after, followed = measured(*following(advice.code))
    given = before.peak.total_nbytes - before.base_nbytes - after.peak.total_nbytes + after.base_nbytes
    assert advice.is_at_most is is_at_most
    assert least * advice.peak_nbytes <= given <= (1.001 if is_at_most else 1.1) * advice.peak_nbytes
    assert all(map(torch.equal, gradients, followed))
    assert not [one for one in after.advice if one.waste is waste]
    line = next(line for line in str(before).splitlines() if waste.value in line)
    assert ("at most" in line) is is_at_most
    assert "detach" not in str(before)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_that_matches_nothing_in_a_ledger(policy, recorded):
    found = ledger_of(stepping(Block, plain, list("012345"), policy=policy, recorded=recorded))
    (advice,) = found.advice
    assert (advice.waste, advice.count, advice.peak_nbytes) == (Waste.UNMATCHED_POLICY, 6, 0)
    assert advice.code == "name operators that run: trace(operators=True) lists them"
    traced = step_traced(policy, recorded).advice[0].code
    assert traced == "policy=[torch.ops.aten.addmm.default]"
    assert ledger_of(stepping(Block, plain, list("012345"), policy=[ADDMM], recorded=recorded)).advice == ()
