"""Traces: what regions drop, hold and compute again, step by step."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ckpt_hooks import checkpoint, checkpoint_region, set_self_check
from ckpt_hooks._core.descriptions import format_path
from ckpt_hooks._core.frame import packed_in
from ckpt_hooks._torch.autograd import packed_of, saved_in
from ckpt_hooks.policies import offload_ops, save_ops
from ckpt_hooks.report import trace
from tests import golden
from tests.fake_device import fake_device
from tests.measure import Log, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten

BYTES = 8 * 16 * 16  # of a tensor of the blocks below


def block(x):
    return x.sin().cos().exp()


def run_function(x, name="block"):
    return checkpoint(name=name)(block)(x)


def run_recorded(x, name="block"):
    with checkpoint_region(name=name):
        return block(x)


KINDS = {"function": run_function, "recorded": run_recorded}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def warmed_up(run):
    """Runs once: the first random state of a process is kept by whoever runs first."""
    run(leaf(16, 16)).sum().backward()


def test_bytes_and_recomputes(kind):
    x = leaf(16, 16) * 1
    with trace(operators=True) as found:
        y = KINDS[kind](x)
        (before,) = found.steps
        y.sum().backward()
    (step,) = found.steps
    (region,) = step.regions
    assert (before.recomputes, before.dropped_bytes, before.recompute_seconds) == (0, BYTES, 0.0)
    assert (region.kind, region.name, region.path, region.module) == (kind, "block", ("block",), None)
    assert region.site.startswith("test_trace.py:")
    # Of what sin, cos and exp save, the caller has the first and the last.
    assert region.dropped_bytes == step.dropped_bytes == BYTES
    assert region.held_bytes["region input"] == BYTES
    assert set(region.held_bytes) <= {"region input", "random state"}
    assert step.held_bytes == region.held_bytes
    assert (region.recomputes, step.recomputes, step.late_recomputes) == (1, 1, 0)
    assert (region.operators, region.recomputed_operators) == (step.operators, step.recomputed_operators) == (3, 3)
    assert region.recompute_seconds == step.recompute_seconds > 0
    assert region.regions == ()


def test_operators_are_counted_on_request_alone(kind):
    """Without the request they run under no mode of the trace."""
    modes = Log()

    def function(x):
        modes.append(torch._C._len_torch_dispatch_stack())
        return block(x)

    def run():
        (checkpoint if kind == "function" else checkpoint_region)()(function)(leaf(4)).sum().backward()

    with set_self_check(False):  # whose first passes run under a mode
        run()
    with trace() as found:
        run()
    assert len(set(modes)) == 1
    (step,) = found.steps
    assert step.operators is step.recomputed_operators is step.regions[0].operators is None


def test_what_outlives_forward_is_not_dropped(kind):
    kept, layer = [], nn.Linear(16, 16, dtype=torch.float64)

    def function(x):
        h = layer(x).sin()
        kept.append(h)
        return h.cos().exp().sum()

    x = leaf(16, 16)
    with trace() as found:
        if kind == "function":
            y = checkpoint(function, x)
        else:
            with checkpoint_region():
                y = function(x)
        y.backward()
        kept.clear()
    assert found.steps[0].dropped_bytes == 2 * BYTES  # of what sin and exp saved: cos saved what is kept


def test_regions_inside_of_regions():
    layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:

                def run(x, layer=layer):
                    with checkpoint_region(name="inner"):
                        h = layer(x).sin().cos()
                    return h.exp().sin()

                x = checkpoint(name="outer")(run)(x)
            return x

    with trace(operators=True) as found:
        Model()(leaf(16, 16)).sum().backward()
    (step,) = found.steps
    assert [region.path for region in step.walk()] == [("outer",), ("outer", "inner")] * 3
    assert [len(region.regions) for region in step.regions] == [1] * 3
    assert [region.recomputes for region in step.walk()] == [1] * 6
    assert {region.operators for region in step.regions} == {2}
    outer, inner = step.regions[0], step.regions[0].regions[0]
    assert outer.recompute_seconds > 0
    assert inner.recompute_seconds > 0
    assert step.operators == sum(region.operators for region in step.walk())
    assert step.dropped_bytes == outer.dropped_bytes * 3 + inner.dropped_bytes * 3


SCALE, UNRELATED = torch.ones(2), torch.ones(100)


class Layers(nn.Module):
    """Regions of all kinds, some inside others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.kept = []

    def forward(self, x):
        for layer in self.layers[:3]:
            x = checkpoint(layer, x)
        with checkpoint_region(name="outer"):
            with checkpoint_region(name="inner", policy=save_ops(aten.sin.default)):
                y = x.sin().cos().exp().view(-1)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
                y = y.exp()
            self.kept.append(y.sigmoid())  # outlives the region
            y = self.kept[-1].tanh().tanh()
        y = checkpoint(self.unused, y.view(64, 16))
        y = checkpoint(policy=offload_ops(aten.exp.default))(lambda x: x.sin().exp().cos())(y)
        with contextlib.suppress(ZeroDivisionError), checkpoint_region(name="fails"):
            y.exp().sin() / (1 // 0)
        return checkpoint(lambda x: checkpoint(self.layers[3], x.cos()).sin(), y)

    def unused(self, x):
        x.sin().cos().exp().sum()  # no backward asks for these
        return x.exp().sin()


@pytest.mark.usefixtures("no_self_check")
def test_all_a_trace_says():
    """Each region of each step, the numbers of steps, snapshots and notes, between forward and backward as well."""
    torch.manual_seed(0)
    model, lines, late = Layers(), [], None
    warmed_up(run_function)

    def add(found):
        for step in found.steps:
            for region in step.walk():
                values = {key: value for key, value in region.to_json().items() if "seconds" not in key and key != "regions"}
                lines.append(str({key: value for key, value in values.items() if value not in (None, 0, {}, "")}))
            totals = step.to_json()
            lines.append(str({key: value for key, value in totals.items() if "seconds" not in key and key != "regions"}))
            lines.append(str({key: value for key, value in step.scalars().items() if "seconds" not in key}))

    with fake_device(), trace(operators=True) as found:
        for _ in range(2):
            loss = model(torch.ones(64, 16, requires_grad=True) * 1).sum()
            before = found.steps
            lines.append(str([(step.recomputes, step.dropped_bytes, dict(step.held_bytes)) for step in before]))
            lines.extend(found.largest())
            if late is not None:
                late.backward()
                loss.backward()
            assert [step.recomputes for step in before][-1] == 0
            late = loss
            add(found)
            lines.append(str(found))
            found.step()
        lines.append(str(found.scalars() == found.steps[-1].scalars()))
    for event in found.to_snapshot()["device_traces"][0]:
        names = [
            f"{frame['name']} {frame['filename']}:{frame['line']}" for frame in event["frames"] if event["action"] == "alloc"
        ]
        lines.append(f"{event['action']} {event['addr']} {event['size']} {names}")
    golden.check("trace_of_all", "\n".join(lines))


def test_other_globals_of_a_module_are_not_held():
    with trace() as found:
        y = checkpoint(lambda x: (x * SCALE).sin(), leaf(2))
    assert SCALE.nbytes <= found.steps[0].held_bytes["state"] < UNRELATED.nbytes
    del y


def test_offloaded_bytes():
    with fake_device(), trace() as found:
        h = leaf(16, 16) * 1
        checkpoint(policy=offload_ops(aten.exp.default))(lambda x: x.sin().exp().cos())(h).sum().backward()
    (region,) = found.steps[0].regions
    assert (region.offloaded_bytes, region.recomputes) == (BYTES, 0)
    assert not {"policy", "offloaded"} & set(region.held_bytes)


def test_steps():
    sizes = [(16, 2), (16, 2), (32, 3)]
    with trace() as found:
        for size, count in sizes:
            x = leaf(size) * 1
            for number in range(count):
                run_function(x, f"block {number}").sum().backward(retain_graph=True)
            found.step()
    assert [len(step.regions) for step in found.steps] == [2, 2, 3]
    assert [step.dropped_bytes for step in found.steps] == [512, 512, 1536]
    assert "step 2: 3 regions" in str(found)


def test_a_recompute_of_an_earlier_step():
    with trace() as found:
        y = run_function(leaf(16))
        found.step()
        y.sum().backward()
    first, second = found.steps
    assert (first.recomputes, first.late_recomputes) == (0, 0)
    assert (second.recomputes, second.late_recomputes, second.regions) == (1, 1, ())
    assert second.recompute_seconds > 0
    assert "1 recompute in" in str(found)
    assert "1 of earlier steps" in str(found)


def test_regions_that_failed(kind):
    def fail(x):
        x.sin().cos()
        raise KeyError("mine")

    with trace() as found:
        with pytest.raises(KeyError):
            (checkpoint if kind == "function" else checkpoint_region)(name="fails")(fail)(leaf(3))
        KINDS[kind](leaf(16)).sum().backward()
    assert [region.recomputes for region in found.steps[0].regions] == [0, 1]


def test_it_keeps_no_tensor_and_no_frame(kind):
    released = []

    class Argument:
        def __call__(self, x):
            return block(x)

    function = Argument()
    weakref.finalize(function, released.append, "function")
    x = leaf(16) * 1
    weakref.finalize(x, released.append, "tensor")
    with trace(operators=True) as found:
        if kind == "function":
            y = checkpoint(function, x)
        else:
            with checkpoint_region():
                y = function(x)
        del x, function, y
        assert sorted(released) == ["function", "tensor"]
        found.step()
    todo, seen = [found], set()
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type) or callable(value):
            continue
        seen.add(id(value))
        assert not isinstance(value, torch.Tensor)
        todo += gc.get_referents(value)


