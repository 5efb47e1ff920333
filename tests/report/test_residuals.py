"""Reports on saved tensors: reasons, places, and that nothing is changed by a look."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region
from ckpt_hooks.policies import save_ops
from ckpt_hooks.report import (
    Reason,
    print_saved_residuals,
    saved_residuals,
    saved_tensors_report,
    trace,
)
from tests import golden
from tests.behaviours.runs import same
from tests.measure import CountOps, Frames, SavesItsResult, allocated, leaf
from tests.report.models import INPUTS, RUNS, Block, Convolution, Layer, Net, in_checkpoint, in_region

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten


def reasons(report):
    """Returns the reasons with their bytes, without random states, which depend on the tests before."""
    return {reason: nbytes for reason, nbytes in report.by_reason.items() if reason != "random state"}


def only(report, reason):
    """Returns the one entry with a reason."""
    (entry,) = (entry for entry in report.tensors if entry.reason is reason)
    return entry


def test_entries_of_a_plain_module():
    """Parameters and arguments by name, buffers, and saved tensors with operator, line and module."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x):
            return self.layers[1](self.layers[0](x).tanh() * self.mask).sum()

    model, x = Model(), torch.randn(2, 4)
    report = saved_residuals(model, x)
    found = {(entry.reason.value, entry.name, entry.operator, entry.module) for entry in report.tensors}
    assert found == {
        ("argument", "args[0]", None, "layers.0"),
        ("parameter", "layers.1.weight", None, "layers.1"),
        ("outside", "mask", None, ""),
        ("saved", None, "aten.tanh.default", ""),
        ("saved", None, "aten.mul.Tensor", ""),
    }
    assert reasons(report) == {"argument": 32, "parameter": 64, "outside": 16, "saved": 64}
    assert (report.total_bytes, report.added_bytes) == (176, 64)
    assert {entry.site.partition(":")[0] for entry in report.tensors} == {"test_residuals.py"}
    assert all(entry.saved_by for entry in report.tensors)
    assert report.dropped == ()


def test_a_storage_is_billed_once_with_its_views():
    x = leaf(4, 4)

    def function(x):
        h = x.exp()
        return (h[:2].sin() + h.view(2, 8)[:, :4].cos()).sum()

    entry = only(saved_residuals(function, x), Reason.SAVED)
    assert entry.nbytes == 128
    assert [(view.shape, view.nbytes, view.saved_by) for view in entry.views] == [
        ((4, 4), 128, ("ExpBackward0",)),
        ((2, 4), 64, ("SinBackward0", "CosBackward0")),
    ]


def test_what_a_region_drops_is_listed_apart():
    x = leaf(4)

    def function(x):
        h = (x * 2).exp()
        return (h.sin() * h).sum()  # saves h twice

    report = saved_residuals(checkpoint(name="block")(function), x)
    assert reasons(report) == {"saved": 8}  # the scalar, a tensor that autograd saves past hooks; a leaf costs a region nothing
    assert report.dropped_bytes == 64
    assert {(entry.operator, entry.region) for entry in report.dropped} == {
        ("aten.exp.default", ("block",)),
        ("aten.sin.default", ("block",)),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_known_of_dropped_tensors():
    """That one was overwritten; no shape where none is compared, and of a nested tensor."""
    x = leaf(4)
    with checkpoint_region():
        h = x * 2
        lost = h.sin()
        h.mul_(2)
    unchecked = checkpoint(determinism_check="none")(lambda x: (x * 2).sin())(x)
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]).requires_grad_()
    with checkpoint_region():
        nested = (parts * 2).relu()
    found = [saved_tensors_report(y).dropped for y in (lost, unchecked, nested)]
    assert [[(entry.reason.value, entry.shape) for entry in entries] for entries in found] == [
        [("lost", None)],
        [("dropped", None)],
        [("dropped", None)],
    ]


