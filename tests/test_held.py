"""Tensors held until backward: what :meth:`HeldTensor.get` returns and raises, and the walks over nested values."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_hooks import checkpoint_region
from ckpt_hooks._core.holdings import BY_POLICY, Reason
from ckpt_hooks._tensors.containers import instances_in, replaced_in, tensors_in
from ckpt_hooks._tensors.held_tensors import HeldByHooks, HeldOnHost, hold_tensor, recomputes
from ckpt_hooks._tensors.offloaded import Batch
from ckpt_hooks._tensors.transfers import transfers_for
from ckpt_hooks._torch.autograd import top_saved_tensors_hooks
from ckpt_hooks.errors import MutationError
from tests.measure import leaf

PATH = ("inner", ("outer", None))


def same(tensor):
    return tensor


def by_hooks(tensor, pack=same, unpack=same):
    return HeldByHooks(tensor, (pack, unpack), PATH, BY_POLICY)


def test_one_wording_for_a_tensor_that_was_modified():
    """As it is, and through hooks that hand it back."""
    texts = set()
    for make in (lambda tensor: hold_tensor(tensor, PATH, BY_POLICY).sealed(None), by_hooks):
        tensor = torch.ones(2, 3)
        held = make(tensor)
        assert torch.equal(held.get(), tensor)
        tensor.add_(1)
        with pytest.raises(MutationError) as caught:
            held.get()
        texts.add(str(caught.value))
        assert (caught.value.region, caught.value.expected, caught.value.found) == (("outer", "inner"), 0, 1)
    (text,) = texts
    assert text.startswith("a float32[2, 3] tensor that region 'outer/inner' needs (kept by the policy) has been modified")


def test_what_hooks_hand_back_has_the_strides_that_it_had():
    tensor = torch.arange(6.0).view(2, 3).T
    held = by_hooks(tensor, lambda tensor: tensor.contiguous().clone())
    assert held.get().stride() == tensor.stride()
    assert torch.equal(held.get(), tensor)
    assert held.holding(BY_POLICY).shape == (3, 2)


def test_what_hooks_hand_back_without_its_memory():
    """In a recorded region as in a selective one: an error, not what is in other memory."""
    x = leaf(4)
    h = x * 2
    with torch.autograd.graph.saved_tensors_hooks(same, same), checkpoint_region():
        y = h.sin().cos()
    h.untyped_storage().resize_(0)
    with pytest.raises(MutationError, match=r"float64\[4\] tensor that region 'region' needs .* was freed after forward"):
        y.sum().backward()


def test_a_tensor_on_the_host_that_was_modified_is_called_what_it_was(transfers):
    tensor = torch.ones(300, 300)
    held = HeldOnHost(tensor, Batch(), transfers_for(tensor), PATH, BY_POLICY).sealed(None)
    tensor.add_(1)
    with pytest.raises(MutationError, match=r"a float32\[300, 300\] tensor that region 'outer/inner' needs"):
        held.get()
    found = held.holding(BY_POLICY)
    assert (found.description, found.reason) == ("float32[300, 300] on the host", Reason.OFFLOADED)


def test_only_recomputes_look_at_versions_by_themselves():
    """What they bring back may be in memory that the tensor had, at a version of its own."""
    seen = []

    def block(x):
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(same, same):
            seen.append(top_saved_tensors_hooks(False))
        seen.append(top_saved_tensors_hooks(False))
        return y

    torch.utils.checkpoint.checkpoint(block, leaf(2), use_reentrant=False)
    assert [recomputes(hooks[1]) for hooks in seen] == [False, True]


def test_walks():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    wrapper = TwoTensor(b, c.view(3)[:2])
    assert tensors_in(a) == [a]
    found = tensors_in([1, (a, {"x": wrapper})])
    assert [id(one) for one in found] == list(map(id, (a, wrapper, wrapper.a, wrapper.b)))
    assert list(map(id, instances_in([a, [wrapper, "no"]], torch.Tensor))) == [id(a), id(wrapper)]
    assert replaced_in([1, (a, "no")], torch.Tensor, lambda tensor: tensor.shape) == [1, (a.shape, "no")]