def test_traced_tensors_can_be_exchanged(kind):
    """A weak reference to a tensor would keep ``swap_tensors``, which ``module.to`` may call, from exchanging it."""
    x, other = leaf(16, 16), leaf(16, 16)
    with trace(operators=True):
        KINDS[kind](x).sum().backward()
        torch.utils.swap_tensors(x, other)


def test_json():
    with trace(operators=True) as found:
        for _ in range(2):
            run_function(leaf(16)).sum().backward()
            found.step()
    values = json.loads(json.dumps(found.to_json()))
    assert [step["recomputes"] for step in values["steps"]] == [1, 1]
    region = values["steps"][0]["regions"][0]
    assert (region["name"], region["path"], region["operators"], region["regions"]) == ("block", ["block"], 3, [])


def test_text():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x)
            return x

    warmed_up(run_function)
    model, x = Model(), torch.rand(4, 16, requires_grad=True)
    with trace() as found:
        model(x).sum().backward()
    text = str(found)
    first, _, header, *lines = text.splitlines()
    assert first.startswith("12 regions, dropped ")
    assert "12 recomputes in" in first
    assert header.split() == ["region", "dropped", "held", "recomputes", "ms", "each", "line", "kind"]
    assert any(line.startswith(" x11 layers.1-11 Sequential  ") and "  test_trace.py:" in line for line in lines)
    assert "region input" in text


