"""Moving tensors to the host and back, with a fake device."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch.autograd import grad

import ckpt_hooks
from ckpt_hooks import CheckpointPolicy, MutationError, checkpoint_name, checkpoint_region
from ckpt_hooks.offload import offload_saved_tensors
from tests.measure import CountOps, Saves, SavesItsResult, leaf

aten = torch.ops.aten


def offloading(**options):
    """Returns a block that moves tensors from 1 KiB."""
    return offload_saved_tensors(**{"min_offload_size": 1024, **options})


def save_and_offload(*operators):
    """Returns a policy that moves the outputs of some operators."""
    return ckpt_hooks.policies.offload_ops(*operators)


def test_streams_wait_for_each_other(transfers):
    """The copy out for the computing before it, the copy back for the copy out, the computing after for the copy back."""
    x = torch.randn(300, requires_grad=True)
    with offloading():
        y = (x * 1).sin()
    assert torch.equal(grad(y.sum(), x)[0], x.cos())
    assert transfers.notes == [
        ("out", "waits for", "main"),
        ("send", 300),
        ("main", "waits for", "out 1"),
        ("back", "waits for", "main"),
        ("back", "waits for", "out 1"),
        ("fetch", 300),
        ("main", "waits for", "back 1"),
    ]


def test_a_tensor_comes_back_as_it_was(transfers):
    """With its strides and values, in a new object each time."""
    tensor, found = torch.randn(40, 30).t(), []
    tensor.mul_(2)
    with offloading():
        y = Saves.apply(leaf(1), tensor, found.append)
    for _ in range(2):
        y.backward(retain_graph=True)
    first, second = found
    assert first is not second
    for one in found:
        assert torch.equal(one, tensor)
        assert (one.stride(), one.data_ptr() == tensor.data_ptr()) == (tensor.stride(), False)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(10),
        torch.ones(1, 1000).expand(3, 1000),
        torch.ones(1000, 4)[:, ::2],
        torch.ones(1000).to_sparse(),
        torch.ones(0),
        torch.ones(3000, device="meta"),
    ],
    ids=["small", "expanded", "with gaps", "sparse", "empty", "meta"],
)
def test_what_stays(transfers, tensor):
    """What is not worth moving, or not to be moved as it is."""
    with offloading():
        y = Saves.apply(leaf(1), tensor)
    assert transfers.moved() == []
    y.backward()


def test_the_threshold(transfers):
    """In bytes."""
    sent = []
    for size, threshold in ((256, 1024), (255, 1024), (255, 0)):
        with offload_saved_tensors(min_offload_size=threshold):
            y = Saves.apply(leaf(1), torch.ones(size))
        sent.append(transfers.count("send"))
        y.backward()
    assert sent == [1, 1, 2]


def test_the_host_stays_where_it_is():
    """Without a device there is nothing to move."""
    tensor, found = torch.ones(10_000), []
    with offload_saved_tensors(min_offload_size=0):
        y = Saves.apply(leaf(1), tensor, found.append)
    y.backward()
    assert found[0].data_ptr() == tensor.data_ptr()


def test_a_policy_offloads(transfers):
    """What it names is moved once, comes back once, and is not computed again."""
    x, w = leaf(20, 20), leaf(20, 20)

    def function(x, w):
        return (x @ w).sin().cos()

    y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)(x, w)
    assert transfers.moved() == [("send", 400)]
    with CountOps() as ops:
        found = grad(y.sum(), (x, w))
    assert transfers.moved() == [("send", 400), ("fetch", 400)]
    assert ops.counts["mm"] == 2  # those of backward
    assert all(torch.equal(a, b) for a, b in zip(found, grad(function(x, w).sum(), (x, w)), strict=True))


@pytest.mark.parametrize("kind", ["function", "recorded"])
def test_products_without_batch_dimensions_go_to_the_host(transfers, kind):
    """The linear layers' go, and the batched product runs again."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(32, 32), torch.randn(32, 32, requires_grad=True)

    def function(x):
        scores = layer(x).sin().view(4, 8, 32)
        return layer(scores.bmm(scores.transpose(1, 2)).cos().view(8, 32)).exp()

    expected = grad(function(x).sum(), (x, *layer.parameters()))
    policy = ckpt_hooks.policies.offload_dot_with_no_batch_dims
    if kind == "function":
        y = ckpt_hooks.checkpoint(policy=policy)(function)(x)
    else:
        with ckpt_hooks.checkpoint_region(policy=policy):
            y = function(x)
    assert transfers.moved() == [("send", 1024), ("send", 256)]
    with CountOps() as ops:
        found = grad(y.sum(), (x, *layer.parameters()))
    assert (ops.counts["addmm"], ops.counts["bmm"]) == (0, 1 + 2)  # and two in the derivative
    assert all(map(torch.equal, found, expected))


