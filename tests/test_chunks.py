"""``checkpoint_chunks``: a function on slices, bit for bit the loop without regions, in the memory of one slice."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_hooks import (
    apply_checkpointing,
    checkpoint,
    checkpoint_chunks,
    checkpoint_region,
    is_recomputing,
    memory_ledger,
    policies,
    trace,
)
from ckpt_hooks._tensors.nested import leaves_of
from tests.chunked import PROGRAMS, WIDTH, Gated, counted, loop
from tests.measure import Calls, Log, in_turns, leaf, same_bits


def entries(result):
    return result if isinstance(result, tuple) else (result,)


def gradients(y, wanted):
    y.backward()
    return [one.grad for one in wanted]


def twice(y, wanted):
    y.backward(retain_graph=True)
    y.backward()
    return [one.grad for one in wanted]


def by_grad(y, wanted):
    return torch.autograd.grad(y, wanted, allow_unused=True)


def of_gradients(y, wanted):
    first = torch.autograd.grad(y, wanted, create_graph=True, allow_unused=True)
    sum(one.square().sum() for one in first if one is not None).backward()
    return [*first, *(one.grad for one in wanted)]


ENDINGS = {"backward": gradients, "twice": twice, "autograd.grad": by_grad, "double backward": of_gradients}


def called(function, *args, **kwargs):
    return function(*args, **kwargs)


def in_a_block(function, *args, **kwargs):
    with checkpoint_region():
        return function(*args, **kwargs)


def under_autocast(function, *args, **kwargs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*args, **kwargs)


def under_hooks(function, *args, **kwargs):
    with torch.autograd.graph.save_on_cpu():
        return function(*args, **kwargs)


#: What is around, with regions, and without.
AROUND = {
    "alone": (called, called),
    "in checkpoint": (checkpoint, called),
    "in a region": (in_a_block, called),
    "in a policy": (checkpoint(policy=policies.dots_saveable)(called), called),
    "autocast": (under_autocast, under_autocast),
    "hooks": (under_hooks, under_hooks),
}


def results(name, run, around, ending, needs_grad=True):
    """Returns all that a program comes to, and how often the hooks of its parameters were called."""
    program = PROGRAMS[name]
    torch.manual_seed(1)
    model = program.make()
    x = torch.randn(3, 10, WIDTH, requires_grad=needs_grad)
    hooks = Counter()
    for number, one in enumerate(model.parameters()):
        one.register_hook(lambda grad, number=number: hooks.update([number]))
        one.register_post_accumulate_grad_hook(lambda one, number=number: hooks.update([f"accumulated {number}"]))
    found = entries(around(program.call, run, model, x))
    y = sum(one.float().square().sum() for one in found if one.requires_grad)
    wanted = [*model.parameters(), *([x] if needs_grad else [])]
    got = ENDINGS[ending](y, wanted)
    tensors = [*found, *got, *model.buffers(), torch.rand(1)]
    return [None if one is None else one.detach() for one in tensors], hooks


def assert_alike(one, other):
    assert [a is None for a in one[0]] == [a is None for a in other[0]]
    assert all(same_bits(a, b) for a, b in zip(one[0], other[0], strict=True) if a is not None)
    assert one[1] == other[1]


@pytest.mark.parametrize(("name", "around", "ending"), in_turns(PROGRAMS, AROUND, ENDINGS))
def test_as_the_loop_without_regions(name, around, ending):
    """Outputs, gradients, buffers, the random stream, and how often hooks of parameters are called."""
    ours, theirs = AROUND[around]
    expected = results(name, loop, theirs, ending)
    assert_alike(results(name, checkpoint_chunks, ours, ending), expected)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_without_gradients(name):
    """In slices too: no slice needs the memory of all."""
    found = []
    for run in (checkpoint_chunks, loop):
        torch.manual_seed(1)
        model = PROGRAMS[name].make()
        with torch.no_grad():
            found.append(
                [*entries(PROGRAMS[name].call(run, model, torch.randn(3, 10, WIDTH))), *model.buffers(), torch.rand(1)]
            )
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("dim", [0, 1, -1, -3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7, 9, 100])
def test_sizes(chunks, dim):
    """Rows that cannot be divided, and fewer rows than slices: as many calls as ``torch.chunk`` has slices."""
    x, weight = leaf(7, 5, 3), leaf(3)
    function = Calls(lambda x: (x * 2).sin() * (x.cos() if dim == -1 else weight))
    y = checkpoint_chunks(function, x, chunks=chunks, dim=dim)
    assert function.count == len(x.chunk(chunks, dim))
    expected = loop(function, x, chunks=chunks, dim=dim)
    wanted = [x] if dim == -1 else [x, weight]
    found = [torch.autograd.grad(one.square().sum(), wanted) for one in (y, expected)]
    assert same_bits(y, expected)
    assert all(map(same_bits, *found))


def loss_of(head, x, labels, factor=1.0, mask=None):
    loss = F.cross_entropy(head(x) * factor, labels, reduction="none")
    return (loss if mask is None else loss * mask).sum(), len(loss) if mask is None else mask.sum()


@pytest.mark.parametrize(
    ("args", "kwargs", "chunked"),
    [
        ((), {"labels": 1}, "labels"),
        ((1,), {}, "labels"),
        ((1, 2.0), {"mask": 2}, ["mask", "labels"]),
        ((1, 2.0, 2), {}, ("labels", "mask")),
        ((1,), {"mask": None}, ("labels", "mask")),
    ],
)
@pytest.mark.parametrize("as_method", [False, True])
def test_other_arguments_to_cut(args, kwargs, chunked, as_method):
    """By the names that the function has for them, whether given by name or not; None stays None."""
    x, head = leaf(10, 4), nn.Linear(4, 5, dtype=torch.float64)
    values = {1: torch.arange(10) % 5, 2: (torch.arange(10) % 3 > 0).double()}
    args = [values.get(one, one) if isinstance(one, int) else one for one in args]
    kwargs = {name: values.get(one, one) for name, one in kwargs.items()}
    function = functools.partial(loss_of, head)
    if as_method:

        class Loss(nn.Module):
            def forward(self, x, labels, factor=1.0, mask=None):
                return loss_of(head, x, labels, factor, mask)

        function = Loss()
    y = checkpoint_chunks(function, x, *args, chunks=4, reduce="mean", chunked=chunked, **kwargs)
    total, count = function(x, *args, **kwargs)
    torch.testing.assert_close(y, total / count)
    found = torch.autograd.grad(y, [x, *head.parameters()])
    torch.testing.assert_close(found, torch.autograd.grad(total / count, [x, *head.parameters()]))


def test_a_mean_weighs_rows_alike():
    """Not slices: labels that are ignored count nothing."""
    x, head = leaf(8, WIDTH), nn.Linear(WIDTH, 5, dtype=torch.float64)
    labels = torch.tensor([1, -1, -1, -1, 2, 3, 4, 0])
    y = checkpoint_chunks(functools.partial(counted, head), x, labels=labels, chunked="labels", chunks=4, reduce="mean")
    torch.testing.assert_close(y, F.cross_entropy(head(x), labels, ignore_index=-1))


def test_options_of_regions():
    """Given first: these regions are the ones, and no others within."""
    x, calls = leaf(6, 4), Calls(torch.sin)
    run = checkpoint(policy=policies.save_every(torch.ops.aten.sin.default, 1), name="sine")(calls)
    with trace() as found:
        checkpoint_chunks(run, x, chunks=3).cos().sum().backward()
    assert [region.path for region in found.steps[-1].regions] == [("sine",)] * 3
    assert calls.count == 3  # a policy's region replays operators
    order = Log()

    class Last(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            order.append(is_recomputing())
            return y

    checkpoint_chunks(checkpoint(early_stop=False)(Last(4, 4)), x.float(), chunks=2).sum().backward()
    assert list(order) == [False, False, True, True]


def test_a_slice_is_called_again_once():
    """In one backward, from the last to the first."""
    order = Log()

    def function(x):
        order.append((is_recomputing(), float(x.detach()[0, 0])))
        return x.sin().cos()

    x = torch.arange(8.0).view(4, 2).requires_grad_()
    checkpoint_chunks(function, x, chunks=4).sum().backward()
    assert list(order) == [*((False, float(i)) for i in (0, 2, 4, 6)), *((True, float(i)) for i in (6, 4, 2, 0))]


# ------------------------------------------------------------------------------------------------------------------- memory


def peak(step):
    return memory_ledger(step).peak.nbytes / 2**20


@pytest.mark.parametrize(("chunks", "most"), [(1, 104.3), (8, 24.3), (64, 14.3)])
def test_peak_of_an_mlp(chunks, most):
    """In MiB; 25.25 and 14.38 by DeepSpeed's TiledMLP in 8 and 64 slices. The input and the result are 4 each."""
    model, x = Gated(128, 512), torch.randn(1, 8192, 128, requires_grad=True)

    def step():
        h = x * 1
        y = checkpoint_chunks(model, h, chunks=chunks, dim=1)
        del h
        y.sum().backward()

    assert peak(step) <= most


