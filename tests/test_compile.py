"""Regions under ``torch.compile``: in one graph, equal to eager, and with no more saved than by torch's checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ckpt_hooks import (
    CheckpointPolicy,
    DeterminismError,
    apply_checkpointing,
    checkpoint,
    checkpoint_chunks,
    checkpoint_loop,
    checkpoint_module,
    checkpoint_name,
    checkpoint_region,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    is_recomputing,
    plan_memory,
    policies,
)
from ckpt_hooks._checkpoint.curried import _class_for
from ckpt_hooks.losses import chunked_cross_entropy
from tests.measure import Frames

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

aten = torch.ops.aten
MM = [aten.mm.default]
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")]


class Block(nn.Module):
    """Two layers, called in several ways."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        return self.two(torch.relu(self.one(x)).sin() * scale)

    def part(self, x):
        return self.two(self.one(x).sin().exp())

    @checkpoint(early_stop=False)
    def decorated(self, x):
        return self.part(x)

    @checkpoint_region(policy=policies.dots_saveable)
    def recorded(self, x):
        return self.part(x)


@checkpoint(name="decorated")
def decorated(x, w):
    return (x @ w).sin().exp()


@checkpoint(policy=MM)
def decorated_with_a_policy(x, w):
    return (x @ w).sin().exp()


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(functools.partial, create_selective_checkpoint_contexts)
torch.manual_seed(0)
block, wrapped = Block(), checkpoint(policy=policies.dots_saveable)(Block())
of_module = checkpoint_module(Block())
of_module_with_a_policy = checkpoint_module(Block(), policy=policies.dots_saveable)
of_module_recorded = checkpoint_module(Block(), recorded=True)
in_chunks = checkpoint_module(Block(), chunks=3, dim=-2)
in_chunks_recorded = checkpoint_module(Block(), chunks=2, recorded=True, policy=policies.dots_saveable)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
w = torch.randn(8, 8, requires_grad=True)
curried, curried_with_a_policy = checkpoint(name="curried"), checkpoint(policy=policies.dots_saveable)
to_sum = [
    w,
    *(p for m in (block, wrapped, of_module, of_module_with_a_policy, of_module_recorded, layers) for p in m.parameters()),
    *(p for m in (in_chunks, in_chunks_recorded) for p in m.parameters()),
]


def function(x, w):
    return (x @ w).sin().exp()


def in_region(x):
    with checkpoint_region():
        return function(x, w)


def frame_in_region(x):
    with checkpoint_region(policy="dots_saveable"):
        return checkpoint(function, x, w).sin()


def named(x):
    with checkpoint_region(policy=policies.save_only_these_names("h")):
        return checkpoint_name((x @ w).sin(), "h").exp()


def policy_made_inside(x):
    with checkpoint_region(policy=policies.save_from_both_policies(policies.save_ops(aten.mm.default), policies.dots_saveable)):
        return function(x, w)


def region_in_region(x):
    with checkpoint_region():
        h = function(x, w)
        with checkpoint_region():
            return h.cos().sin()


def loop(x):
    for layer in layers:
        x = checkpoint(layer, x)
    return x


def counted(x, labels, factor=1.0):
    return torch.nn.functional.cross_entropy(block(x) * factor, labels, reduction="sum"), len(labels)


def local_loss(x):
    def loss(factor, h, labels):
        return (h @ w * labels[:, None]).sum() * factor, len(labels)

    function = functools.partial(loss, 2.0)
    return checkpoint_chunks(function, x, torch.arange(4), chunks=2, chunked="labels", reduce="mean")


OPTIONS = {"determinism_check": "none", "debug": True, "early_stop": False, "preserve_rng_state": False, "name": "x"}

