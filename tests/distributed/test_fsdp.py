"""Recorded regions and calls around several units of FSDP2, whose parameters are freed between forward and backward."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from ckpt_hooks import GraphExecGroup, MutationError, apply_checkpointing, checkpoint_module

pytest.importorskip("torch.distributed.fsdp")

from torch.distributed.fsdp import FullyShardedDataParallel

from tests.distributed.sharding import OF_FOUR, SHARDINGS, counted
from tests.distributed.training import FEW, FORMS, WIDTH, Block, Model, assert_equal, results, trained
from tests.measure import Frames


def sharded(sharding: str, form: str, extent: str = "blocks") -> Model:
    torch.manual_seed(0)
    model = Model(FORMS[form], extent)
    {**SHARDINGS, **OF_FOUR}[sharding](model)
    return model


def as_plain(sharding: str, extent: str, forms: list[str]) -> None:
    """Every form comes to what the program without regions does, and leaves the same units whole."""
    with counted() as gathers:
        expected = trained(sharded(sharding, "plain", extent))
    whole = set(gathers.whole)
    failures = {}
    for form in forms:
        try:
            with counted() as gathers:
                found = trained(sharded(sharding, form, extent))
            assert_equal(found, expected, form)
            assert gathers.whole == whole
        except Exception as error:  # in all processes alike, so that they go on together
            failures[form] = f"{type(error).__name__}: {error}"
    assert not failures, failures


#: A call is not to have a region inside around units: the operators that gather are not the same in its rerun.
AROUND_UNITS = sorted(FORMS.keys() - {"plain", "region in a call"})


@pytest.mark.parametrize("sharding", list(SHARDINGS))
def test_regions_over_units(ranks, sharding):
    ranks.run(as_plain, sharding, "blocks", AROUND_UNITS if sharding in ("units", "nested") else FEW)


@pytest.mark.parametrize("extent", ["all", "half"])
@pytest.mark.parametrize("sharding", ["units", "units alone", "nested", "bfloat16", "frozen", "not in backward"])
def test_regions_over_a_unit_and_what_is_around(ranks, sharding, extent):
    ranks.run(as_plain, sharding, extent, FEW)


@pytest.mark.parametrize("sharding", list(OF_FOUR))
def test_regions_over_units_of_four_processes(four_ranks, sharding):
    four_ranks.run(as_plain, sharding, "blocks", ["call", "kept products", "part by part", "whole"])


def backwards(sharding: str, form: str) -> list[str]:
    """Returns what becomes of each unit in the backward of a second step, and the largest number of whole units, in words."""
    model = sharded(sharding, form)
    trained(model, 1)
    with counted() as gathers:
        loss = model(torch.randn(6, WIDTH)).sum()
        gathers.events.clear()
        loss.backward()
    return [" ".join(gathers.events), f"{gathers.most} at once"]


#: Without regions a block is gathered for its backward, the last layers stay whole since forward.
USUAL = ["+2 -2 +1 -1 +0 -0 -", "2 at once"]
#: The replay meets the last block whole, and the middle one, which FSDP2 gathers ahead; the first it gathers by itself.
REPLAYED = ["+2 +0 -0 +1 -2 -1 +0 -0 -", "3 at once"]
#: A rerun calls the blocks, which stay whole until their backward.
RERUN = ["+2 +0 +1 -2 -1 -0 -", "4 at once"]
#: FSDP2 gathers ahead what is in the last block. The middle one is gathered by the replay, with what is in it.
OF_NESTED = "+ +2 +0 +0.up -0.up -0 +1 +1.up -1.up -1 +2.up -2.up -2 +1 +1.up -1.up -1 +0 +0.up -0.up -0 -"


@pytest.mark.parametrize(
    ("sharding", "form", "expected"),
    [
        ("units", "plain", USUAL),
        ("units", "with", REPLAYED),
        ("units", "whole", REPLAYED),
        ("units", "part by part", REPLAYED),
        ("units", "two regions", REPLAYED),
        ("units", "kept products", USUAL),
        ("units", "call", RERUN),
        ("none resharded", "with", ["-2 -1 -0 -", "4 at once"]),
        ("nested", "with", [OF_NESTED, "4 at once"]),
        ("prefetched", "plain", USUAL),
        ("prefetched", "with", ["+2 +0 +1 -2 -1 -0 -", "4 at once"]),
    ],
)
def test_gathers(ranks, sharding, form, expected):
    """A replay gathers a unit once, unless it is there, and gives it back after the last operator that reads it."""
    for found in ranks.run(backwards, sharding, form):
        assert found == expected


def of_modules(how: str) -> None:
    """Regions put on modules: on each unit, inside its hooks, and on a module of several units."""
    expected = trained(sharded("units", "plain"))
    torch.manual_seed(0)
    model = Model()
    if how == "of several units":
        through = Through(model.blocks)
        checkpoint_module(through, recorded=True)
        model.form = lambda function: through
    else:
        apply_checkpointing(model, lambda name, module: type(module) is Block, recorded=True)
    SHARDINGS["units"](model)
    assert_equal(trained(model), expected, how)


class Through(torch.nn.Module):
    """Calls blocks, as a model does whose middle is a module."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self._blocks = [blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self._blocks[0]:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["of several units", "of each unit"])
def test_modules_that_are_regions(ranks, how):
    ranks.run(of_modules, how)


