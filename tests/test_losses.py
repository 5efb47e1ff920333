"""``chunked_cross_entropy``: the loss of a head, bit for bit the loop over slices of tokens, in the memory of one slice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from ckpt_hooks import checkpoint, checkpoint_region, memory_ledger, trace
from ckpt_hooks.losses import chunked_cross_entropy
from tests.measure import in_turns, same_bits

SIZE, WORDS = 16, 37


def loss_of(hidden, weight, labels, bias, reduction, ignore_index, label_smoothing, softcap):
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def loop(
    hidden,
    weight,
    labels,
    bias=None,
    *,
    chunks=8,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    softcap=None,
    call=lambda function, *args: function(*args),
):
    """The loop over slices, each by ``call``."""
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    size = max(-(-len(flat) // chunks), 1)
    of_slice = "none" if reduction == "none" else "sum"
    found = [
        call(loss_of, part, weight, words, bias, of_slice, ignore_index, label_smoothing, softcap)
        for part, words in zip(flat.split(size), targets.split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(found).view(labels.shape)
    total = found[0]
    for one in found[1:]:
        total = total + one
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def whole(
    hidden, weight, labels, bias=None, *, chunks=8, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None
):
    found = loss_of(hidden.flatten(0, -2), weight, labels.flatten(), bias, reduction, ignore_index, label_smoothing, softcap)
    return found.view(labels.shape) if reduction == "none" else found


def tensors(*shape, bias=False, dtype=torch.float32, frozen=()):
    """Returns the hidden states, the weight, labels and the bias of a head."""
    torch.manual_seed(0)
    sizes = {"hidden": (*shape, SIZE), "weight": (WORDS, SIZE), "bias": (WORDS,)}
    made = {name: torch.randn(size, dtype=dtype, requires_grad=name not in frozen) for name, size in sizes.items()}
    return made["hidden"], made["weight"], torch.randint(WORDS, shape), made["bias"] if bias else None


def backward(loss, wanted):
    loss.backward()
    return [one.grad for one in wanted]


def twice(loss, wanted):
    loss.backward(retain_graph=True)
    loss.backward()
    return [one.grad for one in wanted]


def of_gradients(loss, wanted):
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    sum(one.square().sum() for one in first).backward()
    return [*first, *(one.grad for one in wanted)]


ENDINGS = {"backward": backward, "twice": twice, "autograd.grad": torch.autograd.grad, "double backward": of_gradients}


def results(function, given, ending="backward", **options):
    """Returns the loss, and the gradients of what requires any."""
    hidden, weight, labels, bias = (one if one is None else one.detach().requires_grad_(one.requires_grad) for one in given)
    loss = function(hidden, weight, labels, bias, **options)
    factors = torch.arange(1.0, loss.numel() + 1).view(loss.shape)  # unlike each other for "none"
    wanted = [one for one in (hidden, weight, bias) if one is not None and one.requires_grad]
    return [loss.detach(), *(one.detach() for one in ENDINGS[ending]((loss * factors).sum(), wanted))]


def assert_near(found, expected):
    """Within 1e-6 of the largest number, and NaN where expected."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        scale = other.detach().abs().nan_to_num().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * scale, equal_nan=True)


def no_labels(labels):
    return labels


def some(labels):
    return torch.where(torch.arange(labels.numel()).view(labels.shape) % 3 == 0, -100, labels)


def a_slice(labels):
    """All in the first slice of eight, and some in others."""
    found = some(labels)
    found.view(-1)[: -(-labels.numel() // 8)] = -100
    return found


def all_labels(labels):
    return torch.full_like(labels, -100)


IGNORED = [no_labels, some, a_slice, all_labels]
REDUCTIONS = ["mean", "sum", "none"]


@pytest.mark.parametrize(
    ("reduction", "ignored", "label_smoothing", "softcap", "bias", "shape"),
    in_turns(REDUCTIONS, IGNORED, [0.0, 0.1, 1.0], [None, 3.0], [False, True], [(21,), (3, 10), (2, 3, 4)]),
)
def test_as_the_loop_and_as_the_whole(reduction, ignored, label_smoothing, softcap, bias, shape):
    """Loss and gradients: bitwise the loop without regions, by rounding the one call for all tokens."""
    hidden, weight, labels, bias = tensors(*shape, bias=bias)
    given = hidden, weight, ignored(labels), bias
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "softcap": softcap}
    found = results(chunked_cross_entropy, given, **options)
    assert all(map(same_bits, found, results(loop, given, **options)))
    assert_near(found, results(whole, given, **options))
    assert found[0].dtype is torch.float32
    if ignored is all_labels:
        assert not any(one.any() for one in found[1:])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ending", list(ENDINGS))
@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",), ("hidden", "weight")])
def test_backwards(reduction, ending, frozen):
    """Repeated, partial and double backward, with and without gradients of the head or of what it takes."""
    given = tensors(3, 10, bias=True, frozen=frozen)
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 3.0, "chunks": 4}
    found = results(chunked_cross_entropy, given, ending, **options)
    assert all(map(same_bits, found, results(loop, given, ending, **options)))


