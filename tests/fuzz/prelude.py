"""What programs may name besides torch itself. Scripts get the source of what they use."""

from __future__ import annotations

import contextlib
import contextvars

import torch


class Square(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Tanh(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Gate(torch.autograd.Function):
    """Saves both inputs and an intermediate value, through ``setup_context``."""

    @staticmethod
    def forward(x, y):
        gate = torch.sigmoid(y)
        return x * gate, gate

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, _, gate = ctx.saved_tensors
        return grad * gate, grad * x * gate * (1 - gate)


class Threshold(torch.autograd.Function):
    """Saves a mask that nobody else sees, and nothing for an absent tensor."""

    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.save_for_backward(mask, None)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        mask, _ = ctx.saved_tensors
        return grad * mask


class Scale(torch.autograd.Function):
    """Keeps a number on its context, and a tensor past autograd's eyes."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.sine = x.detach().sin()
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * ctx.sine, None


class ReadsTwice(torch.autograd.Function):
    """Reads what it saved twice in one backward."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y, x * y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors[:2]
        product = ctx.saved_tensors[2]
        return grad * y + 0 * product, grad * ctx.saved_tensors[0] + 0 * x


class TwoOutputs(torch.autograd.Function):
    """Has two outputs and saves both, of which autograd may get a gradient for one alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(sine, cosine)
        return sine, cosine

    @staticmethod
    def backward(ctx, grad_sine, grad_cosine):
        sine, cosine = ctx.saved_tensors
        grad = None
        if grad_sine is not None:
            grad = grad_sine * cosine
        if grad_cosine is not None:
            grad = -grad_cosine * sine if grad is None else grad - grad_cosine * sine
        return grad


class Halve(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Rerun(torch.autograd.Function):
    """Runs itself again in backward, as reentrant checkpointing does: a backward inside a backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x.sin() * x
        return torch.autograd.grad(y, x, grad)[0]


class Straight(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class PlannedError(Exception):
    """What programs raise on purpose."""


class Wrapped(torch.nn.Module):
    """A module out of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Counted(torch.nn.Module):
    """A module that counts its calls in a buffer, on which its output depends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x.sin() * self.calls.clone()


def step_in_backward(leaves):
    """Updates each leaf as soon as its gradient is there, as optimizers that run in backward do."""

    def step(leaf):
        with torch.no_grad():
            leaf.sub_(0.1 * leaf.grad)

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(step)


def copied(tensor):
    return tensor.detach().clone()


def unchanged(tensor):
    return tensor


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


@contextlib.contextmanager
def factor(value):
    token = FACTOR.set(value)
    try:
        yield
    finally:
        FACTOR.reset(token)
