"""What frames say of their saved tensors: whose each is, and what becomes of it, with nothing recomputed."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region
from ckpt_hooks._core.events import Observer
from ckpt_hooks._core.frame import describe_packed
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.settings import observe
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks.policies import offload_ops, save_only_these_names, save_ops
from tests.measure import CountOps, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten


class Frames(Observer):
    """The frames of a block, held."""

    def __init__(self):
        self.frames = []

    def entered(self, region):
        self.frames.append(region.frame())


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
        (0, Reason.DROPPED, (4, 3), torch.float64, 96),
        (1, Reason.DROPPED, (4, 3), torch.float64, 96),
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
        (Reason.NAME, None),
        (Reason.DROPPED, "aten.tanh.default"),
    ]
    assert [(one.fate, one.nbytes, one.region) for one in inner] == [(Reason.OFFLOADED, 8192, ("outer", "inner"))]
    del a, d


def test_a_tensor_that_was_overwritten_is_lost():
    x = leaf(4)
    log = Frames()
    with observe(log), checkpoint_region():
        h = x * 2
        y = h.sin()
        h.mul_(2)
    assert [one.fate for one in log.frames[0].saved()] == [Reason.LOST]
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
        ("parameter", -1, 32, ("region",)),
    ]
    assert describe_packed(w) is None
    assert describe_packed((1, 2)) is None
    assert describe_packed([1, 2, 3]) is None
    assert describe_packed([w, 1, 2]) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape():
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]).requires_grad_()
    log = Frames()
    with observe(log), checkpoint_region():
        y = (parts * 2).relu()
    assert all(one.shape is None or len(one.shape) for one in log.frames[0].saved())
    del y


# What frames hold besides


def held_by(frame):
    """Returns reason and size of each tensor that a frame holds."""
    return sorted((held.reason, held.nbytes) for held in frame.held())


class Norm(torch.nn.Module):
    """Has a state that forward changes, and one that it does not."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(4, dtype=torch.float64))

    def forward(self, x, *more):
        self.count += 1
        return torch.nn.functional.dropout((x * self.weight).sin() * self.mask, 0.5).exp()


def test_a_function_frame_holds_arguments_state_and_random_state():
    """Parameters are not its own. Of state there are aliases of the buffers; copies of small ones are no memory of torch's."""
    module = Norm()
    x, table = leaf(4) * 2, torch.arange(6)
    log = Frames()
    with observe(log):
        y = checkpoint(module, x, table)
    (frame,) = log.frames
    owners = {"x": x, "table": table, "count": module.count, "mask": module.mask}
    names = {storage_and_size(tensor)[0]: name for name, tensor in owners.items()}
    assert {(held.reason, names.get(held.storage, held.nbytes)) for held in frame.held()} == {
        (Reason.INPUT, "x"),
        (Reason.INPUT, "table"),
        (Reason.RANDOM_STATE, 5056),
        (Reason.STATE, "count"),
        (Reason.STATE, "mask"),
    }
    (argument,) = (held for held in frame.held() if held.nbytes == 48)
    assert argument.shape == (6,)
    assert argument.dtype is torch.int64
    assert argument.device.type == "cpu"
    assert argument.storage == storage_and_size(table)[0]
    del y


SCALE, UNRELATED = torch.ones(2), torch.ones(3)


def reads_a_global(x):
    return x * SCALE


def test_other_globals_of_a_module_are_not_a_frame_s():
    log = Frames()
    with observe(log):
        y = checkpoint(reads_a_global, leaf(2))
    storages = {held.storage for held in log.frames[0].held()}
    assert storage_and_size(SCALE)[0] in storages
    assert storage_and_size(UNRELATED)[0] not in storages
    del y


def test_a_function_frame_holds_what_its_policy_keeps():
    x, w = leaf(4, 4), leaf(4, 4)
    log = Frames()
    with observe(log):
        y = checkpoint(policy=save_ops(aten.mm.default))(lambda x: (x @ w).sin().exp())(x)
    (frame,) = log.frames
    assert [held for held in held_by(frame) if held[0] is Reason.POLICY] == [(Reason.POLICY, 128)]
    y.sum().backward()
    assert [held for held in held_by(frame) if held[0] is Reason.POLICY] == []


def test_what_a_backward_brought_back_and_nobody_took():
    """It is held as long as that backward may ask for it."""
    x = leaf(4)
    log, seen = Frames(), []
    with observe(log):
        one, other = checkpoint(lambda x: ((x * 2).sin(), (x * 3).exp()), x)
    one.register_hook(lambda gradient: seen.append(held_by(log.frames[0])))
    hidden = one.grad_fn.register_hook(lambda *_: seen.append(held_by(log.frames[0])))
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    before, during = seen
    assert [held for held in before if held[0] is Reason.RECOMPUTED] == []
    assert [held for held in during if held[0] is Reason.RECOMPUTED] == [(Reason.RECOMPUTED, 32)]
    assert [held for held in held_by(log.frames[0]) if held[0] is Reason.RECOMPUTED] == []
    hidden.remove()
    del other


@pytest.mark.parametrize("written", [False, True])
def test_a_recorded_frame_holds_what_was_kept_and_then_written_to(written):
    """The value that the policy kept is copied before the write, and listed."""
    x, w = leaf(4, 4), leaf(4, 4)
    log = Frames()
    with observe(log), checkpoint_region(policy=save_ops(aten.mm.default)):
        h = x @ w
        y = (h * 2).sin()
        if written:
            h.add_(1)
        z = h.exp()
    held = held_by(log.frames[0])
    assert (Reason.POLICY, 128) in held
    del y, z


def test_a_sparse_tensor_has_the_size_of_its_parts():
    """Two indices of eight bytes and a value for each of four elements."""
    x, sparse = leaf(4, 4), torch.eye(4, dtype=torch.float64).to_sparse()
    with checkpoint_region() as region:
        y = torch.sparse.mm(sparse, x.sin()).cos()
    assert {kept.nbytes for kept in region.kept()} == {96}
    assert describe_packed([sparse, 0, ("region", None)]).nbytes == 96
    del y


def test_what_a_region_around_holds_is_not_the_inner_one_s():
    x, outside = leaf(4, 4), torch.ones(4, 4, dtype=torch.float64)
    log = Frames()
    with observe(log), checkpoint_region():
        h = (x * outside) * 2
        y = checkpoint(policy=save_ops(aten.mm.default))(lambda h: (h @ h).sin())(h)
    _, inner = log.frames
    storages = {held.storage for held in inner.held()}
    assert storage_and_size(outside)[0] not in storages
    del y


def test_what_is_on_the_host_and_what_hooks_have_is_listed(transfers):
    """Each with its size, though no tensor is at hand; what goes to the hooks may be anything."""
    x, w = leaf(1024), leaf(4, 4)
    with checkpoint_region(policy=offload_ops(aten.exp.default)) as region:
        y = (x * 2).exp()
    assert [kept[:3] for kept in region.kept()] == [
        (Reason.OFFLOADED, "kept by the policy, as a result of aten.exp.default", 8192)
    ]
    assert [kept.description for kept in region.kept()] == ["float64[1024] on the host"]
    del y
    there = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: there.append(tensor) or len(there), lambda n: there[n - 1])
    with hooks, checkpoint_region(policy=save_ops(aten.mm.default)) as region:
        y = (w @ w).sin()
    assert [kept[:3] for kept in region.kept()] == [(Reason.HOOKS, "kept by the policy", 128)]
    y.sum().backward()
