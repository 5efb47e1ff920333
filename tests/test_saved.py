"""What frames say of their saved tensors: whose each is, and what becomes of it, with nothing recomputed."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region
from ckpt_hooks._core.frame import Observer, describe_packed
from ckpt_hooks._core.observers import observe
from ckpt_hooks._core.saved import Fate
from ckpt_hooks.policies import offload_ops, save_only_these_names
from tests.measure import CountOps, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten


class Frames(Observer):
    """The frames of a block, held."""

    def __init__(self):
        self.frames = []

    def entered(self, frame):
        self.frames.append(frame)


def packed_by(node):
    """Returns what stands for a node's saved tensors, by name."""
    found = {}
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            found[name.removeprefix("_raw_saved_")] = saved.data if hasattr(saved, "data") else None
    return found


def told(region, program):
    """Runs a program in a region; returns the frame and what the program returned."""
    log = Frames()
    with observe(log), CountOps() as ops:
        result = region(program)
        counts = sum(ops.counts.values())
        saved = [frame.saved() for frame in log.frames]
        assert sum(ops.counts.values()) == counts  # nothing ran
    return log.frames, saved, result


def in_function(program):
    return checkpoint(name="region")(program)()


def in_block(program):
    with checkpoint_region(name="region"):
        return program()


@pytest.mark.parametrize("region", [in_function, in_block])
def test_dropped_tensors(region):
    x = leaf(4, 3)

    def program():
        return (x * 2).sin().exp()

    (frame,), (saved,), y = told(region, program)
    assert [(one.position, one.fate, one.shape, one.dtype, one.nbytes) for one in saved] == [
        (0, Fate.DROPPED, (4, 3), torch.float64, 96),
        (1, Fate.DROPPED, (4, 3), torch.float64, 96),
    ]
    assert {one.region for one in saved} == {("region",)}
    made_by = ["aten.mul.Tensor", "aten.exp.default"] if region is in_block else [None, None]
    assert [one.made_by for one in saved] == made_by
    y.sum().backward()
    del y
    assert frame.saved() == []  # backward is through


@pytest.mark.parametrize("region", [in_function, in_block])
def test_handles_that_are_gone_are_left_out(region):
    x = leaf(4)

    def program():
        h = x * 2
        return h.sin(), h.exp()

    (frame,), _, (one, other) = told(region, program)
    assert [saved.position for saved in frame.saved()] == [0, 1]
    del one
    assert [saved.position for saved in frame.saved()] == [1]
    del other
    assert frame.saved() == []


def test_fates_in_a_recorded_region(transfers):
    """Each, by what autograd saved: ``sin`` and ``tan`` an input, ``exp`` and ``tanh`` an output."""
    x = leaf(1024)
    log = Frames()
    policy = save_only_these_names("named")
    outside = torch.ones(1024, dtype=torch.float64)
    with observe(log), checkpoint_region(policy=policy, name="outer"):
        h = checkpoint_name(x * 2, "named")
        a = h.sin()  # of a tensor that the policy keeps
        b = (h * 3).tanh()  # an output, dropped
        c = b * outside  # one from outside, with nothing around to hand it to, is in the graph itself
        with checkpoint_region(policy=offload_ops(aten.exp.default), name="inner"):
            d = c.exp()
    outer, inner = (frame.saved() for frame in log.frames)
    assert [(one.fate, one.made_by) for one in outer] == [
        (Fate.POLICY, None),
        (Fate.DROPPED, "aten.tanh.default"),
    ]
    assert [(one.fate, one.nbytes, one.region) for one in inner] == [(Fate.OFFLOADED, 8192, ("outer", "inner"))]
    del a, d


def test_a_tensor_that_was_overwritten_is_lost():
    x = leaf(4)
    log = Frames()
    with observe(log), checkpoint_region():
        h = x * 2
        y = h.sin()
        h.mul_(2)
    assert [one.fate for one in log.frames[0].saved()] == [Fate.LOST]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("check", ["default", "none"])
def test_metadata_that_is_not_compared_is_not_known(check):
    x = leaf(4)
    log = Frames()
    with observe(log):
        y = checkpoint(determinism_check=check)(lambda x: (x * 2).sin())(x)
    (saved,) = log.frames[0].saved()
    assert (saved.shape, saved.nbytes) == (((4,), 32) if check == "default" else (None, None))
    del y


@pytest.mark.parametrize("region", [in_function, in_block])
def test_what_stands_in_the_graph_is_described(region):
    """A handle tells whose it is, a leaf too; what no region has packed is none's."""
    x, w = leaf(4), leaf(4)

    def program():
        return ((x * 2).sin() * w).sum()

    _, _, y = told(region, program)
    product = y.grad_fn.next_functions[0][0]
    descriptions = [describe_packed(packed) for packed in packed_by(product).values()]
    assert sorted((one.fate.value, one.position, one.nbytes, one.region) for one in descriptions) == [
        ("dropped", 1 if region is in_block else 2, 32, ("region",)),
        ("leaf", -1, 32, ("region",)),
    ]
    assert describe_packed(w) is None
    assert describe_packed((1, 2)) is None
    assert describe_packed([1, 2, 3]) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape():
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]).requires_grad_()
    log = Frames()
    with observe(log), checkpoint_region():
        y = (parts * 2).relu()
    assert all(one.shape is None or len(one.shape) for one in log.frames[0].saved())
    del y