def test_regions_are_fetched_one_ahead(transfers):
    """When backward comes to a region, the one before it is on its way."""
    xs = [leaf(side, side) for side in (20, 21, 22)]

    def function(x):
        return (x @ x).sin().cos().sum()

    region = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)
    y = 0
    for x in xs:
        y = region(x) * (1 + y)
    assert transfers.moved() == [("send", 400), ("send", 441), ("send", 484)]
    fetched = []
    for x in xs:
        x.register_hook(lambda g: fetched.append(transfers.moved()[3:]))
    found = grad(y, xs)
    assert fetched == [
        [("fetch", 484), ("fetch", 441)],
        [("fetch", 484), ("fetch", 441), ("fetch", 400)],
        [("fetch", 484), ("fetch", 441), ("fetch", 400)],
    ]
    y = 0
    for x in xs:
        y = function(x) * (1 + y)
    assert all(torch.equal(a, b) for a, b in zip(found, grad(y, xs), strict=True))


def test_names_say_what_is_moved(transfers):
    x = leaf(20, 20)
    policy = ckpt_hooks.policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["moved"]
    )

    def program(region):
        with region:
            h = checkpoint_name(x @ x, "moved").sin()
            return grad(checkpoint_name(h @ x, "kept").cos().sum(), x)[0]

    found = program(checkpoint_region(policy=policy))
    assert transfers.moved() == [("send", 400), ("fetch", 400)]
    assert torch.equal(found, program(contextlib.nullcontext()))


def test_a_write_in_the_region_waits_for_the_copy(transfers):
    x = leaf(20, 20)

    def program(region):
        with region:
            h = x + 1
            y = (h * 2).exp()
            h.mul_(3)
            y = y + h * x
        return grad(y.sum(), x)[0]

    found = program(checkpoint_region(policy=save_and_offload(aten.add.Tensor)))
    assert transfers.count("fetch") >= 1
    assert torch.equal(found, program(contextlib.nullcontext()))


def test_a_second_backward_fetches_again(transfers):
    """What is on the host stays there under retain_graph."""
    x = leaf(20, 20)
    y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(lambda x: (x @ x).sin().cos())(x)
    first = grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, grad(y.sum(), x)[0])
    assert transfers.moved() == [("send", 400), ("fetch", 400), ("fetch", 400)]


def test_a_write_to_what_is_on_its_way(transfers):
    """The copy may have seen it or not: the operator runs again."""
    x = leaf(20, 20)

    def function(x):
        h = x @ x
        return h, (h + 1).sin()

    h, y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)(x)
    h.detach().zero_()
    with CountOps() as ops:
        (found,) = grad(y.sum(), x)
    assert torch.equal(found, grad(function(x)[1].sum(), x)[0])
    assert ops.counts["mm"] == 3


def test_nothing_is_kept_on_the_device(transfers):
    """Nor on the host when the graph has gone."""
    x = leaf(20, 20)
    alive = []

    def function(x):
        h = x @ x
        alive.append(weakref.ref(h))
        return h.sin().cos()

    y = ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default))(function)(x)
    assert alive[0]() is None
    latest = transfers.latest
    assert latest() is not None
    del y
    assert latest() is None


def test_prefer_is_as_must(transfers):
    """In eager there is nobody to overrule it."""
    x = leaf(20, 20)
    policy = lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_CPU_OFFLOAD  # noqa: E731
    y = ckpt_hooks.checkpoint(policy=policy)(lambda x: (x @ x).sin().cos())(x)
    assert torch.equal(grad(y.sum(), x)[0], grad((x @ x).sin().cos().sum(), x)[0])
    assert ("send", 400) in transfers.moved()