FORMS = {
    "function": lambda x: checkpoint(function, x, w),
    "module": lambda x: checkpoint(block, x),
    "keywords": lambda x: checkpoint(block, x, scale=2.0),
    "options": lambda x: checkpoint(function, x, w, determinism_check="none", preserve_rng_state=False, early_stop=False),
    "method": lambda x: checkpoint(block.part, x),
    "lambda": lambda x: checkpoint(lambda u: function(u, w), x),
    "curried": lambda x: curried(function)(x, w),
    "curried inside": lambda x: checkpoint(name="inside")(function)(x, w),
    "curried with a policy": lambda x: curried_with_a_policy(function)(x, w),
    "curried inside with a policy": lambda x: checkpoint(policy=policies.dots_saveable)(function)(x, w),
    "curried module": lambda x: curried_with_a_policy(block)(x),
    "curried module inside": lambda x: checkpoint(name="inside")(block)(x),
    "curried module inside with a policy": lambda x: checkpoint(policy=policies.dots_saveable)(block)(x),
    "module made in __init__": lambda x: wrapped(x),
    "decorated": lambda x: decorated(x, w),
    "decorated with a policy": lambda x: decorated_with_a_policy(x, w),
    "decorated method": lambda x: block.decorated(x),
    "options inside": lambda x: checkpoint(early_stop=False, name="inside")(function)(x, w),
    "all options inside": lambda x: checkpoint(**OPTIONS)(function)(x, w),
    "list inside": lambda x: checkpoint(policy=[aten.mm.default])(function)(x, w),
    "function inside": lambda x: checkpoint(policy=save_products)(function)(x, w),
    "policy made inside": lambda x: checkpoint(policy=policies.save_every(aten.mm.default, 2))(function)(x, w),
    "context_fn": lambda x: checkpoint(function, x, w, context_fn=contexts(policies.dots_saveable)),
    "context_fn of a function": lambda x: checkpoint(function, x, w, context_fn=contexts(save_products)),
    "nested": lambda x: checkpoint(lambda u: checkpoint(function, u, w).sin(), x),
    "sequential": lambda x: checkpoint_sequential(layers, 3, x),
    "loop": loop,
    "sequential, local functions": lambda x: checkpoint_sequential([lambda h: h @ w, torch.sin, block.part], 2, x),
    "steps": lambda x: checkpoint_loop(block.part, x, 4, 2),
    "steps of a local function": lambda x: checkpoint_loop(
        lambda h: {"h": h["h"] @ w, "t": h["t"] + 1}, {"h": x, "t": 0}, 5, 2
    )["h"],
    "steps of a partial function": lambda x: checkpoint_loop(functools.partial(lambda w, h: (h @ w).sin(), w), x, 4, 2),
    "steps with inputs": lambda x: checkpoint_loop(
        lambda h, row: ((h @ w + row).sin(), {"sum": h.sum(), "n": 1}), x, xs=torch.ones(5, 8), slots=2
    )[0],
    "steps with a list of inputs": lambda x: checkpoint_loop(lambda h, t: (h @ w * t, h.sum()), x, xs=[1, 2, 3], slots=2)[1],
    "steps of a module with a policy": lambda x: checkpoint_loop(wrapped, x, 3, 2),
    "checkpoint_module": lambda x: of_module(x),
    "checkpoint_module with a policy": lambda x: of_module_with_a_policy(x),
    "checkpoint_module, recorded": lambda x: of_module_recorded(x),
    "chunks": lambda x: checkpoint_chunks(block, x, chunks=3),
    "chunks with options": lambda x: checkpoint_chunks(wrapped, x, dim=0, scale=2.0),
    "chunks with options made inside": lambda x: checkpoint_chunks(checkpoint(policy=MM)(function), x, w, chunks=2),
    "chunks of a loss": lambda x: checkpoint_chunks(
        counted, x, torch.arange(4), 2.0, chunked="labels", chunks=2, reduce="mean", check_rows=True
    ),
    "chunks of a cross entropy": lambda x: chunked_cross_entropy(
        x, w.T, torch.arange(4), w[0], chunks=2, softcap=3.0, label_smoothing=0.1, ignore_index=1
    ),
    "chunks in a frame": lambda x: checkpoint(lambda u: checkpoint_chunks(block, u.sin(), chunks=2, dim=-2), x),
    "chunks in a region": lambda x: checkpoint_region()(lambda u: checkpoint_chunks(block, u.sin(), chunks=2))(x),
    "chunks of a local function": lambda x: checkpoint_chunks(lambda h, factor: function(h, w) * factor, x, factor=2.0),
    "chunks of a partial function": lambda x: checkpoint_chunks(functools.partial(torch.mul, other=2.0), x, chunks=2),
    "chunks of a local loss": local_loss,
    "module in chunks": lambda x: in_chunks(x),
    "module in chunks, recorded": lambda x: in_chunks_recorded(x),
    "region": in_region,
    "region as a decorator": lambda x: block.recorded(x),
    "region with names": named,
    "region with a policy made inside": policy_made_inside,
    "region in a region": region_in_region,
    "region in a frame": lambda x: checkpoint(in_region, x),
    "frame in a region": frame_in_region,
}


