"""Kernels that write by pointer, as Triton's do, and custom functions made of them and of operators."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.autograd import Function

from tests.fuzz.prelude import poke as write

aten = torch.ops.aten


class AtomicSum(Function):
    """Adds up in an output born by ``zeros``, with statistics born by ``full``."""

    @staticmethod
    def forward(ctx, x, w):
        out, most = torch.zeros(x.shape[0], w.shape[1]), torch.full((x.shape[0],), -math.inf)
        write(out, x @ w)
        write(most, x.amax(-1))
        ctx.save_for_backward(x, w, most)
        return out

    @staticmethod
    def backward(ctx, g):
        x, w, most = ctx.saved_tensors
        return g @ w.t() + 0 * most[:, None], x.t() @ g


def _rotated(x, cos, sin):
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Rope(Function):
    """Turns queries and keys in place, and returns views of their copies; ``contiguous`` may not have copied (Liger)."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        turned = [one.transpose(1, 2).contiguous() for one in (q, k)]
        for one in turned:
            write(one, _rotated(one, cos, sin))
        ctx.save_for_backward(cos, sin)
        return tuple(one.transpose(1, 2) for one in turned)

    @staticmethod
    def backward(ctx, gq, gk):
        cos, sin = ctx.saved_tensors
        return *(_rotated(g.transpose(1, 2), cos, -sin).transpose(1, 2) for g in (gq, gk)), None, None


class SwiGLU(Function):
    """Writes its gradients over what it saved, in backward (Liger)."""

    @staticmethod
    def forward(ctx, a, b):
        out = torch.empty_like(a)
        write(out, F.silu(a) * b)
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        ga, gb = g * b * s * (1 + a * (1 - s)), g * a * s
        write(a, ga)
        write(b, gb)
        return a, b


class ForwardSwiGLU(Function):
    """Writes the gate's activation over the gate, in forward, and returns a product in the memory of the other."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a.clone(), b.clone())
        write(a, F.silu(a))
        write(b, a * b)
        return b.view_as(b)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * b * s * (1 + a * (1 - s)), g * a * s


class RMSNorm(Function):
    """Of a kernel which fills an empty output and a statistic."""

    @staticmethod
    def forward(ctx, x, w):
        out, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
        write(scale, x.square().mean(-1, keepdim=True).add(1e-6).rsqrt())
        write(out, x * scale * w)
        ctx.save_for_backward(x, w, scale)
        return out

    @staticmethod
    def backward(ctx, g):
        x, w, scale = ctx.saved_tensors
        gw = g * w
        gx = scale * (gw - x * scale * scale * (gw * x).mean(-1, keepdim=True))
        return gx, (g * x * scale).sum(tuple(range(x.dim() - 1)))


class PureRMSNorm(Function):
    """Of operators alone."""

    @staticmethod
    def forward(ctx, x, w):
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx, g):
        return RMSNorm.backward(ctx, g)


class PureRope(Function):
    """Of operators alone."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(_rotated(one.transpose(1, 2), cos, sin).transpose(1, 2) for one in (q, k))

    @staticmethod
    def backward(ctx, gq, gk):
        return Rope.backward(ctx, gq, gk)


class PureSwiGLU(Function):
    """Of operators alone."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * b * s * (1 + a * (1 - s)), g * a * s


class Statistics(Function):
    """Writes to a buffer handed in, which it marks."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.mark_dirty(buffer)
        write(buffer, x.mean(0))
        ctx.save_for_backward(x)
        return x - buffer, buffer

    @staticmethod
    def backward(ctx, g, _):
        return g - g.mean(0, keepdim=True), None


class UnmarkedStatistics(Function):
    """Writes to a buffer handed in, and says nothing."""

    @staticmethod
    def forward(ctx, x, buffer):
        write(buffer, x.mean(0))
        ctx.save_for_backward(x)
        return x - buffer

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0, keepdim=True), None