@pytest.mark.parametrize(("chunks", "calls"), [(1, 1), (2, 2), (7, 6), (30, 30), (1000, 30)])
def test_numbers_of_slices(chunks, calls):
    """One for all, and more than there are tokens."""
    given = tensors(3, 10)
    with trace() as found:
        ours = results(chunked_cross_entropy, given, chunks=chunks)
    assert len(found.steps[-1].regions) == calls
    assert all(map(same_bits, ours, results(loop, given, chunks=chunks)))
    assert_near(ours, results(whole, given))
    assert all(map(same_bits, ours, results(chunked_cross_entropy, given, chunk_size=-(-30 // chunks))))


def under_autocast(function):
    def call(*args, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*args, **options)

    return call


def in_a_block(function):
    def call(*args, **options):
        with checkpoint_region():
            return function(*args, **options)

    return call


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
def test_dtypes(dtype, reduction, softcap):
    """The loss is computed in float32 at least, and gradients have the dtypes of what they are of."""
    around = under_autocast if dtype == "autocast" else (lambda function: function)
    given = tensors(3, 10, bias=True, dtype=torch.float32 if dtype == "autocast" else dtype)
    found = results(around(chunked_cross_entropy), given, softcap=softcap, reduction=reduction)
    assert all(map(same_bits, found, results(around(loop), given, softcap=softcap, reduction=reduction)))
    exact = [None if one is None else one.double() if one.is_floating_point() else one for one in given]
    assert found[0].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(
        found[0].double(), results(whole, exact, softcap=softcap, reduction=reduction)[0], rtol=0.03, atol=0.03
    )


@pytest.mark.parametrize("around", [checkpoint(), in_a_block], ids=["checkpoint", "region"])
def test_in_a_region(around):
    given = tensors(3, 10)
    found = results(around(chunked_cross_entropy), given)
    assert all(map(same_bits, found, results(loop, given)))


class Tied(nn.Module):
    """The embedding of words is the head, too."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mlp, self.loss = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, SIZE), loss

    def forward(self, words):
        shifted = F.pad(words[:, 1:], (0, 1), value=-100)
        return self.loss(self.mlp(self.words(words)).tanh(), self.words.weight, shifted, chunks=4)


@pytest.mark.parametrize("around", [lambda function: function, under_autocast], ids=["plain", "autocast"])
def test_tied_weights(around):
    """The gradients of both uses add up, and hooks run once."""
    words, found, calls = torch.arange(30).view(3, 10), [], []
    for loss in (chunked_cross_entropy, loop):
        module = Tied(loss)
        hooked = module.words.weight.register_post_accumulate_grad_hook(lambda one: calls.append(one.grad.clone()))
        y = around(module)(words)
        y.backward()
        hooked.remove()
        found.append([y.detach(), *(one.grad for one in module.parameters())])
    assert all(map(same_bits, *found))
    assert len(calls) == 2


def test_labels_of_other_dtypes_and_layouts():
    """Integers of each size; labels and hidden states that are not contiguous; another label to ignore; none at all."""
    hidden, weight, labels, _ = tensors(3, 10)
    expected = results(chunked_cross_entropy, (hidden, weight, labels, None))
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert all(map(same_bits, results(chunked_cross_entropy, (hidden, weight, labels.to(dtype), None)), expected))
    turned = [
        hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        weight,
        labels.T.contiguous().T,
        None,
    ]
    assert all(map(same_bits, results(chunked_cross_entropy, turned), expected))
    ignored = torch.where(labels % 2 == 0, 0, labels)
    found = results(chunked_cross_entropy, (hidden, weight, ignored, None), ignore_index=0)
    assert all(map(same_bits, found, results(loop, (hidden, weight, ignored, None), ignore_index=0)))
    one = chunked_cross_entropy(hidden[0, 0], weight, labels[0, 0], reduction="none")
    assert_near([one], [F.cross_entropy(weight @ hidden[0, 0], labels[0, 0])])
    none = chunked_cross_entropy(hidden[:0], weight, labels[:0])
    assert none.isnan()


# ------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("tokens", "chunks"), [(2048, 8), (2048, 32)])
def test_peak(tokens, chunks, softcap):
    """The tensors given, their gradients and three slices of logits; no more than the loop by torch's checkpoint."""
    hidden, weight = torch.randn(tokens, 256, requires_grad=True), torch.randn(4096, 256).div(16).requires_grad_()
    labels = torch.randint(4096, (tokens,))

    def peak(function, **options):
        hidden.grad = weight.grad = None

        def step():
            function(hidden, weight, labels, chunks=chunks, softcap=softcap, **options).backward()

        return memory_ledger(step).peak.nbytes

    given = 2 * 4 * (hidden.numel() + weight.numel()) + 3 * 4 * tokens // chunks * 4096
    ours = peak(chunked_cross_entropy)
    assert ours <= given
    assert ours <= peak(loop, call=lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_logits_are_left_for_backward(reduction):
    """Not the last slice's: after forward there is what was given, and a loss for each label."""
    hidden, weight, labels, _ = tensors(512)
    held = []

    def step():
        held.append(chunked_cross_entropy(hidden, weight, labels, reduction=reduction, chunks=2))

    step()  # the first in a process makes what stays
    ledger = memory_ledger(step)
    assert ledger.peak.nbytes >= 256 * WORDS * 4
    assert ledger.changes[-1].live <= 3 * 512 * 4
