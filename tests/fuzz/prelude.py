"""What programs may name besides torch itself. Scripts get the source of what they use."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import sys

import torch

import ckpt_hooks

FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


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


class HalveApart(torch.autograd.Function):
    """Writes to its input, which another method says."""

    @staticmethod
    def forward(x):
        return x.mul_(0.5)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Exponential(torch.autograd.Function):
    """Writes to its input, and saves what it wrote."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.exp_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Absorbs(torch.autograd.Function):
    """Writes to one of two inputs, and may get a gradient for one of two outputs alone."""

    @staticmethod
    def forward(x, y):
        return x.add_(y), y.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad, other):
        (y,) = ctx.saved_tensors
        through = None if other is None else other * y.cos()
        return grad, through if grad is None else grad if through is None else grad + through


class Parts(torch.autograd.Function):
    """Has three outputs, of which one has no gradient, and looks at whose gradients are asked for."""

    @staticmethod
    def forward(x, y):
        return x * y, x.sin(), y.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, product, sine, _):
        x, y, _ = ctx.saved_tensors
        found = [None if product is None else product * y, None if product is None else product * x]
        if sine is not None:
            found[0] = sine * x.cos() if found[0] is None else found[0] + sine * x.cos()
        return tuple(one if needed else None for one, needed in zip(found, ctx.needs_input_grad, strict=True))


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


def poke(tensor, content):
    """Gives a tensor other values by its address, as a kernel does that no operator knows of."""
    storage = tensor.untyped_storage()
    image = storage.clone()
    face = torch.empty(0, dtype=tensor.dtype).set_(image, tensor.storage_offset(), tensor.shape, tensor.stride())
    face.copy_(content.detach())
    ctypes.memmove(storage.data_ptr(), image.data_ptr(), storage.nbytes())


class Overwrites(torch.autograd.Function):
    """Has a kernel write over its input, and saves that."""

    @staticmethod
    def forward(ctx, x):
        y = x.cos()
        poke(x, x.sin())
        ctx.save_for_backward(x.detach())
        return y

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.saved_tensors[0].conj()


class Turns(torch.autograd.Function):
    """Has a kernel write over its input, and returns a view of that."""

    @staticmethod
    def forward(ctx, x):
        poke(x, x * 1.5)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.5


class Fills(torch.autograd.Function):
    """Has kernels fill an output born by ``zeros`` and a statistic born by ``full``."""

    @staticmethod
    def forward(ctx, x, y):
        out, scale = torch.zeros_like(x), torch.full_like(y, 3)
        poke(out, x.sin())
        poke(scale, y.tanh())
        ctx.save_for_backward(x, None, scale, out)
        return out, scale.clone()

    @staticmethod
    def backward(ctx, grad, other):
        x, _, scale, out = ctx.saved_tensors
        return grad * x.cos().conj() + 0 * out, other * (1 - scale * scale).conj()


class Noise(torch.autograd.Function):
    """Draws random numbers, which a kernel puts where ones were."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.ones_like(x)
        poke(mask, torch.rand_like(x).round())
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].conj()


class Scratch(torch.autograd.Function):
    """Has a kernel write over what it saved, in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        x, cosine = ctx.saved_tensors
        poke(x, (grad * cosine.conj()).detach())
        return x.detach().clone()


class Marks(torch.autograd.Function):
    """Has a kernel write to a buffer, which it marks."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.mark_dirty(buffer)
        poke(buffer, x.mean().expand_as(buffer))
        return x - buffer, buffer

    @staticmethod
    def backward(ctx, grad, _):
        return grad - grad.mean(), None


class Product(torch.autograd.Function):
    """Has a kernel write over a product made inside."""

    @staticmethod
    def forward(ctx, x):
        flat = x.reshape(1, -1)
        product = flat.t() @ flat
        total = product.sum()
        poke(product, product.sign())
        ctx.save_for_backward(x, product)
        return total

    @staticmethod
    def backward(ctx, grad):
        x, signs = ctx.saved_tensors
        return (2 * grad * x.sum() + 0 * signs.sum()).expand_as(x)


class Box(torch.Tensor):
    """Holds another tensor."""

    def __new__(cls, inner):
        like = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **like)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return Box(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = torch.utils._pytree.tree_map_only(Box, lambda box: box.inner, (args, kwargs or {}))
        boxed = torch.utils._pytree.tree_map_only(torch.Tensor, Box, function(*inner[0], **inner[1]))
        return torch.utils._python_dispatch.return_and_correct_aliasing(function, args, kwargs or {}, boxed)


class Boxed(torch.autograd.Function):
    """Puts a tensor into a box."""

    @staticmethod
    def forward(ctx, x):
        return Box(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return Unboxed.apply(grad)


class Unboxed(torch.autograd.Function):
    """Takes it out."""

    @staticmethod
    def forward(ctx, box):
        return box.inner.clone() if isinstance(box, Box) else box.clone()

    @staticmethod
    def backward(ctx, grad):
        return Boxed.apply(grad)


class PlannedError(Exception):
    """What programs raise on purpose."""


class Failing:
    """Raises where the nth failure in forward, in a recompute or in backward may be, in a step that is done again."""

    where, left = None, 0  # of the class, which no rerun puts back

    def __init__(self, where, left, holders):
        self.holders, self.before = holders, holders()
        Failing.where, Failing.left = where, left

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        Failing.where = None
        for leaf in [*self.before, *self.holders()]:
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None
        return isinstance(error, Exception) and Failing.left <= 0  # a handler may have made it another error


def fail(where="forward"):
    """Raises if it is time to."""
    where = "recompute" if where == "forward" and ckpt_hooks.is_recomputing() else where
    if Failing.where == where:
        Failing.left -= 1
        if not Failing.left:
            raise PlannedError(where)


class Fails(torch.autograd.Function):
    """May raise in forward and in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        fail()
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        fail("backward")
        return -grad * ctx.saved_tensors[0].sin()


