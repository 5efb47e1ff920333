"""Ledgers: every byte of a step, against the profiler's own count, and what made it."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import re
import threading

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region, memory_ledger
from ckpt_hooks._torch.profiling import IS_ALLOCATION, profile_memory
from ckpt_hooks.report import Maker, MemoryLedger, Reason
from ckpt_hooks.report.ledger.rows import NOWHERE, Row
from ckpt_hooks.report.printing import format_bytes
from tests import golden
from tests.report.models import INPUTS, RUNS, Block, Convolution, Layer, Net

pytestmark = pytest.mark.filterwarnings("ignore")


class UNet(nn.Module):
    """Two levels, with skips between the two sides."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.up = nn.ModuleList([nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)])

    def forward(self, x):
        skips = []
        for layer in self.down:
            skips.append(x)
            x = nn.functional.max_pool2d(self.run(layer, x).relu(), 2)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = self.run(layer, torch.cat([x, skips.pop()], 1)).relu()
        return x.sum()


MODELS = {
    "mlp": lambda run: (Net(Layer, run), INPUTS[Layer]),
    "gpt": lambda run: (Net(Block, run), INPUTS[Block]),
    "resnet": lambda run: (Net(Convolution, run), INPUTS[Convolution]),
    "unet": lambda run: (UNet(run), (2, 2, 8, 8)),
}

OTHERS = {
    "offload_inputs": lambda layer, x: checkpoint(offload_inputs=True)(layer)(x),
    "offload_inputs, recorded": lambda layer, x: checkpoint_region(offload_inputs=True)(layer)(x),
    "split_backward": lambda layer, x: checkpoint(split_backward=True)(layer)(x),
}


@pytest.fixture
def counted(monkeypatch):
    """Returns the profiler's events of the latest ledger: time, address, bytes, and the allocator's total."""
    found = []
    events = profile_memory.events

    def counting(profile):
        roots = events(profile)
        found.clear()
        todo = [*roots]
        while todo:
            event = todo.pop()
            if event.tag == IS_ALLOCATION:
                memory = event.extra_fields
                found.append((event.start_time_ns, memory.ptr, memory.alloc_size, memory.total_allocated))
            todo += event.children
        found.sort(key=lambda row: row[0])
        return roots

    monkeypatch.setattr(profile_memory, "events", counting)
    return found


def assert_is_the_allocators(found, counted):
    """The sum at each moment is the profiler's, but for older memory, of whose end the profiler may tell nothing."""
    alive, sizes = set(), []
    for _, address, nbytes, _ in counted:
        if nbytes > 0:
            alive.add(address)
            sizes.append(nbytes)
        elif address in alive:
            alive.remove(address)
            sizes.append(nbytes)
    new = [change for change in found.changes if change.allocation is not None]
    assert [change.nbytes for change in new] == sizes
    totals = [total for *_, total in counted]
    assert [total - totals[0] + counted[0][2] for total in totals] == [*itertools.accumulate(row[2] for row in counted)]
    live = [*itertools.accumulate(change.nbytes for change in found.changes)]
    assert [change.live for change in found.changes] == live
    assert found.peak.nbytes == max(0, *live)
    assert found.peak.nbytes + found.base_nbytes == found.peak.total_nbytes
    assert sum(holder.nbytes for holder in found.peak.holders) + found.peak.older_nbytes == found.peak.total_nbytes


def assert_nothing_outside(found, allowed=("ones_like",)):
    """But for what the lines of a step call themselves."""
    outside = {one.origin for one in found.allocations if one.origin.maker is Maker.OUTSIDE}
    assert {(origin.operator or "").removeprefix("aten::") for origin in outside} <= set(allowed), outside
    assert all(origin.line.startswith("test_ledger") for origin in outside)


@pytest.mark.parametrize("run", [*RUNS, *OTHERS])
@pytest.mark.parametrize("model", MODELS)
def test_the_sum_is_the_allocators_byte_for_byte(model, run, counted, transfers):
    torch.manual_seed(0)
    net, shape = MODELS[model]({**RUNS, **OTHERS}[run])
    x = torch.randn(shape)
    net(x).backward()
    net.zero_grad()
    found = memory_ledger(lambda: net(x).backward())
    assert_is_the_allocators(found, counted)
    assert_nothing_outside(found)
    assert [phase.name for phase in found.phases][:2] == ["forward", "backward"]
    gradients = sum(parameter.grad.nbytes for parameter in net.parameters())
    assert sum(one.nbytes for one in found.allocations if one.is_gradient) == gradients