def gradients(form):
    for parameter in to_sum:
        parameter.grad = None
    torch.manual_seed(3)
    x = torch.randn(4, 8, requires_grad=True)
    y = form(x)
    y.sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in to_sum if parameter.grad is not None)]


def breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # As in a new process: classes made by an eager call hid that Dynamo cannot trace their making.
    _class_for.cache_clear()
    yield
    torch._dynamo.reset()
    assert torch._functorch.config.joint_custom_pass is None
    assert torch.compiler.config.cache_key_tag == ""


#: Forms that are compiled to the end, and those of which a break of the graph would not be an error.
SOME = ("module", "nested", "sequential", "chunks", "curried with a policy", "region with names", "frame in a region")


@pytest.mark.parametrize(
    ("form", "backend", "fullgraph"),
    [
        *((form, "aot_eager", True) for form in FORMS),
        *((form, "aot_eager", False) for form in SOME),
        *(pytest.param(form, "inductor", True, marks=INDUCTOR) for form in SOME),
    ],
)
def test_in_one_graph_as_eager(form, backend, fullgraph):
    if BEFORE_2_13 and "inside" in form:
        pytest.skip("before 2.13 Dynamo does not trace how options and policies are made")
    if BEFORE_2_13 and (form.startswith("checkpoint_module") or "chunks" in form):
        pytest.skip("before 2.13 Dynamo does not trace how the forward is bound")
    found = gradients(torch.compile(FORMS[form], backend=backend, fullgraph=fullgraph))
    assert breaks() == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(found, gradients(FORMS[form]))


FIRST = """
import sys
from typing import Any
import torch
from tests import test_compile

form = test_compile.FORMS[sys.argv[1]]
found = test_compile.gradients(torch.compile(form, backend="aot_eager", fullgraph=True))
assert test_compile.breaks() == 0
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
torch.testing.assert_close(found, test_compile.gradients(form))
"""


@pytest.mark.slow
@pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how options and policies are made")
@pytest.mark.parametrize("form", ["curried module inside with a policy", "list inside", "region with names"])
def test_the_first_thing_that_a_process_does(form):
    subprocess.run([sys.executable, "-c", FIRST, form], check=True)


# What is saved

v, u = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)


def body(x):
    return ((x @ v).sin().exp() @ u).cos().sin().tan()


def saved(form, backend="aot_eager"):
    """Returns the bytes that autograd saves of a compiled function, but for leaves."""
    storages = {}

    def pack(tensor):
        if not (tensor.is_leaf and tensor.requires_grad):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(form, backend=backend, fullgraph=True)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(x)
    y.sum().backward()
    return sum(storages.values())


def of_torch(function, x, policy=None):
    options = {} if policy is None else {"context_fn": functools.partial(torchs_contexts, policy)}
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, **options)


torchs_contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts


def recorded(function, x, policy=None):
    with checkpoint_region(policy=policy):
        return function(x)


def of_ours(function, x, policy=None):
    return checkpoint(policy=policy)(function)(x)