# ------------------------------------------------------------------------------------------------------------------ modules


class Layer(nn.Module):
    """A module with an MLP, which it calls by name if told."""

    def __init__(self, by_name=False):
        super().__init__()
        self.norm, self.mlp, self.by_name = nn.LayerNorm(WIDTH), Gated(), by_name

    def forward(self, x):
        h = self.norm(x)
        return x + (self.mlp(x=h) if self.by_name else self.mlp(h))


def sums(model, x):
    """Returns the result of a model, and all gradients."""
    model.zero_grad()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("options", [{}, {"recorded": True}, {"policy": policies.dots_saveable}, {"early_stop": False}])
def test_as_options_of_modules(options, by_name):
    """Of single ones and of all that match; copies and pickles too."""
    model = nn.Sequential(Layer(by_name), Layer(by_name))
    x = torch.randn(2, 10, WIDTH, requires_grad=True)
    forwards = [layer.mlp.forward for layer in model]
    for layer, forward in zip(model, forwards, strict=True):
        layer.mlp.forward = functools.partial(loop, forward, chunks=3, dim=1)
        if by_name:
            layer.mlp.forward = lambda x, forward=forward: loop(forward, x, chunks=3, dim=1)
    expected = sums(model, x)
    for layer in model:
        del layer.mlp.forward
    applied = apply_checkpointing(model, {"*.mlp": {"chunks": 3, "dim": 1, **options}})
    form = "checkpoint_region x3" if "recorded" in options else "checkpoint x3"
    assert [one.form for one in applied] == [form] * 2
    assert form in str(applied)
    for one in (model, pickle.loads(pickle.dumps(model))):
        assert all(map(same_bits, sums(one, x), expected))
    applied.undo()
    assert ["forward" in vars(layer.mlp) for layer in model] == [False] * 2