class Dirty(Function):
    """Writes to its argument, marks and returns it, and saves what it was."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        write(x, x.sin())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Unmarked(Function):
    """Writes to its argument, unmarked, and returns something else."""

    @staticmethod
    def forward(ctx, x):
        out = x.cos()
        write(x, x.sin())
        ctx.save_for_backward(x.detach())
        return out

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0]


class Several(Function):
    """Returns results, a view of an argument, None and a number, and saves None between tensors."""

    @staticmethod
    def forward(ctx, x, y, factor):
        out, other = torch.zeros_like(x), torch.ones_like(y)
        write(out, x * factor)
        write(other, y.exp())
        ctx.factor = factor
        ctx.save_for_backward(other, None, x)
        return out, None, y.view(-1), 7, other

    @staticmethod
    def backward(ctx, gx, _, gy, __, go):
        other, none, x = ctx.saved_tensors
        assert none is None
        return gx * ctx.factor + 0 * x, gy.view_as(other) + go * other, None


class Inner(Function):
    """Saves what a kernel filled."""

    @staticmethod
    def forward(ctx, x):
        out = torch.zeros_like(x)
        write(out, x.tanh())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * (1 - out * out)


class Outer(Function):
    """Calls another function in its forward."""

    @staticmethod
    def forward(ctx, x):
        inner = Inner.apply(x * 2)
        write(x, inner)
        ctx.save_for_backward(x)
        return inner * 3

    @staticmethod
    def backward(ctx, g):
        (inner,) = ctx.saved_tensors
        return g * 6 * (1 - inner * inner)


class Drops(Function):
    """Draws random numbers, of the default generator and of one of its own."""

    @staticmethod
    def forward(ctx, x, p):
        mask = torch.zeros_like(x)
        noise = torch.empty_like(x).bernoulli_(1 - p) * torch.rand(x.shape[-1])
        write(mask, noise)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class Cast(Function):
    """Computes as autocast says."""

    @staticmethod
    def forward(ctx, x, w):
        product = x @ w
        out = torch.zeros_like(product)
        write(out, product)
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx, g):
        x, w, out = ctx.saved_tensors
        assert out.dtype is g.dtype
        return (g.to(w.dtype) @ w.t()).to(x.dtype), (x.t() @ g.to(x.dtype)).to(w.dtype)


class SetUp(Function):
    """Has a ``setup_context``, so that its forward gets no ``ctx``, and an argument of a default."""

    @staticmethod
    def forward(x, y, options=(1.0, {"bias": 0.5})):
        gate = torch.zeros_like(y)
        write(gate, torch.sigmoid(y * options[0] + options[1]["bias"]))
        return x * gate, gate

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, options = inputs
        ctx.scale = options[0]
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        x, gate = ctx.saved_tensors
        return g * gate, g * x * gate * (1 - gate) * ctx.scale, None


class Lists(Function):
    """Gets tensors in containers, which autograd does not see."""

    @staticmethod
    def forward(ctx, x, held):
        scale, (shift, *_) = held["scale"], held["shifts"]
        out = torch.zeros_like(x)
        write(out, x * scale + shift)
        ctx.save_for_backward(scale)
        return out

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class Identity(Function):
    """Returns its argument as it is."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class AsksForGradients(Function):
    """Computes what ``needs_input_grad`` asks for, and looks at the arguments."""

    @staticmethod
    def forward(ctx, x, y):
        assert ctx.needs_input_grad == (x.requires_grad, y.requires_grad)
        assert not torch.is_grad_enabled()
        saved = [one.cos() if needed else None for one, needed in zip((x, y), ctx.needs_input_grad, strict=True)]
        for one in saved:
            if one is not None:
                write(one, one * 2)
        ctx.save_for_backward(*saved)
        return x.sin() + y.sin()

    @staticmethod
    def backward(ctx, g):
        return tuple(None if one is None else g * one / 2 for one in ctx.saved_tensors)