def backward_twice(grouped: bool) -> None:
    found = []
    for form in ("plain", "with", "part by part", "two regions"):
        model = sharded("units", form)
        loss = model(torch.ones(4, WIDTH).cumsum(0)).pow(2).sum()
        with GraphExecGroup() if grouped and form != "plain" else contextlib.nullcontext():
            loss.backward(retain_graph=not grouped)
        if not grouped:
            loss.backward()
        found.append(results(model))
    for other in found[1:]:
        assert_equal(other, found[0], "")


@pytest.mark.parametrize("grouped", [False, True])
def test_a_backward_that_is_repeated_or_in_a_group(ranks, grouped):
    ranks.run(backward_twice, grouped)


def batches_of_other_sizes() -> None:
    """One process saves so much that it would replay part by part, and the other would not."""
    rank = torch.distributed.get_rank()
    found = []
    for form in ("plain", "with", "kept products"):
        model = sharded("units", form)
        with counted() as gathers:
            model(torch.randn(6 if rank else 60000, WIDTH)).pow(2).mean().backward()
        found.append(results(model))
    for other in found[1:]:
        assert_equal(other, found[0], "")
    assert len(gathers.events) == 14


def test_processes_gather_in_one_order(ranks):
    ranks.run(batches_of_other_sizes)


def step_in_between(fused: bool) -> None:
    """The gather would bring the values from after the step, which no version of the whole parameter tells."""
    for form in ("with", "whole", "two regions"):
        model = sharded("units", form)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        x = torch.randn(4, WIDTH)
        model(x).sum().backward()
        loss = model(x).sum()
        optimizer.step()
        with pytest.raises(MutationError, match="a parameter gathered for its unit"):
            loss.backward()
        assert not any(
            isinstance(p, torch.nn.Parameter) and not hasattr(p, "_local_tensor") for p in model.blocks[0].parameters()
        )


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_before_backward(ranks, fused):
    ranks.run(step_in_between, fused)


def hooks_around() -> None:
    """Hooks of the user's get no parameter whose memory is freed by then."""
    for hooks in (
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    ):
        found = []
        for form in ("plain", "with", "part by part"):
            model = sharded("frozen", form)
            x = torch.ones(4, WIDTH).cumsum(0)
            with hooks() if form != "plain" else contextlib.nullcontext():
                loss = model(x).pow(2).sum()
            loss.backward()
            found.append(results(model))
        for other in found[1:]:
            assert_equal(other, found[0], "")


def test_hooks_around_a_region_over_units(ranks):
    ranks.run(hooks_around)


@torch.library.custom_op("ckpt_hooks_tests::may_fail", mutates_args=())
def may_fail(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy, or raises."""
    if MayFail.fails:
        raise OSError("fails")
    return x.clone()


may_fail.register_autograd(lambda ctx, grad: grad)


class MayFail(torch.nn.Module):
    """Copies, between two operators that read parameters of a unit."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return may_fail(x)


def replay_that_raises() -> None:
    torch.manual_seed(0)
    model = Model(FORMS["with"])
    model.blocks[0].norm = torch.nn.Sequential(model.blocks[0].norm, MayFail())
    SHARDINGS["units"](model)
    loss = model(torch.ones(4, WIDTH).cumsum(0)).sum()
    with counted() as gathers, mock.patch.object(MayFail, "fails", True), pytest.raises(OSError, match="fails"):
        loss.backward()
    assert gathers.events == ["+2", "+0", "-0"]


def test_a_replay_that_raises_gives_back(ranks):
    ranks.run(replay_that_raises)


def original_parameters() -> None:
    found: dict[str, list[Any]] = {"plain": [], "with": []}
    for form, results_of_form in found.items():
        torch.manual_seed(0)
        model = Model(FORMS[form])
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FullyShardedDataParallel(block, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(4, WIDTH).cumsum(0)).pow(2).mean()
            loss.backward()
            optimizer.step()
            results_of_form += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    assert all(map(torch.equal, *found.values()))


def test_a_region_over_units_of_the_first_fsdp(ranks):
    """It exchanges the storages of parameters for each unit."""
    ranks.run(original_parameters)


def what_is_held() -> None:
    """The region holds what it holds of a model that is not sharded: neither shards nor what is gathered."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Model(FORMS["with"])
        if is_sharded:
            SHARDINGS["units"](model)
        for _ in range(2):
            frames = Frames()
            with frames:
                loss = model(torch.ones(4, WIDTH).cumsum(0)).sum()
            frame = frames.frames[0]()
            found.append(sorted((held.reason, held.nbytes) for held in frame.held()))
            loss.backward()
    for sharded_one, whole_one in zip(found[2:], found[:2], strict=True):
        assert not Counter(sharded_one) - Counter(whole_one)


def test_gathered_parameters_are_not_held(ranks):
    ranks.run(what_is_held)


class CallsTwice(Model):
    """Calls the blocks twice, so that the backward of a unit has been, and comes again."""

    def through(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return super().through(super().through(x, start, end), start, end)


def units_called_twice() -> None:
    found = []
    for form in ("plain", *FEW, "part by part", "two regions"):
        torch.manual_seed(0)
        model = CallsTwice(FORMS[form])
        SHARDINGS["units"](model)
        with counted() as gathers:
            found.append([*trained(model, 3), torch.tensor(len(gathers.whole))])
        assert_equal(found[-1], found[0], form)


def test_units_called_twice(ranks):
    """No unit stays whole for longer, to be read by the next forward as from before the optimizer's step."""
    ranks.run(units_called_twice)