@pytest.mark.parametrize("run", ["none", "checkpoint", "region, policy", "offload_inputs"])
@pytest.mark.parametrize("model", MODELS)
def test_autocast_microbatches_and_an_optimizer(model, run, counted, transfers):
    torch.manual_seed(0)
    net, shape = MODELS[model]({**RUNS, **OTHERS}[run])
    optimizer = torch.optim.AdamW(net.parameters())
    batches = [torch.randn(shape), torch.randn(shape)]

    def step():
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        found = memory_ledger(step)
        assert_is_the_allocators(found, counted)
        assert_nothing_outside(found)
        assert [phase.name for phase in found.phases if phase.name != "rest"] == ["forward", "backward"] * 2 + ["optimizer"]
    optimizer.zero_grad()
    for batch in batches:
        net(batch).backward()

    def step_that_frees_first():
        optimizer.zero_grad()
        step()

    gradients = sum(parameter.grad.nbytes for parameter in net.parameters())
    found = memory_ledger(step_that_frees_first)
    assert_is_the_allocators(found, counted)
    assert min(change.live for change in found.changes) <= -gradients
    assert found.base_nbytes - found.peak.older_nbytes == gradients
    assert "from before are freed by then" in str(found)


def test_a_node_of_backward_belongs_to_the_module_of_its_forward():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Softmax(1))
    found = memory_ledger(lambda: net(torch.ones(2, 4)).sum().backward())
    made = {(one.origin.node, one.origin.module) for one in found.allocations if one.origin.maker is Maker.BACKWARD}
    nodes = {"SoftmaxBackward0": "2 Softmax", "TanhBackward0": "1.0 Tanh"}
    assert {(node, name) for node, name in made if node in nodes} == set(nodes.items())
    assert {name for node, name in made if node == "AddmmBackward0"} == {"0 Linear", "1.1 Linear"}
    gradients = {one.origin.module for one in found.allocations if one.is_gradient}
    assert gradients == {"0 Linear", "1.1 Linear"}


@pytest.mark.parametrize("form", [checkpoint, lambda function, x: checkpoint_region()(function)(x)])
def test_forward_and_recompute_of_regions(form):
    def work(x):
        return x.sin().cos().exp()

    x = torch.ones(256, requires_grad=True)
    form(work, x).sum().backward()
    found = memory_ledger(lambda: form(work, x).sum().backward())
    made = {}
    for one in found.allocations:
        if one.nbytes == 1024:
            made.setdefault(one.origin.maker, []).append(one.origin.operator.removeprefix("aten::"))
    assert made[Maker.REGION] == ["sin", "cos", "exp"]
    assert made[Maker.RECOMPUTE] in (["sin", "cos"], ["sin", "cos", "exp"])
    lines = {one.origin.line for one in found.allocations if one.origin.maker is Maker.REGION and one.nbytes == 1024}
    assert len(lines) == 1


def test_the_line_of_a_list_that_collects_results_of_reruns():
    unseen = threading.local()  # a list that reruns see is as forward left it afterwards
    unseen.collected = []

    def work(x):
        y = x.sin()
        unseen.collected.append(y.detach())
        return y.cos()

    x = torch.ones(1024, requires_grad=True)
    with memory_ledger() as found:
        for _ in range(3):
            checkpoint(work, x).sum().backward()
    line = f"test_ledger.py:{work.__code__.co_firstlineno + 1}"
    again = [one for one in found.peak.holders if one.origin.maker is Maker.RECOMPUTE and one.reason is None]
    assert [(one.origin.line, one.origin.operator) for one in again] == [(line, "aten::sin")]
    assert again[0].count >= 2
    assert line in str(found)


def test_reasons_at_the_peak():
    torch.manual_seed(0)
    net = Net(Block, RUNS["checkpoint, policy"])
    x = torch.randn(INPUTS[Block])
    net(x).backward()
    found = memory_ledger(lambda: net(x).backward())
    reasons = {holder.reason for holder in found.peak.holders}
    assert {Reason.POLICY, Reason.INPUT, Reason.RECOMPUTED} <= reasons
    regions = {holder.origin.region for holder in found.peak.holders if holder.reason is Reason.POLICY}
    assert regions <= {f"layers.{number} Block" for number in range(3)}
    plain = copy.deepcopy(net)
    plain.run = RUNS["none"]
    found = memory_ledger(lambda: plain(x).backward())
    assert Reason.SAVED in {holder.reason for holder in found.peak.holders}