def unseen(kind, name, value):
    """Shows nothing."""


def scaled_gradients(gradients, factor):
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


class Wrapped(torch.nn.Module):
    """A module out of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@dataclasses.dataclass
class Held:
    """What holds arguments and is no list, dict or tuple."""

    field_0: object
    field_1: object = None
    field_2: object = None
    field_3: object = None


class Counted(torch.nn.Module):
    """A module that counts its calls in a buffer, on which its output depends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x.sin() * self.calls.clone()


class Rescaled(torch.nn.Module):
    """A module whose buffer is another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().amax()
        return x.sin() / self.scale


class Delayed(torch.nn.Module):
    """A module that scales by the largest values of earlier calls, as FP8 layers do, and notes its own in a buffer it rolls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(3))

    def forward(self, x):
        scale = 1 / (1 + self.history.amax())
        self.history = torch.roll(self.history, -1)
        self.history[0] = x.detach().abs().amax()
        return (x * scale).tanh()


class Clamped(torch.nn.Module):
    """A module that keeps its parameter in bounds."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x.sin() * self.weight.clone()


class Centred(torch.nn.Module):
    """A module that keeps an average in a parameter without gradient, and looks at it before it updates it."""

    def __init__(self):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        y = (x - self.mean.clone()).sin()
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return y


class Coded(torch.nn.Module):
    """A module that rounds to codes, which follow what they stand for, as in vector quantisation."""

    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Parameter(torch.linspace(-1, 1, 3), requires_grad=False)
        self.register_buffer("sizes", torch.ones(3))

    def forward(self, x):
        values = x.detach().reshape(-1)
        chosen = torch.nn.functional.one_hot((values[:, None] - self.codes).abs().argmin(-1), 3).to(values.dtype)
        rounded = (chosen @ self.codes.to(values.dtype)).reshape(x.shape)
        with torch.no_grad():
            self.sizes.mul_(0.5).add_(chosen.sum(0), alpha=0.5)
            self.codes.lerp_((values @ chosen).to(self.codes.dtype) / self.sizes.clamp(min=0.5), 0.3)
        return ((rounded - x.detach()) + x).sin()


class Remembering(torch.nn.Module):
    """A module with state that is no buffer, and no tensor before its first call."""

    def __init__(self):
        super().__init__()
        self.last, self.largest = 0.0, None

    def forward(self, x):
        y = x.cos() / (1 + self.last)
        self.last = x.detach().abs().mean()
        self.largest = self.last if self.largest is None else torch.maximum(self.largest, self.last)
        return y.tanh() * self.largest


class Keeping(torch.nn.Module):
    """A module that keeps what it is given and what it hands out, not copies of it, and a few in a list."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = None, []

    def forward(self, x):
        y = x.sin() if self.last is None or self.last.shape != x.shape else x * self.last
        self.last = y
        self.seen = [x, *self.seen[:1]]
        return y.view_as(y)