PROGRAMS = {
    "one": lambda region: lambda x: region(body, x),
    "two": lambda region: lambda x: region(body, region(body, x)),
    "nested": lambda region: lambda x: region(lambda x: region(body, body(x)).sin(), x),
    "products": lambda region: lambda x: region(body, x, MM),
}


@pytest.mark.parametrize(
    ("program", "backend"),
    [*((program, "aot_eager") for program in PROGRAMS), pytest.param("nested", "inductor", marks=INDUCTOR)],
)
def test_saved_bytes_are_those_of_torchs_checkpoint(program, backend):
    expected = saved(PROGRAMS[program](of_torch), backend)
    for region in (of_ours, recorded):
        torch._dynamo.reset()
        assert saved(PROGRAMS[program](region), backend) == expected
    torch._dynamo.reset()
    assert saved(PROGRAMS[program](lambda function, x, policy=None: function(x)), backend) > expected


@pytest.mark.parametrize("compiles", ["the model", "the model, and calls it", "its blocks in place", "wrappers of its blocks"])
@pytest.mark.parametrize("applies_first", [True, False])
@pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how the forward is bound")
def test_a_model_is_compiled_before_or_after_its_blocks_become_regions(compiles, applies_first):
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Tanh()) for _ in range(3)]
    model, x = torch.nn.Sequential(*blocks), torch.randn(32, 64)
    if applies_first:
        apply_checkpointing(model, "*")
    compiled = model
    if compiles.startswith("the model"):
        compiled = torch.compile(model, backend="aot_eager")
        if compiles == "the model, and calls it":
            compiled(x)
    for index, block in enumerate(model):
        if compiles == "its blocks in place":
            block.compile(backend="aot_eager")
        elif compiles == "wrappers of its blocks":
            model[index] = torch.compile(block, backend="aot_eager")
    if not applies_first:
        apply_checkpointing(model, "*")
    storages = {}

    def pack(tensor):
        if not (tensor.is_leaf and tensor.requires_grad):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(x)
    assert sum(storages.values()) == 3 * x.nbytes  # inputs of blocks, from which the compiler computes all else again
    y.sum().backward()


@pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how the forward is bound")
def test_a_model_is_compiled_under_a_plan():
    """Regions of a plan are part of the graph, and other shapes are too."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Tanh()) for _ in range(3)]
    model = torch.nn.Sequential(*blocks)
    x, other = torch.randn(512, 64), torch.randn(32, 64)
    plan = plan_memory(model, lambda model: model(x).sum().backward(), 0.5, blocks=list("012"))
    model.zero_grad()
    assert any(block.kept is not None for block in plan.blocks)
    expected = [model(one).detach() for one in (x, other)]
    with plan.apply():
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.warns(UserWarning, match="A plan is for steps that run eagerly. torch.compile keeps other results"):
            assert all(torch.equal(compiled(one), y) for one, y in zip((x, other), expected, strict=True))
        compiled(x).sum().backward()
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how the forward is bound")
@pytest.mark.filterwarnings("ignore:A plan is for steps that run eagerly")
@pytest.mark.parametrize("recorded", [True, False])
def test_compiled_blocks_with_regions_inside_keep_nothing(recorded):
    """Dynamo makes no regions inside of a block: the block is one, and not plain, which may not fit."""
    inner = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(one, torch.nn.Tanh()) for one in inner))
    x = torch.randn(32, 64)
    plan = plan_memory(model, lambda model: model(x).sum().backward(), 0.5, blocks=list("012"))
    blocks = [dataclasses.replace(block, kept=(), parts=("0",), recorded=recorded) for block in plan.blocks]
    whole = [dataclasses.replace(block, kept=(), recorded=True) for block in plan.blocks]
    nbytes = []
    for of in (blocks, whole):
        torch._dynamo.reset()
        with dataclasses.replace(plan, blocks=tuple(of)).apply(model):
            nbytes.append(saved(model))
    assert nbytes[0] == nbytes[1] < saved(model)


@dataclasses.dataclass
class Results:
    """What a block returns."""

    first: Any
    second: Any


def test_policies_of_regions_decide():
    def second(ctx, op, *args, **kwargs):
        is_second = op is aten.mm.default and ctx.index > 0
        return CheckpointPolicy.MUST_SAVE if is_second else CheckpointPolicy.PREFER_RECOMPUTE

    def of_names(x):
        with checkpoint_region(policy=policies.save_only_these_names("h")):
            return checkpoint_name((x @ v).sin(), "h").exp().cos()

    def of_names_in_containers(x):
        with checkpoint_region(policy=policies.save_only_these_names("h")):
            named = checkpoint_name(Results({"h": [(x @ v).sin()]}, "other"), "h")
            return named.first["h"][0].exp().cos()

    size = 32 * 64 * 4
    nothing = saved(PROGRAMS["one"](recorded))
    kept = []
    for program in (
        lambda x: recorded(body, x, second),
        of_names,
        of_names_in_containers,
    ):
        torch._dynamo.reset()
        kept.append((saved(program) - nothing) // size)
    weight = 64 * 64 // (32 * 64)  # the transposed weight of a kept product is no leaf
    assert kept == [1 + weight, 1, 1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
def test_the_compile_cache_tells_regions_apart(monkeypatch, tmp_path):
    """By their places and policies; a function as a policy is never found there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def place(early):
        def form(x):
            h = x @ v
            if early:
                with checkpoint_region():
                    h = h.sin().exp()
                return (h @ u).cos().sin().tan()
            with checkpoint_region():
                h = h.sin().exp() @ u
            return h.cos().sin().tan()

        return form

    def never(ctx, op, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    forms = [
        lambda: body,
        lambda: lambda x: recorded(body, x),
        lambda: lambda x: recorded(body, x, policies.dots_saveable),
        lambda: place(True),
        lambda: place(False),
    ]
    found = []
    for _ in range(2):
        for form in forms:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            size = saved(form(), "inductor")
            found.append((size, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]))
    assert [size for size, _ in found[:5]] == [size for size, _ in found[5:]]
    assert len({size for size, _ in found[:3]}) == 3
    assert [hits for _, hits in found] == [0] * 5 + [1] * 5
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        assert saved(lambda x: recorded(body, x, never), "inductor") == found[1][0]
        assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 0


# What Dynamo gives up

ran: list[bool] = []


def with_a_break(x):
    h = (x @ w).sin()
    torch._dynamo.graph_break()
    ran.append(is_recomputing())
    return h.exp().cos()


def with_a_branch(x):
    h = (x @ w).sin()
    return (h * 2 if h.sum() > 0 else h).exp().cos()


BROKEN = {
    "frame": lambda f: lambda x: checkpoint(f, x).sin(),
    "frame with a policy": lambda f: lambda x: checkpoint(policy=policies.dots_saveable)(f)(x).sin(),
    "region": lambda f: lambda x: recorded(f, x).sin(),
    "region with a policy": lambda f: lambda x: recorded(f, x, policies.dots_saveable).sin(),
    "region in a frame": lambda f: lambda x: checkpoint(lambda x: recorded(f, x), x),
    "frame in a region": lambda f: lambda x: recorded(lambda x: checkpoint(f, x), x),
}


@pytest.mark.parametrize("function", [with_a_break, with_a_branch])
@pytest.mark.parametrize("form", BROKEN)
def test_after_a_graph_break_in_the_body_regions_are_the_packages_own(form, function):
    """Python runs the body, and Dynamo compiles nothing of what runs regions."""
    program = BROKEN[form](function)
    ran.clear()
    expected = gradients(program)
    forwards = list(ran)
    compiled, regions = torch.compile(program, backend="aot_eager"), Frames()
    for _ in range(2):
        ran.clear()
        with regions:
            found = gradients(compiled)
        torch.testing.assert_close(found, expected)
        assert ran == forwards
    assert len(regions.frames) in (2, 4)
    assert breaks() <= 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("form", ["function", "curried with a policy", "nested", "region", "region in a frame"])
