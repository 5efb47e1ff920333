"""Memory that its owner frees and fills again: loans to replays, with an owner made up for the tests."""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ckpt_hooks
from ckpt_hooks import MutationError, checkpoint, checkpoint_region, patch_torch
from ckpt_hooks._tensors import refilling
from ckpt_hooks._tensors.refilling import RefillSource, borrow, give_back, is_lent
from tests.behaviours.test_framework_hooks import bind_anew, fill_by_data
from tests.measure import Frames, allocated
from tests.regions import assert_same

FRAMEWORK = "torch.distributed.fsdp"


class Sheets:
    """The owner of whole tensors, each a copy of a source, all filled and freed together."""

    def __init__(self, **sources: torch.Tensor) -> None:
        self.sources = sources
        self.whole = {name: torch.nn.Parameter(source.clone()) for name, source in sources.items()}
        self.told: list[str] = []
        self.is_full, self.filled = True, 0

    def fill(self):
        if self.is_full:
            return None
        self.told.append("fill")
        for name, tensor in self.whole.items():
            tensor.untyped_storage().resize_(tensor.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(self.sources[name])
        self.is_full, self.filled = True, self.filled + 1
        return functools.partial(self.free, self.filled)

    def free(self, filled: int | None = None) -> None:
        assert filled in (None, self.filled)  # what an earlier filling returned does not free the memory
        self.told.append("free")
        for tensor in self.whole.values():
            tensor.untyped_storage().resize_(0)
        self.is_full = False


@pytest.fixture
def registered(monkeypatch):
    """Owners made up in place of FSDP2's, as if it had been imported."""
    owners: list[Sheets] = []

    def find(tensor):
        for owner in owners:
            for name, whole in owner.whole.items():
                if whole is tensor:
                    return RefillSource(owner, owner.sources[name])
        return None

    monkeypatch.setitem(sys.modules, FRAMEWORK, sys.modules.get(FRAMEWORK, types.ModuleType(FRAMEWORK)))
    monkeypatch.setattr(refilling, "_finder_of_fsdp", lambda: find)
    return owners


def sheets(owners, *names):
    owner = Sheets(**{name: torch.rand(3, 3) for name in names})
    owners.append(owner)
    return owner


def test_a_replay_borrows_what_it_reads(registered):
    """Tensors filled together are borrowed once, from the first operator that reads one to the last."""
    first, second = sheets(registered, "a", "b"), sheets(registered, "c")
    x = torch.rand(3, 3, requires_grad=True)
    found = []
    for whole in (None, True, False):
        for owner in (first, second):
            owner.fill()
            owner.told.clear()
        a, b, c = first.whole["a"], first.whole["b"], second.whole["c"]
        if whole is None:
            y = ((x @ a).sin() @ b).exp() @ c
        else:
            with checkpoint_region(replay_whole=whole):
                y = ((x @ a).sin() @ b).exp() @ c
            first.free()  # not the second, as if its backward had begun
            first.told.clear()

            def fill_for_backward(grad):
                first.fill()
                first.told.append("backward")

            y.grad_fn.next_functions[0][0].register_prehook(lambda grads: fill_for_backward(grads))
        found.append(torch.autograd.grad(y.sum(), (x, a, b, c)))
        if whole is not None:
            assert first.told == ["fill", "free", "fill", "backward"]
            assert second.told == []
    assert_same(list(found[1]), list(found[0]))
    assert_same(list(found[2]), list(found[0]))


def test_memory_is_given_back_after_its_last_read(registered):
    """Before the replay borrows other memory."""
    first, second = sheets(registered, "a", "b"), sheets(registered, "c")
    told = second.told = first.told
    x, a, b, c = torch.rand(3, 3, requires_grad=True), first.whole["a"], first.whole["b"], second.whole["c"]
    expected = torch.autograd.grad((((x + a).sin() + b).exp() + c).sin().exp().sum(), x)
    with checkpoint_region():
        y = (((x + a).sin() + b).exp() + c).sin().exp()
    first.free()
    second.free()
    told.clear()
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *expected)
    assert told == ["fill", "free", "fill", "free"]