def test_text_of_some_twenty_lines():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(12)])
    found = memory_ledger(lambda: apply_and_run(net))
    lines = str(found).split("\n")
    assert len(lines) <= 22
    assert lines[0].startswith("peak ")
    assert "forward" in lines[3]
    assert "backward" in lines[4]
    assert repr(found) == f"<MemoryLedger: {lines[0]}>"
    assert found._repr_html_().startswith("<pre>")


def apply_and_run(net):
    net(torch.ones(4, 8)).sum().backward()


def test_random_states_of_regions_that_draw_have_no_remedy():
    """With preserve_rng_state=False gradients would be others, and no error."""
    x = torch.ones(4, 8, requires_grad=True)
    torch.rand(1)  # else a region may share the state of the generator with an earlier test
    found = memory_ledger(lambda: sum(checkpoint(nn.Dropout(0.5), x * 1) for _ in range(8)).sum().backward())
    (states,) = (holder for holder in found.peak.holders if holder.reason is Reason.RANDOM_STATE)
    assert states.nbytes == 8 * torch.get_rng_state().nbytes > found.peak.nbytes / 2
    assert "preserve_rng_state" not in f"{found} {found.to_json()['causes']}"


def retained():
    """A gradient that the program keeps past backward, up to the peak and longer."""
    h = torch.ones(500, requires_grad=True) * 2
    h.retain_grad()
    checkpoint(torch.exp, h * h).sum().backward()
    torch.ones(5000).add(1)
    torch.ones(50)


@pytest.mark.usefixtures("no_self_check")
def test_all_ledgers_say():
    """Tables, numbers and causes of steps: layers under each kind of region, microbatches, an optimizer, and odd blocks."""
    lines = []

    def add(name, found):
        lines.extend(
            [
                f"== {name}",
                str(found),
                str({key: value for key, value in found.scalars().items() if key not in ("base", "peak/older")}),
            ]
        )
        peak = found.to_json()["peak"]
        lines.extend([str({key: peak[key] for key in ("nbytes", "phase", "change")}), *found.causes_now()])
        lines.extend(f"{phase.name} {phase.begin} {phase.end} {phase.peak_nbytes} {phase.end_nbytes}" for phase in found.phases)
        lines.extend(f"{entry.name} {entry.module} {entry.is_again}" for entry in found.entries.values())

    def train(net, x, optimizer, count=2):
        for _ in range(count):
            torch.rand(1)  # so that the first region notes a random state of its own
            net(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, run in RUNS.items():
        torch.manual_seed(0)
        net, x = Net(Layer, run), torch.ones(INPUTS[Layer])
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        if "policy" not in name:
            train(net, x, optimizer)  # else the gradients and the state are new
        add(name, memory_ledger(lambda net=net, x=x, optimizer=optimizer: train(net, x, optimizer)))
    net, kept = Net(Layer, RUNS["none"]), [torch.ones(1000), torch.ones(2000)]
    add("many", memory_ledger(lambda: [train(net, x, optimizer, 1) for _ in range(12)]))
    add("forward", memory_ledger(lambda: kept.append(net(x))))
    add("backward", memory_ledger(lambda: kept.pop().backward()))
    add("optimizer", memory_ledger(torch.optim.Adagrad(net.parameters(), lr=0.1).step))
    add("rest", memory_ledger(lambda: (torch.ones(5), train(net, x, optimizer), kept.append(torch.ones(6000)))))
    add("frees", memory_ledger(lambda: (kept.pop(), torch.ones(3))[:0]))
    add("retained", memory_ledger(retained))
    add("nothing", memory_ledger(lambda: None))
    add("older freed", memory_ledger(lambda: (kept.pop(0), torch.ones(10), kept.clear())))
    add("kept", memory_ledger(lambda: kept.extend(torch.ones(size) for size in (100, 300, 200))))
    golden.check("ledgers_of_all", re.sub(r"above the .*? in use before|[\d.]+ \w+ from before", "-", "\n".join(lines)))


def test_to_json_has_everything():
    x = torch.ones(16, requires_grad=True)
    found = memory_ledger(lambda: checkpoint(torch.sin, x).exp().sum().backward())
    values = json.loads(json.dumps(found.to_json()))
    assert values["peak"]["nbytes"] == found.peak.nbytes
    assert len(values["allocations"]) == len(found.allocations)
    origins = [values["origins"][one["origin"]]["operator"] for one in values["allocations"]]
    assert origins == [one.origin.operator for one in found.allocations]
    assert [change[2] for change in values["changes"]] == [change.nbytes for change in found.changes]
    printed = str(found).partition("what takes it away")[2].splitlines()[1:]
    for line, one in zip(printed, values["causes"], strict=True):
        assert line.lstrip().startswith(f"{format_bytes(one['nbytes'])}  ")
        assert line.endswith(f"{one['line']}  {one['remedy']}")
    assert values["causes"]


def test_nothing_is_kept_alive_and_results_are_bitwise():
    def gradients(run):
        torch.manual_seed(0)
        net = Net(Block, RUNS["checkpoint"])
        x = torch.randn(INPUTS[Block])
        run(lambda: net(x).backward())
        return [parameter.grad for parameter in net.parameters()], torch.get_rng_state()

    (watched, after), (plain, state) = gradients(memory_ledger), gradients(lambda step: step())
    assert all(map(torch.equal, watched, plain))
    assert torch.equal(after, state)
    gc.collect()
    before = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    found = memory_ledger(lambda: torch.ones(8).sin())
    gc.collect()
    assert sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()) == before
    assert found.peak.nbytes == 64