def test_compiled_autograd(form, compiled):
    """A compiled backward asks regions for tensors, and does not compile how they come back."""
    expected = gradients(FORMS[form])
    program = torch.compile(FORMS[form], backend="aot_eager") if compiled else FORMS[form]
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(lambda loss: loss.backward(), backend="aot_eager")
        for parameter in to_sum:
            parameter.grad = None
        torch.manual_seed(3)
        x = torch.randn(4, 8, requires_grad=True)
        y = program(x)
        backward(y.sum())
    found = [y.detach(), x.grad, *(parameter.grad for parameter in to_sum if parameter.grad is not None)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", ["function", "curried with a policy", "decorated", "region", "region in a frame"])
def test_export_runs_functions_plainly(form, strict):
    class Model(nn.Module):
        def forward(self, x):
            return FORMS[form](x)

    x = torch.randn(4, 8)
    program = torch.export.export(Model(), (x,), strict=strict)
    names = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "detach" not in name] == ["matmul.default", "sin.default", "exp.default"]
    torch.testing.assert_close(program.module()(x), Model()(x))


@pytest.mark.parametrize("form", BROKEN)
def test_compiled_functions_inside_are_compiled_once(form):
    """Neither a rerun nor a later step compiles them again."""
    compiled = torch.compile(lambda x: (x @ w).sin().exp(), backend="aot_eager")
    program = BROKEN[form](lambda x: compiled(x).cos())
    expected = gradients(BROKEN[form](lambda x: function(x, w).cos()))
    for _ in range(4):
        torch.testing.assert_close(gradients(program), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# Compiled functions inside of regions


def test_a_recompute_by_another_graph_names_the_compiler():
    """Dynamo tries the latest graph first: here one with the number as a tensor, which is saved too."""
    compiled = torch.compile(lambda x, scale: ((x @ w).sin() * scale).exp() @ w, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(compiled, x, 2.5)
    checkpoint(compiled, x, 3.5)
    with pytest.raises(DeterminismError, match=r"a function compiled by torch\.compile"):
        y.sum().backward()
    torch._dynamo.reset()
    with checkpoint_region():
        z = compiled(x, 2.5)
    with checkpoint_region():
        compiled(x, 3.5)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    (expected,) = torch.autograd.grad((((x @ w).sin() * 2.5).exp() @ w).sum(), x)
    torch.testing.assert_close(gradient, expected)


# Policies by module, and loops


def products_again(model):
    """Returns the number of products in the graph of backward that are forward's, after a check against the eager model."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def count(graph, inputs):
        found.append(sum(node.target is aten.addmm.default for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    x = torch.randn(4, 8, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(grads, [x.grad, *(parameter.grad for parameter in model.parameters())])
    return found


class Deep(nn.Module):
    """Four products in an attention, and one after it."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 8)

    def forward(self, x):
        return self.mlp(self.self_attn(x).sin()).sin()


class Stack(nn.Module):
    """One layer, called by a function."""

    def __init__(self, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.call = nn.ModuleList([Deep()]), call

    def forward(self, x):
        return self.call(self.layers[0], x)


def in_block(layer, x, policy):
    with checkpoint_region(policy=policy):
        return layer(x)


def applied(policy, **options):
    model = Stack()
    apply_checkpointing(model, "layers.*", policy=policy, **options)
    return model


BY_MODULE = {
    "call": lambda policy: Stack(lambda layer, x: checkpoint(policy=policy)(layer)(x)),
    "block": lambda policy: Stack(functools.partial(in_block, policy=policy)),
    "applied": applied,
}


@pytest.mark.skipif(BEFORE_2_13, reason="before 2.13 Dynamo does not trace how options and policies are made")
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((form, "layers.*.self_attn") for form in BY_MODULE),
        ("call", "self_attn"),
        ("block", nn.Sequential),
        ("call", "**.self_attn.*"),
    ],
)
def test_policies_by_module_know_the_modules_of_compiled_code(form, name):
    """Of five products the one after the attention is computed again."""
    assert products_again(BY_MODULE[form](policies.save_modules(name))) == [1]
