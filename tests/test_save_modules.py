"""``save_modules``, ``attention_saveable`` and ``norms_recomputed``: what runs again, in regions of every form."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ckpt_hooks import (
    apply_checkpointing,
    checkpoint,
    checkpoint_region,
    create_selective_checkpoint_contexts,
    trace,
)
from ckpt_hooks.policies import (
    attention_saveable,
    dots_saveable,
    everything_saveable,
    norms_recomputed,
    nothing_saveable,
    save_from_both_policies,
    save_modules,
)
from tests.fuzz.prelude import poke
from tests.measure import Log, same_bits
from tests.test_save_indices import Kept


class Attention(nn.Module):
    """Attention of two heads; four of the six products of a layer, a third of their cost."""

    def __init__(self, width=16):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width=16):
        super().__init__()
        self.self_attn, self.norm, self.mlp_norm = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Layers, each called as ``call`` says."""

    def __init__(self, layers=3, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.call = nn.ModuleList(Layer() for _ in range(layers)), call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm


def step(model, x):
    """Returns the gradients, and the products of a step in floating-point operations."""
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        model(x).square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    # Attention's own are counted by torch 2.15, and not before.
    counts = counter.get_flop_counts()["Global"]
    return grads, sum(count for op, count in counts.items() if op in PRODUCTS)


@pytest.fixture
def x():
    return torch.randn(2, 5, 16, requires_grad=True)


def region(policy, function, *args):
    with checkpoint_region(policy=policy):
        return function(*args)


FORMS = {
    "checkpoint": lambda policy: Model(call=lambda layer, x: checkpoint(policy=policy)(layer)(x)),
    "function": lambda policy: Model(call=lambda layer, x: checkpoint(policy=policy)(lambda x: layer(x))(x)),
    "contexts": lambda policy: Model(
        call=lambda layer, x: checkpoint(layer, x, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    ),
    "block": lambda policy: Model(call=lambda layer, x: region(policy, layer, x)),
    "applied": lambda policy: applied(policy),
    "recorded": lambda policy: applied(policy, recorded=True),
    "in a checkpoint": lambda policy: Model(call=lambda layer, x: checkpoint(lambda x: region(policy, layer, x), x)),
    "in a region": lambda policy: Model(call=lambda layer, x: region(None, checkpoint(policy=policy)(layer), x)),
}
ALL = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def applied(policy, **options):
    model = Model()
    apply_checkpointing(model, Layer, policy=policy, **options)
    return model


def flops_of(form, policy, x):
    torch.manual_seed(0)
    return step(form(policy), x)


@ALL
def test_attention_is_kept(form, x):
    """A step has 10 ninths of its products, for 11 ninths without a policy. The last product of a region is needed nowhere."""
    torch.manual_seed(0)
    plain, flops = step(Model(), x)
    for policy, products in ((save_modules("self_attn"), 10), (everything_saveable, 9), (nothing_saveable, 11)):
        grads, found = flops_of(form, policy, x)
        assert all(map(same_bits, grads, plain))
        if form is FORMS["in a checkpoint"]:  # which runs the layer once more, and brings the block back then
            products = 13 - (products == 9)
        assert found / flops == pytest.approx(products / 9), policy


BOTH = save_from_both_policies(save_modules("mlp"), attention_saveable)


@ALL
@pytest.mark.parametrize("policy", [attention_saveable, norms_recomputed, BOTH, save_modules(nn.Linear)], ids=repr)
def test_bitwise(form, policy, x):
    torch.manual_seed(0)
    models = Model(), form(policy)
    models[1].load_state_dict(models[0].state_dict())
    for cast in contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16):
        with cast:
            (plain, _), (found, _) = (step(model, x) for model in models)
        assert all(map(same_bits, found, plain))


def ran_again(run, *args):
    """Returns the operators that run again in backward, by name."""
    with Kept() as seen:
        run(*args).square().sum().backward()
    return {name.removeprefix("aten."): number for name, number in seen.again.items() if number}


def written_out(q, k, v):
    return F.dropout((q @ k.mT / 2).softmax(-1), 0.1) @ v


def by_math(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


KINDS = {
    "written out": written_out,
    "math": by_math,
    "math and dropout": lambda *given: by_math(*given, dropout_p=0.2),
    "a mask with gradients": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q @ k.mT),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_attention_without_a_kernel_of_its_own(kind):
    """The product with the weights is kept. The weights, which backward reads, are computed again."""
    q = torch.randn(2, 2, 5, 4, requires_grad=True)
    found = {
        policy: ran_again(checkpoint(policy=policy)(lambda q: kind(q, q, q).sin()), q) for policy in (None, attention_saveable)
    }
    assert found[None]["bmm.default"] - found[attention_saveable]["bmm.default"] == 1
    assert any("softmax" in name for name in found[attention_saveable])


class RMSNorm(nn.Module):
    """As in Llama: written of elementwise operators, with casts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = x.to(torch.float32)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Gated(nn.Module):
    """A gated MLP after a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate, self.down = RMSNorm(), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_norms_and_gates_that_are_written_out_run_again(x):
    cheap = {"silu.default", "mul.Tensor", "pow.Tensor_Scalar", "mean.dim", "rsqrt.default", "view.default", "t.default"}
    cheap.add("_unsafe_view.default")  # of 2.15
    found = ran_again(checkpoint(policy=norms_recomputed)(Gated()), x)
    assert {"silu.default", "mul.Tensor"} <= set(found) <= cheap


class ByKernel(torch.autograd.Function):
    """A custom function whose results a kernel writes, as Triton's do, and which saves what it got."""

    calls = Log()

    @staticmethod
    def forward(ctx, x):
        ByKernel.calls.append(1)
        out, saved = torch.empty_like(x), torch.empty_like(x)
        poke(out, x.sin())
        poke(saved, x.cos())
        ctx.save_for_backward(x, saved)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, saved = ctx.saved_tensors
        return grad * saved + 0 * x


class Kernels(nn.Module):
    """Calls such a function, in a module and out of it."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Module()
        self.inside.forward = lambda x: ByKernel.apply(x).exp()

    def forward(self, x):
        return ByKernel.apply(self.inside(x)).cos()


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, 2),
        (save_modules("inside"), 1),
        (save_modules(Kernels), 0),
        (save_from_both_policies(dots_saveable, save_modules("inside")), 1),
        (attention_saveable, 2),
        (norms_recomputed, 0),
    ],
    ids=repr,
)
def test_kernels_of_custom_functions(policy, again, x):
    """An attention by Triton runs once a step, and not twice (FastVideo #1410)."""
    module = Kernels()
    module(x).sum().backward()
    expected, x.grad = x.grad, None
    for form in (lambda policy: checkpoint(policy=policy)(module), lambda policy: checkpoint_region(policy=policy)(module)):
        ByKernel.calls.clear()
        form(policy)(x).sum().backward()
        assert len(ByKernel.calls) == 2 + again
        assert same_bits(x.grad, expected)
        x.grad = None


def test_copies_and_pickles(x):
    policy = save_modules("self_attn", nn.LayerNorm)
    model = applied(policy)
    model(x)
    for other in pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy):
        assert repr(other) == repr(policy) == "<save_modules: keeps the results of what runs in modules 'self_attn', LayerNorm>"
    assert ran_again(copy.deepcopy(model), x)["addmm.default"] == 3
    assert ran_again(pickle.loads(pickle.dumps(model.layers[0])), x)["addmm.default"] == 1


def test_tables_and_traces_name_the_policy(x):
    model = Model()
    handle = apply_checkpointing(model, {"layers.0": save_modules("self_attn"), "layers.*": norms_recomputed}, recorded=True)
    assert re.search(r"layers\.0 .* save_modules", str(handle))
    assert re.search(r"layers\.1-2 .* norms_recomputed", str(handle))
    with trace() as found:
        model(x).sum().backward()
    assert "modules 'self_attn'" in found.steps[0].regions[0].policy


@pytest.mark.parametrize("policy", [save_modules("self_atn"), save_modules("q.", nn.Conv2d)])
def test_modules_that_never_run_are_told_of(policy, x):
    run = checkpoint(policy=policy)(Layer())
    run(x)
    run(x)
    with pytest.warns(UserWarning, match="names modules that none of the first 3 regions under it had"):
        run(x)
    run(x)
    run = checkpoint(policy=save_modules("mlp"))(Layer())
    for _ in range(5):
        run(x)