# --------------------------------------------------------------------------------------------------------- rows looked at


class Rows(nn.Module):
    """Has buffers, small and large, a list and a number that its forward changes."""

    def __init__(self, function):
        super().__init__()
        self.function, self.log, self.count = function, [], 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(100, 100))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.calls = Log()

    def forward(self, x):
        self.count += 1
        self.log.append(len(x))
        self.calls.append(len(x))
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.large += 1
        self.norm(x.reshape(-1, WIDTH))
        return self.function(x)


def shifted(x):
    return torch.cat([x[:1], x[:-1]])


DEPENDENT = {
    "earlier rows": lambda x: x.cumsum(0),
    "later rows": lambda x: x.flip(0).cumsum(0).flip(0),
    "all rows": lambda x: x / x.norm(dim=0),
    "one next to it": shifted,
    "place": lambda x: x + torch.arange(len(x), dtype=x.dtype)[:, None],
    "the second of a tuple": lambda x: (x.sin(), x - x.mean(0)),
    "an entry of a dict": lambda x: {"none": None, "mean": x - x.mean(0)},
    "all rows and dropout": lambda x: F.dropout(x, 0.4) / x.norm(dim=0),
}


@pytest.mark.parametrize("around", [called, in_a_block, checkpoint, under_autocast])
@pytest.mark.parametrize("name", [*DEPENDENT, "none"])
def test_rows_that_depend_on_each_other(name, around):
    """Are found, with nothing changed; where there are none, nothing is noticed."""
    x = torch.randn(40, WIDTH, requires_grad=True)
    module = Rows(DEPENDENT.get(name, F.silu))
    before, state = [one.clone() for one in module.buffers()], torch.get_rng_state()
    if name != "none":
        for _ in range(2):
            module.calls.clear()
            with pytest.raises(ValueError, match="'Rows' returns other values for 8 rows of dimension 0 than for the"):
                around(checkpoint_chunks, module, x, check_rows=True)
        assert all(map(same_bits, module.buffers(), before))
        assert (module.count, module.log, list(module.calls)) == (0, [], [16, 8, 8])
        assert torch.equal(torch.get_rng_state(), state)
        return
    y = around(checkpoint_chunks, module, x, chunks=4, check_rows=True)
    assert (module.count, module.log) == (4, [10] * 4)
    other = Rows(F.silu)
    assert same_bits(y, around(checkpoint_chunks, other, x, chunks=4))
    assert all(map(same_bits, module.buffers(), other.buffers()))
    y.float().sum().backward()


def attention(x):
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)[:, 0]


DROPOUTS = [nn.Dropout(0.4), nn.Dropout2d(0.4), nn.AlphaDropout(0.4), attention, torch.native_dropout]