def test_saved_tensors_without_checkpointing(transfers):
    """Each is moved when it is saved, and fetched when backward comes to the one after it; parameters stay."""
    x, w = leaf(20, 20), leaf(20, 20)

    def function(x):
        return (x @ w).sin().cos().exp()

    with offloading():
        y = function(x)
    assert transfers.moved() == [("send", 400)] * 3  # inputs of sin and cos, output of exp
    found = grad(y.sum(), (x, w))
    assert len(transfers.moved()) == 6
    assert all(torch.equal(a, b) for a, b in zip(found, grad(function(x).sum(), (x, w)), strict=True))


def test_saved_tensors_come_ahead_of_use(transfers):
    """Backward asks from the last to the first; as many come ahead as may be on their way there."""
    x = leaf(2000)
    with offload_saved_tensors(min_offload_size=8000, max_fwd_stash_size=1):
        y = (x * 1)[:1500].sin()[:1400].sin()[:1300].sin()
    assert transfers.moved() == [("send", 1500), ("send", 1400), ("send", 1300)]
    seen = []
    after_the_last_sine, _ = y.grad_fn.next_functions[0]
    after_the_last_sine.register_prehook(lambda g: seen.extend(transfers.moved()[3:]))
    y.sum().backward()
    assert seen == [("fetch", 1300), ("fetch", 1400)]
    assert transfers.moved()[3:] == [*seen, ("fetch", 1500)]


def test_a_saved_tensor_that_was_written_to(transfers):
    """An error, as in plain autograd: the copy may have seen the write."""
    x = leaf(2000)
    with offloading():
        h = x * 1
        y = h.sin()
    h.zero_()
    with pytest.raises(MutationError, match="expected version 0"):
        y.sum().backward()


def test_a_saved_tensor_that_is_filled_only_then(transfers):
    """``rrelu`` saves its noise before it makes it: what is sent is what it made."""

    def gradient(hooks):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 4096).requires_grad_()
        with hooks:
            y = torch.nn.functional.rrelu(x * 1, training=True)
        return grad(y.sum(), x)[0]

    expected = gradient(contextlib.nullcontext())
    assert torch.equal(gradient(offload_saved_tensors(min_offload_size=0)), expected)
    assert ("send", 4096) in transfers.moved()


def test_a_saved_tensor_of_another_stream(transfers):
    """One that waits is sent when the stream that makes it is done, whichever is the present one by then."""
    side = transfers.new_stream("side")
    x = leaf(20, 20)
    with offloading():
        transfers.running = side
        y = x * torch.ones(20, 20)  # saves the ones
        transfers.running = transfers.main
        assert ("send", 400) not in transfers.notes
        y.sin()
    assert ("out", "waits for", "side") in transfers.notes


@pytest.mark.usefixtures("no_gc")
def test_what_waits_goes_with_its_graph(transfers):
    x, data = leaf(20, 20), torch.ones(20, 20)
    alive = weakref.ref(data)
    with offloading():
        y = x * data
        del y, data
        assert alive() is None
    assert transfers.moved() == []


@pytest.mark.usefixtures("transfers")
def test_backward_before_the_block_ends():
    """Of what was saved last and is not on its way yet."""
    x = leaf(20)
    with offload_saved_tensors(min_offload_size=0):
        y = x.sin() * torch.ones(20)
        found = grad(y.sum(), x)[0]
    assert torch.equal(found, x.cos())


def on_the_host(x, w):
    h = x * 1
    return h, h.sin()


def without_grad(x, w):
    mask = torch.ones_like(x)
    return mask, x * mask


def result(x, w):
    y = x.exp()
    return y, y


def view(x, w):
    h = x * 1
    return h, h.t().sin()


STAYS = {
    "on the host": on_the_host,
    "parameter": lambda x, w: (w, x * w),
    "without grad": without_grad,
    "result": result,
    "view": view,
}


@pytest.mark.parametrize("device", ["host", "device"])
@pytest.mark.parametrize("kind", list(STAYS))
def test_a_tensor_that_stays_and_was_written_to(request, kind, device):
    """An error, as in plain autograd, wherever it is: on the host, or too small to be moved."""
    if device == "device":
        request.getfixturevalue("transfers")

    def run(hooks):
        x, w = leaf(3, 3), leaf(3, 3)
        with hooks:
            written, y = STAYS[kind](x, w)
        with torch.no_grad():
            written.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        run(contextlib.nullcontext())
    what = "leaf" if kind == "parameter" else "tensor"
    match = rf"a float64\[3, 3\] {what} .*modified by an inplace operation: it is at version 1; expected version 0 instead"
    with pytest.raises(MutationError, match=match) as caught:
        run(offloading())
    assert (caught.value.expected, caught.value.found) == (0, 1)