def test_what_a_backward_brought_back_and_nobody_took():
    """It is held as long as that backward may ask for it."""
    x, found = leaf(4), []
    one, other = checkpoint(lambda x: ((x * 2).sin(), (x * 3).exp()), x)

    def look(*_):
        found.append(saved_tensors_report((one, other)).by_reason.get("recomputed", 0))

    hidden = one.grad_fn.register_hook(look)
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    look()
    assert found == [32, 0]
    hidden.remove()


def test_reasons_of_a_function_region():
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("calls", torch.zeros(5000))
    w, x = leaf(4, 4), leaf(4, 4)

    def function(h):
        norm.calls.add_(1)
        return norm((h @ w).float()).sin().sum()

    def reported(policy):
        return saved_residuals(lambda x: checkpoint(policy=policy, name="block")(function)(x.sin()), x)

    kept = only(reported(save_ops(aten.mm.default)), Reason.POLICY)
    assert (kept.operator, kept.region) == ("aten.mm.default", ("block",))
    report = reported(None)
    assert only(report, Reason.INPUT).operator == "aten.sin.default"
    assert only(report, Reason.STATE).why == "state that the function reaches"
    assert {entry.name for entry in report.tensors if entry.reason is Reason.OUTSIDE} >= {"running_mean", "running_var"}


def test_hooks_of_the_users():
    """Their objects are looked into, where these show tensors."""
    x = leaf(4)

    def copied(x):
        with torch.autograd.graph.save_on_cpu():
            return x.sin().exp().sum()

    def opaque(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: {tensor.shape}, lambda packed: None):
            return x.sin().exp().sum()

    report = saved_residuals(copied, x)
    sizes = [(entry.nbytes, "of unknown size" in entry.why) for entry in report.tensors]
    assert sizes == [(0, True), (32, False)]  # the first holds x itself, a leaf
    hidden = [entry for entry in saved_residuals(opaque, x).tensors if entry.reason is Reason.HOOKS]
    assert [entry.nbytes for entry in hidden] == [0] * len(hidden) != []
    assert "of unknown size" in hidden[0].why


