"""Buffers of real layers: bytes and results of the first steps, against plain PyTorch and torch's own checkpoint."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_hooks
from tests.fake_device import count_waits_for_buffers
from tests.measure import in_turns

STEPS = 8


class Masked(nn.Module):
    """Attention under a mask held by each layer, as minGPT and GPT-Neo have it."""

    def __init__(self, size, width=16):
        super().__init__()
        self.projection, self.dropout = nn.Linear(width, 3 * width), nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(size, size).tril())

    def forward(self, x):
        length = x.shape[1]
        query, key, value = self.projection(x).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2)).masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        return x + self.dropout(F.softmax(weights, -1)) @ value


class Int8(nn.Module):
    """A frozen weight in a buffer, as GPTQ keeps it, and a low-rank update."""

    def __init__(self, width=512):
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (width, width), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(width) / 1000)
        self.down, self.up = nn.Parameter(torch.randn(width, 4) / 10), nn.Parameter(torch.zeros(4, width))

    def forward(self, x):
        return x + F.gelu(x @ (self.weight.to(x.dtype) * self.scale) + x @ self.down @ self.up)


MODELS = {
    "masks of 16 KiB": lambda: ([Masked(64) for _ in range(4)], (2, 16, 16)),
    "masks of 17 KiB": lambda: ([Masked(66) for _ in range(4)], (2, 16, 16)),
    "masks of 64 KiB": lambda: ([Masked(128) for _ in range(12)], (2, 16, 16)),
    "masks of 9 MiB": lambda: ([Masked(1536) for _ in range(2)], (2, 16, 16)),
    "int8 weights": lambda: ([Int8() for _ in range(4)], (4, 512)),
}


def bytes_of(program):
    """Returns the bytes that each part of a program leaves allocated in the end, and the most that were allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        marks = program()
    now = peak = 0
    held = []
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == marks:
            held.append(now)
    return held[0], peak


def bytes_of_steps(make, run):
    """Returns for each step the bytes held after forward, and at the peak."""
    torch.manual_seed(0)
    layers, shape = make()
    model, x = nn.ModuleList(layers), torch.randn(shape, requires_grad=True)
    run(nn.Linear(1, 1), torch.ones(1, requires_grad=True)).sum().backward()  # what a first region makes for good

    def step():
        y = x
        for layer in model:
            y = run(layer, y)
        loss = y.sum()
        with torch.profiler.record_function("forward has ended"):
            pass
        loss.backward()
        return "forward has ended"

    found = []
    with ckpt_hooks.set_self_check(False):  # which holds a few numbers for each tensor that it compares
        for _ in range(STEPS):
            x.grad = None
            model.zero_grad()
            found.append(bytes_of(step))
    largest = max(sum(buffer.nbytes for buffer in layer.buffers() if buffer.nbytes > 1 << 14) for layer in layers)
    small = sum(buffer.nbytes for buffer in model.buffers() if buffer.nbytes <= 1 << 14)
    left = 3 * x.nbytes  # a recompute may run three operators on such small tensors that torch's leaves out
    return found, largest, small, left


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_buffers_that_are_only_read(name):
    """From the first step on a region holds what torch's does. While a buffer is unknown the peak has a copy of it."""
    ours, largest, small, left = bytes_of_steps(MODELS[name], ckpt_hooks.checkpoint)
    theirs, *_ = bytes_of_steps(MODELS[name], functools.partial(torch_checkpoint, use_reentrant=False))
    for number, ((held, peak), (expected, most)) in enumerate(zip(ours, theirs, strict=True)):
        assert held <= 1.05 * expected + small
        assert peak <= 1.02 * most + small + left + (0 if number else largest)


class Quantiser(nn.Module):
    """A codebook trained by moving averages, written by way of ``data`` as MONAI's is, by version, or bound anew."""

    def __init__(self, codes, way="data"):
        super().__init__()
        self.way = way
        for name, shape in (("codes", (codes, 64)), ("counts", (codes,)), ("sums", (codes, 64))):
            self.register_buffer(name, torch.randn(shape, dtype=torch.float64).abs())

    def update(self, name, value):
        buffer = getattr(self, name)
        with torch.no_grad():
            if self.way == "data":
                buffer.data.mul_(0.9).add_(value, alpha=0.1)
            elif self.way == "in place":
                buffer.mul_(0.9).add_(value, alpha=0.1)
            else:
                setattr(self, name, buffer * 0.9 + value * 0.1)

    def forward(self, x, *, freeze=False):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = F.one_hot(nearest, len(self.codes)).to(x.dtype)
        if self.training and not freeze:
            self.update("counts", chosen.sum(0))
            self.update("sums", chosen.t() @ x.detach())
            self.update("codes", self.sums / self.counts.unsqueeze(1))
        quantised = F.embedding(nearest, self.codes)
        return (x * quantised).tanh() + quantised