def test_a_parameter_may_change_when_backward_is_through():
    """As an optimizer changes it, and while it is needed no more."""
    x, w = leaf(3), leaf(3)
    with offloading():
        y = x * w
    expected = w.detach().clone()
    y.sum().backward()
    with torch.no_grad():
        w.add_(1)
    assert torch.equal(x.grad, expected)


def test_a_kept_output_that_was_written_to():
    """What a policy keeps is a cache: where hooks around the region find that it was written to, its operator runs again."""
    x = leaf(4, 4)

    def function(x):
        h = x @ x
        return h, (h + 1).sin()

    with offloading():
        h, y = ckpt_hooks.checkpoint(policy=[aten.mm.default])(function)(x)
    h.detach().zero_()
    assert torch.equal(grad(y.sum(), x)[0], grad(function(x)[1].sum(), x)[0])


def in_place_on_a_view(x, w):
    h = x @ w
    h[1:].exp_()
    return h


SMOOTH = {
    "exp": lambda x, w: (x * w).exp(),
    "sigmoid": lambda x, w: (x * w).sigmoid(),
    "tanh": lambda x, w: (x @ w).tanh(),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "exp of a leaf": lambda x, w: x.exp() * w,
    "two results": lambda x, w: (x @ w).exp().sigmoid(),
    "in place": lambda x, w: (x * w).mul_(2).sigmoid_(),
    "in place on a view": in_place_on_a_view,
    "views": lambda x, w: (x @ w).t().exp().reshape(-1)[::2].sigmoid(),
    "custom": lambda x, w: SavesItsResult.apply(x @ w),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x @ w, (20,), w[0], w[1]),
    "sqrt": lambda x, w: ((x @ w).square() + 1).sqrt().reciprocal(),
}


@pytest.mark.parametrize("device", ["host", "device"])
@pytest.mark.parametrize("name", list(SMOOTH))
def test_higher_derivatives(request, name, device):
    """An operator's own result comes back as part of the graph that it was part of: three derivatives are those of autograd."""
    if device == "device":
        request.getfixturevalue("transfers")

    def derivatives(hooks):
        torch.manual_seed(0)
        x, w = leaf(20, 20), leaf(20, 20)
        with hooks:
            y = SMOOTH[name](x, w)
        found = [y]
        for _ in range(3):
            y = sum(g.sin().sum() for g in grad(y.sum(), (x, w), create_graph=True))
            found.append(y)
        return [*found, *grad(y, (x, w))]

    expected = derivatives(contextlib.nullcontext())
    for hooks in (offloading(), offload_saved_tensors(min_offload_size=0)):
        found = derivatives(hooks)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("size", [-1, 2.5, True, "1 meg"])
def test_bad_thresholds(size):
    """An error that says what came."""
    with pytest.raises(TypeError if size is True else ValueError, match="number of bytes"):
        offload_saved_tensors(min_offload_size=size)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """The real thing: bitwise, nothing computed again, and the device's memory free meanwhile but for the last few."""
    x, w = (torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(2))

    def function(x, w):
        return (x @ w).sin().cos()

    def run(wrap):
        y = x
        for _ in range(12):
            y = wrap(function)(y, w)
        held = torch.cuda.memory_allocated()
        return held, grad(y.sum(), (x, w))

    _, expected = run(lambda function: function)
    kept, first = run(ckpt_hooks.checkpoint(policy=ckpt_hooks.policies.save_ops(aten.mm.default)))
    moved, second = run(ckpt_hooks.checkpoint(policy=save_and_offload(aten.mm.default)))
    assert moved < kept
    for found in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_conjugate_on_a_gpu():
    """What lands on the host late is conjugated by a bit, and not by what torch does at once."""
    x = torch.randn(1024, 1024, dtype=torch.complex64, device="cuda", requires_grad=True)

    def function():
        h = (x * 1).conj()
        return (h * h.detach().cos()).abs().sum()

    expected = grad(function(), x)[0]
    with offload_saved_tensors():
        y = function()
    assert torch.equal(grad(y, x)[0], expected)