@pytest.mark.parametrize("inference", [False, True])
def test_memory_of_an_owner_is_not_the_regions(registered, inference):
    with torch.inference_mode(inference):
        owner = sheets(registered, "a")
        owner.whole["a"].requires_grad_(False)
    x = torch.rand(3, 3, requires_grad=True)
    frames = Frames()
    with frames, checkpoint_region():
        y = (x + owner.whole["a"]).sin().exp()
    frame = frames.frames[0]()
    assert len(frame.saved()) == 2
    assert frame.held() == []
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x + owner.whole["a"]).sin().exp().sum(), x)[0])


def test_the_last_user_gives_back(registered):
    owner = sheets(registered, "a")
    assert borrow(owner) is None  # there, and stays
    assert not is_lent(owner)
    owner.free()
    first, second = borrow(owner), borrow(owner)
    assert is_lent(owner)
    give_back(owner, first)
    assert owner.is_full
    owner.free()  # by the owner itself
    third = borrow(owner)
    assert owner.is_full
    give_back(owner, second)
    assert owner.is_full
    give_back(owner, third)
    assert owner.told == ["free", "fill", "free", "fill", "free"]
    assert not is_lent(owner)


@pytest.mark.parametrize("part", ["sources", "whole"])
def test_a_source_or_a_filled_tensor_that_was_modified(registered, part):
    owner = sheets(registered, "a")
    x = torch.rand(3, 3, requires_grad=True)
    with checkpoint_region():
        y = (x @ owner.whole["a"]).sin().exp()
    with torch.no_grad():
        getattr(owner, part)["a"].mul_(2)
    if part == "sources":
        owner.free()
    with pytest.raises(MutationError, match=r"region 'region' needs \(a parameter gathered for its unit\) has been modified"):
        y.sum().backward()
    assert owner.told == ["free"] * (part == "sources")


def test_no_question_before_the_framework_is_imported(registered, monkeypatch):
    """The finder is not even loaded."""
    monkeypatch.delitem(sys.modules, FRAMEWORK)
    owner = sheets(registered, "a")
    loaded = []
    monkeypatch.setattr(refilling, "_finder_of_fsdp", lambda: loaded.append("finder"))
    assert refilling.owner_of(owner.whole["a"]) is None
    assert not loaded


KEPT = [torch.ops.aten.addmm.default]


def through_torch(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def selective(module):
    contexts = functools.partial(module.create_selective_checkpoint_contexts, KEPT)
    return lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


#: Ways to give a policy, each with the surroundings in which it is given.
WAYS = {
    "checkpoint(policy=)": (contextlib.nullcontext, lambda layer, x: checkpoint(policy=KEPT)(layer)(x)),
    "patch_torch(policy=)": (functools.partial(patch_torch, policy=KEPT), through_torch),
    "patch_torch, torch's context_fn": (patch_torch, selective(torch.utils.checkpoint)),
    "patch_torch, our context_fn": (patch_torch, selective(ckpt_hooks)),
}


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("swaps", [False, True])
def test_calls_under_a_policy_leave_it_where_hooks_take_weights_away(swaps, way, monkeypatch):
    """And hold no more than under torch's implementation, from the second region on."""
    monkeypatch.setattr("ckpt_hooks._checkpoint.selective._takers", set())

    def steps(form):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        for layer in layers:
            if form is not None:
                (bind_anew if swaps else fill_by_data)(layer[0])
            layer.requires_grad_(not swaps)
        found, kinds, live = [], [], []

        def run(layers, h):
            for layer in layers:
                h = layer(h) if form is None else form(layer, h)
                kinds.append(type(h.grad_fn._raw_saved_result.data).__name__ if form is not None else "")
            return h

        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            first = run(layers[:1], x)
            h, held = allocated(lambda: run(layers[1:], first))
            live.append(held)
            h.sum().backward()
            found += [x.grad, *(p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None)]
        return found, kinds, live

    surroundings, form = WAYS[way]
    expected, _, _ = steps(None)
    # Memory that an earlier test has left, and that is freed meanwhile, would make theirs less.
    theirs = [*map(max, *(steps(selective(torch.utils.checkpoint))[2] for _ in range(2)))]
    with pytest.warns(UserWarning, match="run without their policy"), surroundings():
        found, kinds, ours = steps(form)
    assert all(map(torch.equal, expected, found))
    assert kinds == ["TapeHandle", *["tuple"] * 11]
    more = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    assert max(more) <= 0, more