def test_an_exception_in_a_module_ends_the_module():
    class Fails(nn.Module):
        def forward(self, x):
            x.sin()
            raise ValueError("no")

    def step():
        try:
            Fails()(torch.ones(16))
        except ValueError:
            torch.ones(64)

    found = memory_ledger(step)
    assert [(one.nbytes, one.origin.module) for one in found.allocations] == [(64, None), (64, "Fails"), (256, None)]


def test_a_ledger_is_read_after_its_block():
    with memory_ledger() as found, pytest.raises(RuntimeError, match=r"'changes' of a ledger was read while its block runs"):
        _ = found.peak
    assert found.changes == ()
    assert str(found).endswith("nothing was allocated")
    with pytest.raises(AttributeError, match="no attribute 'peaks'"):
        _ = found.peaks


def test_ranges_of_the_user_stay_whole():
    """A function mode marks calls into torch, and the begin and the end of a range are two such calls."""
    with memory_ledger() as found, torch.profiler.record_function("Optimizer.step#Own.step"):
        torch.ones(4)
        torch.zeros(4)
    assert {one.origin.optimizer for one in found.allocations} == {"Own.step"}


def test_a_device_that_counts_for_itself():
    """The allocator of an accelerator tells of frees of older memory, and of all that was there; here its rows are made up."""
    gpu = torch.device("cuda", 0)

    def row(time, address, nbytes, total, device=gpu, place=NOWHERE):
        return Row(time, place, None, address, nbytes, device, total)

    rows = [
        row(0, 98, 32, 32, torch.device("cpu")),
        row(1, 512, 1024, 5120),
        row(2, 99, 64, 64, torch.device("cpu")),
        row(3, 4096, -2048, 3072),
        row(4, 2048, 4096, 7168, place=NOWHERE._replace(node="MmBackward0", operator="aten::mm")),
        row(5, 512, -1024, 6144, place=NOWHERE._replace(node="MmBackward0")),
    ]
    found = MemoryLedger()
    found.fill(rows, {7: 100})
    assert (found.device, found.devices, found.base_nbytes) == ("cuda:0", ("cpu", "cuda:0"), 4096)
    assert [(change.nbytes, change.live) for change in found.changes] == [
        (1024, 1024),
        (-2048, -1024),
        (4096, 3072),
        (-1024, 2048),
    ]
    assert [change.live + found.base_nbytes for change in found.changes] == [5120, 3072, 7168, 6144]
    peak = found.peak
    assert (peak.nbytes, peak.total_nbytes, peak.older_nbytes, peak.phase) == (3072, 7168, 2048, "backward")
    assert [(holder.nbytes, holder.reason) for holder in peak.holders] == [(4096, None), (1024, Reason.SAVED)]
    assert found.holders_at(-1) == ()
    with pytest.raises(ValueError, match="the index of a change, below 4, but got 4"):
        found.holders_at(4)
    host = found.on("cpu")
    assert (host.device, host.base_nbytes, host.peak.nbytes) == ("cpu", 100, 96)


def test_tensors_that_are_not_made_yet():
    def peak(layer):
        return memory_ledger(lambda: layer(torch.ones(4, 8)).sum().backward()).peak.nbytes

    expected, lazy = peak(nn.Linear(8, 8)), nn.LazyLinear(8)
    assert peak(nn.Linear(8, 8)) == expected
    assert peak(lazy) == expected + lazy.weight.nbytes + lazy.bias.nbytes