class KeepsOnCtx(torch.autograd.Function):
    """Keeps tensors past ``save_for_backward``."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.double, ctx.more = x * 2, [x + 1]
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


PROGRAMS = {
    "views, in place": lambda x: ((x * 2).view(4, 4)[1:].exp().mul(3).sin_().cos()).sum(),
    "custom function": lambda x: SavesItsResult.apply(x * 2).sum(),
    "attributes of a custom function": lambda x: KeepsOnCtx.apply(x * 2).sum(),
    "new tensors": lambda x: (x * torch.tensor([2.0] * 16) * torch.randn(16)).sum(),
    "lists": lambda x: torch.stack([row.sin() for row in (x * 1).view(4, 4).unbind()]).prod(0).sum(),
    "indices": lambda x: (x * 1)[torch.arange(16) > 3].sum(),
    "loss": lambda x: nn.functional.cross_entropy((x * 1).view(4, 4), torch.arange(4)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_bytes_of_programs(program):
    x = leaf(16)
    program(x)
    y, nbytes = allocated(lambda: program(x))
    live = saved_tensors_report(y, known=x)
    report = saved_residuals(program, x)
    assert report.added_bytes + y.nbytes == nbytes
    assert live.added_bytes == report.added_bytes


def hooked(pack, unpack):
    def program(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return ((x * 1).sin().exp() * leaf(16)).sum()

    return program


def dropping(x):
    """An inner region and the outer one drop the same tensor; the caller has others."""
    with checkpoint_region(name="outer"):
        h = x.sin()
        with checkpoint_region(name="inner", policy=save_ops(aten.cos.default)):
            y = h.exp().cos().view(4, 4).sin()
        y = checkpoint(lambda y: (y * x.view(4, 4)).exp().sin(), y).tanh()
    return y.sum() + h.cos().sum()


OTHERS = {
    "sparse": lambda x: (torch.eye(16, dtype=x.dtype).to_sparse() @ (x * 1).view(16, 1)).sum(),
    "sparse, held": lambda x: torch.sparse.mm((x * 1).view(4, 4).to_sparse(), torch.ones(4, 4, dtype=x.dtype)).sum(),
    "torch's": lambda x: torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x * 1, use_reentrant=False).sum(),
    "packed": hooked(lambda tensor: (tensor, [tensor * 2]), lambda packed: packed[0]),
    "opaque": hooked(lambda tensor: {tensor.shape}, lambda packed: None),
    "as it is": hooked(lambda tensor: tensor, lambda packed: packed),
    "regions": dropping,
    "regions with hooks": lambda x: checkpoint(hooked(lambda tensor: (tensor,), lambda packed: packed[0]), x * 1),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x * 2).conj().exp()).sum(),
    "empty": lambda x: (x * torch.empty(16, dtype=x.dtype).fill_(2)).sum() + x[:0].exp().sum(),
    "no gradients": lambda x: x.detach().exp().sum(),
}


@pytest.mark.usefixtures("no_self_check")
def test_all_reports_say():
    """Programs, and layers under each kind of region, before they run and in live graphs."""
    lines = []
    for name, program in {**PROGRAMS, **OTHERS}.items():
        torch.manual_seed(0)  # else a random state might be that of a region before
        x = leaf(16)
        lines += [f"== {name}", "" if name == "torch's" else str(saved_residuals(program, x))]  # torch 2.11 has more tensors
        lines += ["-- live", str(saved_tensors_report(program(x), known=x))]
    for name, run in RUNS.items():
        torch.manual_seed(0)
        net, x = Net(Convolution if name == "region, policy" else Layer, run), torch.ones(8, 32, requires_grad=True)
        x = x.view(1, 4, 8, 8) if name == "region, policy" else x
        lines += [f"== {name}", str(saved_residuals(net, x)), "-- live", str(saved_tensors_report(net(x), known=[x]))]
    golden.check("residuals_of_all", "\n".join(lines))


def test_memory_that_no_node_shows():
    """The function inside of ``CopySlices`` saves a tensor; only freeing the graph tells. Another is held by the program."""
    held = []

    def program(x):
        held[:] = [x + 1]
        h = x * 1.5
        h[:4].mul_(x[4:8].exp())
        return h.sum()

    x = leaf(16)
    y, nbytes = allocated(lambda: program(x))
    report = saved_residuals(program, x)
    assert report.added_bytes + y.nbytes + held[0].nbytes == nbytes
    assert report.by_reason["unseen"] == x[4:8].nbytes
    assert saved_tensors_report(y, known=x).added_bytes < report.added_bytes


@pytest.mark.parametrize("run", ["none", "checkpoint, policy", "region in checkpoint"])
@pytest.mark.parametrize("layer", [Convolution, Block])
def test_the_function_runs_as_ever(layer, run):
    """Random streams, buffers and results are those of a plain call."""
    torch.manual_seed(0)
    x = torch.randn(INPUTS[layer])
    results = []
    for look in (False, True):
        torch.manual_seed(1)
        net = Net(layer, RUNS[run])
        seen = []

        def function(x, net=net, seen=seen):
            seen.append(net(x))
            return seen[0]

        if look:
            saved_residuals(function, x)
        else:
            function(x)
        state = torch.get_rng_state()
        seen[0].backward()
        results.append([seen[0], state, *net.buffers(), *(p.grad for p in net.parameters())])
    assert all(same(one, other) for one, other in zip(*results, strict=True))


def test_nothing_is_left_behind():
    """Graph, frames and storages go; modes, hooks and observers are those from before."""
    x, log, made = leaf(4), Frames(), []

    def program(x):
        h = x.exp()
        made.append(weakref.ref(h.untyped_storage()))
        return checkpoint(torch.sin, h).cos()

    with log:
        report = saved_residuals(program, x)
    assert log.alive() == [False]
    assert [reference() for reference in made] == [None]
    assert report.tensors
    with pytest.raises(KeyError):
        saved_residuals(lambda x: {}["missing"], x)
    with CountOps() as ops:
        checkpoint(torch.sin, x)
    assert ops.counts["sin"] == 1


def test_freed_graphs_and_graphs_without_gradients():
    x = leaf(4)
    y = SavesItsResult.apply(x * 2).sin().sum()
    y.backward()
    assert saved_tensors_report(y).tensors == ()
    with torch.no_grad():
        assert saved_residuals(torch.sin, x).tensors == ()


def test_sizes_without_memory():
    """Under fake tensors a large model is looked at for nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(1 << 15, 1 << 10, requires_grad=True)
        assert saved_residuals(lambda x: x.sin().exp(), x).by_reason == {"argument": 1 << 27, "saved": 1 << 27}
        report = saved_residuals(lambda x: checkpoint(lambda h: h.sin().exp(), x.cos()), x)
        assert reasons(report) == {"argument": 1 << 27, "region input": 1 << 27}