class Queue(nn.Module):
    """A queue of keys, as MoCo's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(64, 512, dtype=torch.float64))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        logits = (x @ self.queue.clone().detach()).tanh()
        if self.training:
            start = int(self.position)
            self.queue[:, start : start + len(x)] = x.detach().t()
            self.position[0] = (start + len(x)) % 512
        return logits


STATEFUL = {
    **{
        f"{codes} codes by {way}": functools.partial(Quantiser, codes, way)
        for codes in (64, 128, 2048)
        for way in ("data", "in place", "names")
    },
    "queue": Queue,
    "batch norm": lambda: nn.BatchNorm1d(64, dtype=torch.float64),
    "wide batch norm": lambda: nn.Sequential(
        nn.Linear(64, 4096, dtype=torch.float64),
        nn.BatchNorm1d(4096, dtype=torch.float64),
        nn.Linear(4096, 64, dtype=torch.float64),
    ),
}


def begin_training(model, step):
    model.train(step >= 3)


def always(model, step):
    model.train()


def gradients_of_steps(model, change, run, *, microbatches=1, calls=1):
    torch.manual_seed(1)
    found = []
    for step in range(6):
        change(model, step)
        losses, inputs = [], []
        for _ in range(microbatches):
            x = torch.randn(8, 64, dtype=torch.float64, requires_grad=True)
            loss = 0
            for _ in range(calls):
                loss = loss + run(model, x).square().sum()
            losses.append(loss)
            inputs.append(x)
        for loss, x in zip(losses, inputs, strict=True):
            found.append(torch.autograd.grad(loss, [x, *model.parameters()]))
        found.append([buffer.clone() for buffer in model.buffers()])
    return [tensor for group in found for tensor in group]


def nested(model, x):
    return ckpt_hooks.checkpoint(lambda x: ckpt_hooks.checkpoint(model, x).sin(), x)


@pytest.fixture
def waits(request, monkeypatch):
    """Counts comparisons of contents; on a device each of them would make the program wait."""
    return count_waits_for_buffers(monkeypatch) if request.param else None


@pytest.mark.parametrize(
    ("name", "form", "change", "waits"),
    in_turns(STATEFUL, ("once", "two microbatches", "called twice", "nested"), (always, begin_training), (False, True)),
    indirect=["waits"],
)
def test_state_in_buffers_is_as_eager(name, form, change, waits):
    torch.manual_seed(0)
    plain = STATEFUL[name]()
    model = copy.deepcopy(plain)
    options = {"two microbatches": {"microbatches": 2}, "called twice": {"calls": 2}}.get(form, {})
    plain_run = (lambda model, x: model(x).sin()) if form == "nested" else (lambda model, x: model(x))
    expected = gradients_of_steps(plain, change, plain_run, **options)
    told = []

    def counted(model, step):
        told.append(None if waits is None else waits["waits"])
        change(model, step)

    found = gradients_of_steps(model, counted, nested if form == "nested" else ckpt_hooks.checkpoint, **options)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    if waits is not None:
        first = 3 if change is begin_training else 0
        assert told[first + 1] == waits["waits"]  # none once each way of running was met


class WritesAgain(nn.Module):
    """Writes to a buffer in recomputes alone."""

    def __init__(self, size, more):
        super().__init__()
        self.more = more
        self.register_buffer("other", torch.ones(size))
        self.register_buffer("table", torch.ones(size))

    def forward(self, x):
        if ckpt_hooks.is_recomputing():
            self.table.add_(self.more)
        return (x * self.table.sum()).sin().exp()


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("size", [4, 1 << 13])
def test_a_buffer_that_a_rerun_alone_writes_to_is_an_error(size, more):
    y = ckpt_hooks.checkpoint(WritesAgain(size, more), torch.rand(3, requires_grad=True))
    with pytest.raises(ckpt_hooks.MutationError, match="the buffer 'table' of WritesAgain"):
        y.sum().backward()
