"""``enable_in_transformers(model, chunked_loss=True)``: the loss of slices, and logits that are computed when looked at."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch

from ckpt_hooks import checkpoint, enable_in_transformers, losses
from ckpt_hooks.integrations.chunked_logits import Logits
from tests.fake_transformers import CausalModel, Model
from tests.measure import CountOps, same_bits

IDS = torch.arange(42).reshape(3, 14) % 6
LABELS = torch.where(IDS == 2, -100, IDS % 5)


def softcap(logits):
    return torch.tanh(logits / 3.0) * 3.0


def scaled(logits):
    return 0.5 * logits.contiguous().to(torch.float64).mul(2.0)


def cut(logits):
    return logits[..., :5] if logits.shape[-1] > 5 and logits.dim() == 3 and logits.size(0) == 3 else logits


def trained(model, **options):
    torch.manual_seed(0)
    model.zero_grad()
    loss, _ = model(IDS, labels=LABELS, **options)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * max(other.abs().max().item(), 1e-3))


SHIFTED = torch.cat([LABELS[:, 1:], torch.full((3, 1), -100)], 1)
OPTIONS = [{}, {"num_items_in_batch": torch.tensor(30)}, {"num_items_in_batch": 30}, {"shift_labels": SHIFTED}]


@pytest.mark.parametrize("edit", [lambda logits: logits, softcap, scaled, cut])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_the_loss_of_all_tokens(edit, options):
    model = CausalModel(edit)
    expected = trained(model, **options)
    with enable_in_transformers(model, chunked_loss=5), mock.patch.object(Logits, "whole", side_effect=AssertionError):
        assert_near(trained(model, **options), expected)
    assert all(map(same_bits, trained(model, **options), expected))
    assert "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)


def test_slices_are_those_of_the_function():
    """Bitwise as ``chunked_cross_entropy`` of the hidden states, with as many products with the head."""
    model = CausalModel(softcap)
    torch.manual_seed(0)
    hidden = Model.forward(model, IDS)
    losses.chunked_cross_entropy(hidden, model.lm_head.weight, SHIFTED, chunks=4, softcap=3.0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with enable_in_transformers(model, chunked_loss=4), CountOps() as counted:
        assert all(map(same_bits, trained(model)[1:], expected))
    assert counted.counts["_log_softmax"] == 8  # each slice, again in backward


def logits_of(model, look):
    torch.manual_seed(0)
    model.zero_grad()
    loss, logits = model(IDS, labels=LABELS)
    found = look(logits)
    (loss + found.sum()).backward()
    return [found.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "look",
    [
        lambda logits: logits[:, -1],
        lambda logits: logits + logits,
        lambda logits: torch.cat([logits, logits]),
        lambda logits: torch.mul(logits, torch.arange(6.0)),
        lambda logits: 1.0 - logits.exp(),
        lambda logits: torch.stack([*logits]) * len(logits),
        lambda logits: logits.add_(1.0) + logits,
        lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    ],
)
def test_logits_of_the_output(look):
    """They are computed when something looks at them after the loss, and have gradients."""
    model = CausalModel(softcap)
    expected = logits_of(model, look)
    with enable_in_transformers(model, chunked_loss=True):
        assert_near(logits_of(model, look), expected)
        _, logits = model(IDS)
    assert isinstance(logits, Logits)
    assert (logits.shape, logits.dtype, logits.ndim, logits.numel()) == ((3, 14, 6), torch.float32, 3, 252)


def each_token(logits):
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize(("edit", "options"), [(each_token, {}), (softcap, {"shift_labels": SHIFTED.flatten()})])
def test_logits_that_are_read_before_the_loss(edit, options):
    """By the model, or for labels of another shape: the loss is of all tokens, bit for bit as before; one warning says so."""
    model = CausalModel(edit)
    expected = trained(model, **options)
    with enable_in_transformers(model, chunked_loss=True):
        with pytest.warns(UserWarning, match="logits were read before the loss"):
            assert all(map(same_bits, trained(model, **options), expected))
        trained(model, **options)


def test_without_training_or_gradients_logits_are_a_tensor():
    model = CausalModel()
    with enable_in_transformers(model, chunked_loss=True):
        with torch.no_grad():
            assert type(model(IDS)[1]) is torch.Tensor
        expected = [result.detach() for result in copy.deepcopy(model).eval()(IDS, labels=LABELS)]
        assert all(map(same_bits, model.eval()(IDS, labels=LABELS), expected))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_head(copied):
    model = CausalModel(softcap)
    expected = trained(model)
    handle = enable_in_transformers(model, chunked_loss=True)
    other = copied(model)
    handle.undo()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert_near(trained(other), expected)


def test_in_a_region_and_with_other_functions_in_place():
    """A call of the whole model as a region; a head's ``forward`` and a loss that were set before come back."""
    model = CausalModel()
    forward = vars(model.lm_head)["forward"] = model.lm_head.forward
    loss = model.loss_function = copy.copy(model.loss_function)
    expected = trained(model)
    with enable_in_transformers(model, chunked_loss=True):
        torch.manual_seed(0)
        model.zero_grad()
        found = checkpoint()(model)(IDS, labels=LABELS)[0]
        found.backward()
        assert_near([found.detach(), *(p.grad for p in model.parameters())], expected)
    assert vars(model.lm_head)["forward"] == forward
    assert model.loss_function is loss