@pytest.mark.parametrize("run", ["none", "checkpoint, policy", "region, policy"])
def test_json(run):
    report = saved_residuals(Net(Block, RUNS[run]), torch.randn(INPUTS[Block]))
    data = json.loads(json.dumps(report.to_json()))
    assert data["total_bytes"] == report.total_bytes == sum(entry["nbytes"] for entry in data["tensors"])
    assert len(data["dropped"]) == len(report.dropped)


@pytest.mark.parametrize("run", [in_checkpoint(), in_region()])
def test_layers_alike_share_a_row(run, capsys):
    net, x = Net(Layer, run), torch.randn(INPUTS[Layer])
    print_saved_residuals(net, x)
    text = capsys.readouterr().out
    assert "regions dropped 1.0 KiB" in text  # of the others the next layer keeps its input, the same tensor
    (row,) = (line for line in text.splitlines() if " region input " in line and "tanh" in line)
    assert "x2" in row
    assert "layers.0-1" in row


@pytest.mark.parametrize("form", [checkpoint, lambda layer, x: checkpoint(lambda x: layer(x), x), in_region()])
def test_views_of_parameters_are_not_dropped(form):
    """As a product of a linear layer saves one; though one of the inputs has the same shape."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8, bias=False))
    x = torch.rand(8, 8, requires_grad=True)
    with trace():
        y = form(layer, x * 1)
    report = saved_tensors_report(y, known=layer)
    dropped = [entry for entry in report.dropped if "mm" in entry.saved_by[0].lower()]
    assert len(dropped) <= 2  # the input of each
    assert report.dropped_bytes == sum(entry.nbytes for entry in report.dropped) <= 3 * x.nbytes
    assert "regions dropped" in str(report)
    assert report.to_json()["is_dropped_exact"] is report.is_dropped_exact


def test_without_a_trace_the_report_does_not_say_how_much_is_dropped():
    """128 nodes save one tensor of 16 KiB."""

    def function(x):
        once = x.sin()
        return sum((once * once).sum() for _ in range(64))

    x = torch.rand(4096, requires_grad=True)
    y = checkpoint(function, x)
    text = str(saved_tensors_report(y))
    assert "how much regions dropped is unknown: to know it, run forward under ckpt_hooks.trace()" in text
    assert "MiB" not in text
    with trace():
        y = checkpoint(function, x)
    assert "regions dropped 16.0 KiB" in str(saved_tensors_report(y))


def test_a_size_that_is_unknown_or_guessed_is_not_exact():
    """Of torch's own regions nothing shows; without a trace, a view of a weight counts."""
    x, weight = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=False)
    assert not saved_tensors_report(y).is_dropped_exact
    z = checkpoint(lambda: torch.nn.functional.linear(x, weight))
    assert not saved_tensors_report(z).is_dropped_exact
    with trace():
        z = checkpoint(lambda: torch.nn.functional.linear(x, weight))
    assert saved_tensors_report(z).is_dropped_exact