class Warming(torch.nn.Module):
    """A module that does something else until it has been called a few times."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return x.sin() if self.calls < 3 else (x * self.weight).sin().exp()


def noisy(x, generator):
    """Draws twice from a generator."""
    kept = torch.rand(x.shape, generator=generator) > 0.3
    return (x * kept).sin() * torch.rand(x.shape, generator=generator)


def number(source):
    """Returns a number that a random source draws."""
    return float(torch.rand((), generator=source)) if isinstance(source, torch.Generator) else source.random()


class Noisy(torch.nn.Module):
    """A module that has a random source."""

    def __init__(self, source):
        super().__init__()
        self.draw = source.random if hasattr(source, "random") else lambda: torch.rand((), generator=source)

    def forward(self, x):
        return (x * float(self.draw())).sin() * float(self.draw())


def in_segments(run, functions, segments, x):
    """Calls functions one after the other, in segments by the checkpoint_sequential that stands beside ``run``, if any."""
    beside = sys.modules[getattr(run, "func", run).__module__.partition("._")[0]]
    if hasattr(beside, "checkpoint_sequential"):
        return beside.checkpoint_sequential(functions, segments, x, use_reentrant=False)
    for function in functions:
        x = function(x)
    return x


def in_chunks(run, function, x, chunks, dim, reduce=None):
    """Calls a function on slices, by the checkpoint_chunks that stands beside ``run``, if any, or each slice by ``run``."""
    beside = sys.modules[getattr(run, "func", run).__module__.partition("._")[0]]
    if hasattr(beside, "checkpoint_chunks") and (beside is ckpt_hooks or x.shape[dim] % 2 == 0):
        return beside.checkpoint_chunks(function, x, chunks=chunks, dim=dim, reduce=reduce)
    found = [(one.shape[dim], run(function, one)) for one in x.split(max(-(-x.shape[dim] // chunks), 1), dim)]
    found = [(rows, one if isinstance(one, tuple) else (one,)) for rows, one in found]
    if reduce is None:
        if any(entry.shape[dim] != rows for rows, one in found for entry in one):
            raise ValueError("rows get lost")
        joined = [torch.cat(parts, dim) for parts in zip(*(one for _, one in found), strict=True)]
    else:
        joined = found[0][1]
        for _, one in found[1:]:
            if any(entry.shape != total.shape for total, entry in zip(joined, one, strict=True) if torch.is_tensor(entry)):
                raise ValueError("shapes differ")
            joined = [total + entry for total, entry in zip(joined, one, strict=True)]
    if reduce == "mean":
        return joined[0] / joined[1]
    return tuple(joined) if len(joined) > 1 else joined[0]


def in_loop(run, step, state, n, slots):
    """Calls a function of a state again and again, by the checkpoint_loop that stands beside ``run``, if any."""
    loop = _beside(run, "checkpoint_loop")
    if loop is not None:
        return loop(step, state, n, slots)
    structure = torch.utils._pytree.tree_structure
    for _ in range(n):
        before, state = structure(state), step(state)
        if structure(state) != before:
            raise TypeError("a step returned another structure")
    return state


def _beside(run, name):
    module = getattr(run, "func", run).__module__
    return getattr(sys.modules[module.partition(".")[0] if module.startswith("ckpt_hooks.") else module], name, None)


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
def setting(change, before, value):
    """Changes a setting, and back to what it was before."""
    change(value)
    try:
        yield
    finally:
        change(before)


def surroundings():
    """Returns a number that every setting around it changes."""
    flags = [
        torch.get_default_dtype() == torch.float32,
        torch.get_default_device().index is None,
        torch.get_float32_matmul_precision() == "highest",
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ]
    return FACTOR.get() * (0.5 + sum(2.0**-place for place, flag in enumerate(flags) if flag) / 2)


class SineIsCosine(torch.overrides.TorchFunctionMode):
    """Takes the one for the other."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (torch.Tensor.cos if function is torch.Tensor.sin else function)(*args, **(kwargs or {}))


@contextlib.contextmanager
def factor(value):
    token = FACTOR.set(value)
    try:
        yield
    finally:
        FACTOR.reset(token)


class HeldInAttributes:
    """Holds a number, a tensor or None, a list and a dict."""

    def __init__(self):
        self.n, self.t, self.log, self.by = 0, None, [], {}


class HeldInSlots:
    """Has slots in place of a dict."""

    __slots__ = ("by", "log", "n", "t")

    def __init__(self):
        self.n, self.t, self.log, self.by = 0, None, [], {}


@dataclasses.dataclass
class HeldInDataclass:
    """Compares by what it holds."""

    n: int = 0
    t: object = None
    log: list = dataclasses.field(default_factory=list)
    by: dict = dataclasses.field(default_factory=dict)


class HeldBehindProperties:
    """Keeps what it holds in a dict of its own."""

    def __init__(self):
        self._held = {"n": 0, "t": None, "log": [], "by": {}}

    n = property(lambda self: self._held["n"], lambda self, value: self._held.update(n=value))
    t = property(lambda self: self._held["t"], lambda self, value: self._held.update(t=value))
    log = property(lambda self: self._held["log"], lambda self, value: self._held.update(log=value))
    by = property(lambda self: self._held["by"], lambda self, value: self._held.update(by=value))


class Rises(HeldInAttributes):
    """Bends what it is given, and notes that in its list."""

    def bend(self, x):
        self.log.append(len(self.log))
        return x.sin()


class Falls(HeldInAttributes):
    """Bends it otherwise."""

    def bend(self, x):
        self.log.append(type(self).__name__)
        return (x * len(self.log)).cos()


class Stretched(torch.nn.Module):
    """Has a keyword."""

    def forward(self, x, *, factor=1.0):
        return (x * factor).sin()


def halve(value):
    return value * 0.5 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def halve_input(module, args):
    return tuple(halve(value) for value in args)


def halve_output(module, args, output):
    return halve(output)


def scaled(function):
    """Returns a function whose result is half of that of another one."""

    def scale(*args, **kwargs):
        return halve(function(*args, **kwargs))

    return scale


def halving(kind):
    """Returns a class of modules that return half of what those of another one do."""

    class Halving(kind):
        def forward(self, *args, **kwargs):
            return halve(super().forward(*args, **kwargs))

    return Halving