def ranges(run, **options):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, trace(**options):
        run()
    return [(event.name, {child.name for child in event.cpu_children}) for event in profiler.events() if "region" in event.name]


def test_ranges_of_the_profiler(kind):
    """Each has the operators and regions within; a region inside is recomputed in the recompute of the outer region."""

    def run():
        checkpoint(name="outer")(lambda x: KINDS[kind](x * 2).tanh())(leaf(16)).sum().backward()

    inside, outer = {"aten::sin", "aten::cos", "aten::exp"}, {"aten::mul", "forward of region outer/block", "aten::tanh"}
    assert [
        (name, children - {"aten::detach", "aten::empty", "_SaveInput"}) for name, children in ranges(run, profiler_ranges=True)
    ] == [
        *(("forward of region outer", outer), ("forward of region outer/block", inside)),
        *(("recompute of region outer", outer), ("forward of region outer/block", inside)),
        ("recompute of region outer/block", inside),
    ]
    assert ranges(run) == []


def test_traces_nest_and_end():
    with trace() as outer:
        run_function(leaf(3))
        with trace() as inner:
            run_function(leaf(3))
    run_function(leaf(3))
    assert (len(outer.steps[0].regions), len(inner.steps[0].regions)) == (2, 1)


@pytest.mark.parametrize(
    ("run", "traced", "kinds"),
    [
        (run_function, False, {"KeptTensor", "CallHandle"}),
        (run_function, True, {"TrackedTensor", "WatchedCallHandle"}),
        (run_recorded, False, {"KeptTensor", "TrackedTensor", "TapeHandle"}),  # tracked: a tensor from outside
        (run_recorded, True, {"TrackedTensor", "TapeHandle"}),
    ],
)
def test_what_the_graph_holds_tells_what_it_is(run, traced, kinds):
    """Kept tensors, and handles of either kind of region, without a recompute."""
    x = leaf(3)
    with trace() if traced else contextlib.nullcontext():
        y = run(x * 2).sum() + run(x).sum()
    todo, met, found = [y.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in met:
            continue
        met.add(node)
        todo += [after for after, _ in node.next_functions]
        found += [(saved, packed) for saved in saved_in(node) if (packed := packed_in(packed_of(saved))) is not None]
    assert {type(packed).__name__ for _, packed in found} == kinds
    for saved, packed in found:
        if packed.frame is None:
            assert format_path(packed.path) == ("block",)
            assert torch.equal(packed.tensor, saved.unpack_hook(saved.data))
        else:
            described = packed.frame.describe(packed)
            assert described.dtype in (None, saved.unpack_hook(saved.data).dtype)
            assert described.region == ("block",)