@pytest.mark.parametrize("function", DROPOUTS)
def test_rows_are_compared_without_the_draws_of_dropout(function):
    """So nothing is noticed, in training too; later calls draw as without the comparison."""
    args = (0.4, True) if function is torch.native_dropout else ()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check_rows in (True, False):
            torch.manual_seed(0)
            given = torch.randn(10, 3, 4, 4), *args
            found.append(checkpoint_chunks(function, *given, chunks=2, check_rows=check_rows))
    assert all(map(same_bits, *[leaves_of(one) for one in found]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since 3.11")
def test_a_view_of_a_slice_says_how():
    x = torch.randn(2, 6, 4)
    with pytest.raises(RuntimeError, match="view size is not compatible") as raised:
        checkpoint_chunks(lambda part: part.view(-1, 4), x, chunks=3, dim=1)
    (note,) = raised.value.__notes__
    assert note.startswith("A slice along dimension 1 is not contiguous. In the function, call `.contiguous()` on it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_is_not_taken_for_dependence(dtype):
    """Products of other sizes round otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (2, 3, 16, 50):
            x = torch.randn(rows, 256, dtype=dtype)
            checkpoint_chunks(Gated(256, 512).to(dtype), x, check_rows=True)
            labels, head = torch.full((rows,), -100), nn.Linear(256, 500).to(dtype)

            def loss_of(x, labels, head=head):
                return F.cross_entropy(head(x).float(), labels, reduction="sum"), (labels != -100).sum()

            checkpoint_chunks(loss_of, x, labels, chunked="labels", reduce="mean", check_rows=True)


def test_rows_are_looked_at_once_for_a_function():
    """Of a method for each module, and where there is something to compare."""
    calls = Calls(torch.sin)
    checkpoint_chunks(calls, torch.ones(1, 4), check_rows=True)
    assert calls.count == 1
    for _ in range(2):
        calls.count = 0
        checkpoint_chunks(calls, torch.ones(10, 4), chunks=2, check_rows=True)
    assert calls.count == 2
    for module in (Rows(torch.sin), Rows(torch.cos)):
        for shape in [[10, 5, 5, 5, 5], [5, 5]]:
            module.calls.clear()
            checkpoint_chunks(module.forward, torch.randn(10, WIDTH), chunks=2, check_rows=True)
            assert list(module.calls) == shape


class Output(collections.OrderedDict):
    """A dict whose entries are attributes too, as of Transformers."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclasses.dataclass
class Both:
    """A result with a tensor, and maybe another."""

    y: torch.Tensor
    more: object = None


Pair = collections.namedtuple("Pair", "y z")

STRUCTURES = {
    "dict": lambda y, z: {"y": y, "more": {"z": z, "none": None}},
    "list": lambda y, z: [y, None, z],
    "named tuple": lambda y, z: Pair(y, (z,)),
    "dataclass": lambda y, z: Both(y, (z, None)),
    "with attributes": lambda y, z: Output(y=y, z=z),
}
TAKEN = {
    "dict": lambda found: (found["y"], found["more"]["z"]),
    "list": lambda found: (found[0], found[2]),
    "named tuple": lambda found: (found.y, found.z[0]),
    "dataclass": lambda found: (found.y, found.more[0]),
    "with attributes": lambda found: (found.y, found["z"]),
}


@pytest.mark.parametrize("reduce", [None, "sum"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_results_of_every_structure(name, reduce):
    """Those of a tuple, in the structure of the function's result."""
    x, w = torch.ones(5, 3, requires_grad=True), torch.full((3, 3), 0.5, requires_grad=True)

    def pair(x):
        y = (x @ w).sin()
        return (y, y.square()) if reduce is None else (y.sum(0), y.square().sum())

    expected = checkpoint_chunks(pair, x, chunks=2, reduce=reduce)
    found = checkpoint_chunks(lambda x: STRUCTURES[name](*pair(x)), x, chunks=2, reduce=reduce)
    assert repr(found) == repr(STRUCTURES[name](*TAKEN[name](found)))
    of_each = [torch.autograd.grad(y.sum() + z.sum(), [x, w]) for y, z in (expected, TAKEN[name](found))]
    assert all(map(same_bits, TAKEN[name](found), expected))
    assert all(map(same_bits, *of_each))


@pytest.mark.parametrize(("rows", "sizes"), [(2, [2, 2, 1]), (5, [5]), (7, [5]), (1, [1] * 5)])
def test_a_number_of_rows(rows, sizes):
    seen = []

    def function(x):
        seen.append(len(x))
        return x.sin()

    x = torch.ones(5, 3, requires_grad=True)
    y = checkpoint_chunks(function, x, chunk_size=rows)
    assert seen == sizes
    assert torch.equal(y, x.sin())
    layer = torch.nn.Linear(3, 3)
    expected = checkpoint_chunks(layer, x, chunk_size=rows)
    applied = apply_checkpointing(nn.Sequential(layer), {"0": {"chunk_size": rows}})
    assert f"by {rows} rows" in str(applied)
    assert same_bits(layer(x), expected)
