"""Writes to tensors, in recorded regions and after them: as eager, or an error that says which, where, and what to do."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ckpt_hooks import CheckpointError, MutationError, checkpoint, checkpoint_region
from tests import regions
from tests.behaviours.recorded import Recorded, runs
from tests.behaviours.runs import assert_as_eager, gradients, plain
from tests.measure import in_turns, leaf

aten = torch.ops.aten


@runs("region", "nested", "inside")
def test_writes_inside(run):
    """To what the region made itself: dimensions are exchanged in place, and lists of tensors are written to."""

    def function(x):
        h, k = x.sin(), x.exp()
        h.t_()
        cosine, turned = h.cos(), h.data
        turned.t_()  # with a version of its own
        j = (k * 1).unsqueeze_(0)
        j.transpose_(1, 2).squeeze_(0)
        with torch.no_grad():
            a, b = h.clone(), k.clone()
            torch._foreach_mul_([a, b], 2.0)
            torch._foreach_add_([a], [b])
        return cosine * j * a * b * turned

    def program(run):
        x = leaf(2, 2)
        return gradients(run(function, x), x)

    assert_as_eager(program, run)


#: Other faces of a tensor: how each is made, and whether a write to it counts as a write to the tensor.
FACES = {
    "itself": (lambda h: h, True),
    "a view": (lambda h: h[1:], True),
    "detach": (lambda h: h.detach(), True),
    "a view of detach": (lambda h: h.detach()[1:], True),
    "data": (lambda h: h.data, False),
    "a view of data": (lambda h: h.data[1:], False),
    "detach of data": (lambda h: h.data.detach(), False),
    "data of detach": (lambda h: h.detach().data, False),
    "set_": (lambda h: torch.empty(0, dtype=h.dtype).set_(h.detach()), False),
    "assigned data": (lambda h: _assigned(h), False),
    "unsafe_chunk": (lambda h: torch.unsafe_chunk(h, 2)[1], False),
}

#: What autograd saves: the result of an operator, the input of one, or an input that came from outside.
SAVES = {
    "a result": lambda x, outside: ((h := x.exp()), h.sum()),
    "an input": lambda x, outside: ((h := x * 2), h.sin().sum()),
    "from outside": lambda x, outside: (outside, (x * outside).sum()),
}


def _assigned(tensor):
    other = torch.zeros_like(tensor)
    other.data = tensor
    return other


@pytest.mark.parametrize(
    ("face", "saves", "form", "dies"), in_turns(FACES, SAVES, ("region", "nested", "inside", "policy"), (False, True))
)
def test_a_write_to_another_face_of_a_saved_tensor(face, saves, dies, form):
    """Plain autograd raises for some, by the version that the two have in common, and hands out what was written for others."""
    make, is_counted = FACES[face]
    if dies and face == "assigned data":
        pytest.skip("nothing tells whose memory it is")
    base = torch.rand(4, dtype=torch.float64)

    def function(x):
        h, y = SAVES[saves](x, base.clone())
        with torch.no_grad():
            other = make(h)
            if dies:
                del h
            other.mul_(3)
        return y

    run = Recorded("region" if form == "policy" else form)
    run = run.selecting([aten.exp.default, aten.mul.Tensor, aten.sin.default]) if form == "policy" else run
    x = leaf(4)
    y = run(function, x)
    if is_counted:
        with pytest.raises(MutationError):
            torch.autograd.grad(y, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(function(x), x)
    else:
        assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(function(x), x)[0])


@pytest.mark.parametrize("form", ["region", "nested", "inside"])
@pytest.mark.parametrize("face", FACES)
def test_a_write_to_a_face_that_was_made_before_the_region(face, form):
    """No operator of the region says what the two have in common."""
    make, is_counted = FACES[face]

    def function(x, run):
        def outer(x):
            h = x.detach() * 2
            other = make(h)

            def inner(x):
                y = (x * h).sum()
                other.mul_(3)
                return y

            return run(inner, x)

        return checkpoint(outer, x) if form == "inside" and run is not plain else outer(x)

    x, run = leaf(4), Recorded("region" if form == "inside" else form)
    if is_counted:
        with pytest.raises(MutationError):
            torch.autograd.grad(function(x, run), x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(function(x, plain), x)
    else:
        expected = torch.autograd.grad(function(x, plain), x)[0]
        assert torch.equal(torch.autograd.grad(function(x, run), x)[0], expected)


@pytest.mark.parametrize(("face", "dies", "form"), in_turns(FACES, (False, True), ("region", "nested", "inside")))
def test_a_write_to_a_tensor_of_which_another_face_was_saved(face, dies, form):
    """The other way round: the face was saved, and the tensor that it is one of is written to."""
    make, is_counted = FACES[face]

    def function(x):
        h = x * 2
        with torch.no_grad():
            other = make(h)
        y = (x[-len(other) :] * other.detach() if is_counted else x[-len(other) :] * other).sum()
        if dies:
            del other
        with torch.no_grad():
            h.mul_(3)
        return y

    x = leaf(4)
    y = Recorded(form)(function, x)
    if is_counted:
        with pytest.raises(MutationError):
            torch.autograd.grad(y, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(function(x), x)
    else:
        assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(function(x), x)[0])


# Writes that no operator on the tape does

#: Ways to hand the memory of a tensor to another library.
SHARED = {
    "Tensor.numpy": lambda t: t.numpy(),
    "array": lambda t: pytest.importorskip("numpy").asarray(t),
    "DLPack": lambda t: torch.from_dlpack(t),
    "DLPack capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "DLPack to numpy": lambda t: pytest.importorskip("numpy").from_dlpack(t),
}


@runs()
@pytest.mark.parametrize("name", ["numpy into empty", "numpy into ones", "data", "data of a view", *SHARED])
def test_writes_past_autograd(run, name):
    """By NumPy and through ``.data``, which no version counts; to memory that operators filled, too."""

    def function(x):
        h = x.sin()
        if name.startswith("numpy"):
            table = torch.empty(4, dtype=x.dtype) if name.endswith("empty") else torch.from_numpy(numpy.ones(4))
            table.numpy()[:] = 3.0
            return (h * table).exp() * table.cos()
        k = h * 2
        if name in SHARED:
            j = h.detach() * 3
            SHARED[name](j)[1:] = 5
            return (k * j).exp() * j.cos()
        if name == "data":
            h.data.mul_(2)
        else:
            h.view(2, 2).data[0].mul_(2)
        return (h * k).exp()

    numpy = pytest.importorskip("numpy")

    def program(run):
        x = leaf(4)
        return gradients(run(function, x), x)

    assert_as_eager(program, run)


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)])
@pytest.mark.parametrize("refilled", [False, True])
def test_memory_that_is_freed_after_the_region(refilled, around):
    """As frameworks do that gather parameters: an error, unless hooks have filled it again by then."""
    x, w = leaf(4), leaf(4)
    table = w.detach().exp()
    contents, size = table.clone(), table.untyped_storage().nbytes()
    with around():
        y = Recorded()(lambda: (x.sin() + table).exp().cos())
    table.untyped_storage().resize_(0)
    if not refilled:
        with pytest.raises(CheckpointError, match=r"float64\[4\] tensor that region 'region' needs .* was freed"):
            y.sum().backward()
        return
    table.untyped_storage().resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(table):
        table.copy_(contents)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.autograd.grad((x.sin() + contents).exp().cos().sum(), x)[0])


def _add_a_buffer(x, other, region):
    with region():
        y = (x + other).sin().exp()
        other.t_()
        return y.cos() + other


def _add_a_parameter(x, other, region):
    weight = torch.nn.Parameter(other)
    with region():
        y = (x + weight).sin().exp()
        with torch.no_grad():
            weight.t_()
        return (y.cos() + weight).sin()


def _read_what_a_cut_storage_had(x, other, region):
    """The integers are a face of the storage, and no tensor of its dtype is left but the one that was saved."""
    other = other.clone()
    with region():
        with torch.no_grad():
            face = torch.empty(0, dtype=other.dtype).set_(other).view(torch.int64)
        view = other[1:]
        y = x[1:] * view
        del view
        with torch.no_grad():
            face.add_(1 << 40)
        return y * 2


def _read_two_views_of_inference(x, other, region):
    with torch.inference_mode():
        other = other.clone()
        view = other[:]
    with region():
        return ((x + other).sin() + view).exp()


def _write_in_a_nested_region(x, other, region):
    with region(replay_whole=False):
        h = x.sin()
        with region(replay_whole=False):
            h.mul_(2)
            z = h.exp() * (h * 3).sin()
        return (h * z).cos()


@pytest.mark.parametrize(
    "program",
    [
        _add_a_buffer,
        _add_a_parameter,
        _read_what_a_cut_storage_had,
        _read_two_views_of_inference,
        _write_in_a_nested_region,
    ],
)
def test_what_operators_read_stays_what_it_was(program):
    """Tensors are turned in place or written to between the operators that read them and backward."""
    x, other = leaf(2, 2), torch.arange(4.0, dtype=torch.float64).view(2, 2)
    regions.assert_as_eager(lambda region: program(x, other.clone(), region), x)


#: Of a complex tensor: what another tensor is given, and what else of its storage stays alive.
UNSEEN = {
    "conjugate of it": (lambda h: h.conj(), lambda h: h),
    "it, by its conjugate": (lambda h: h, lambda h: h.conj().data),
    "it, by its real numbers": (lambda h: h, lambda h: torch.view_as_real(h).data),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_an_unseen_face_of_complex_numbers(kind):
    """What is in memory is not what the tensor is, or of another dtype: a face of it is no strided view of another one."""
    given, left = UNSEEN[kind]
    x = leaf(4).to(torch.complex128).detach().requires_grad_()

    def program(region):
        with region():
            h, other = (x * (1 + 2j)).detach(), torch.empty(4, dtype=x.dtype)
            other.data = given(h)
            kept = left(h)
            del h
            y = (x * other).exp()
            del kept
        return y.abs()

    regions.assert_as_eager(program, x)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64], ids=str)
def test_a_saved_tensor_of_which_no_face_can_be_had(dtype):
    """Its storage is written to by a tensor of another dtype or by a conjugate: an error, since nothing says what it is now."""
    x = leaf(4).to(torch.complex128 if dtype.is_complex else torch.float64).detach().requires_grad_()
    with checkpoint_region():
        h = x.exp()
        y = h * 2
        with torch.no_grad():
            face = torch.empty(0, dtype=dtype).set_(h.untyped_storage())
            face = face.conj() if dtype.is_complex else face
            del h
            face.mul_(3)
    with pytest.raises(MutationError, match="saved tensor has been modified by an inplace operation"):
        y.abs().sum().backward()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_saved_result_that_is_turned_in_place(is_alive):
    """Plain autograd raises too."""

    def function(x):
        h = x.exp()
        y = h * 2
        with torch.no_grad():
            h.t_()
        return y, h if is_alive else None

    x = leaf(2, 2)
    y, _h = function(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with checkpoint_region():
        y, _h = function(x)
    with pytest.raises(MutationError, match=r"\(aten\.t_"):
        y.sum().backward()


def test_a_replay_in_order_that_lacks_a_tensor():
    """It raises, though what is asked for does not need that tensor: a part of the operators would read what came later."""
    x, other = leaf(4), torch.ones(4, dtype=torch.float64)
    with checkpoint_region():
        buffer = x.detach() * 2
        h = (x * buffer.clone()).sin()
        k = (buffer + x).sin()
        buffer.add_(1)
        unasked = (x + other).sin().exp()
        y = (x * buffer).cos()
    other.add_(1)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        torch.autograd.grad((h + k + y).sum(), x)
    del unasked


#: Views whose writes nobody counts for the base, and what in the region has the base: the result of an operator that a policy
#: keeps, or a tensor from outside.
APART = {
    "matmul": (lambda h: h @ h.detach(), aten.bmm.default),
    "unsafe_chunk": (lambda h: torch.unsafe_chunk(h.sin(), 2)[0], aten.sin.default),
    "unsafe_split": (lambda h: torch.unsafe_split(h.sin(), 1)[0], aten.sin.default),
    "unsafe_split_with_sizes": (lambda h: torch.unsafe_split_with_sizes(h.sin(), [1, 1])[1], aten.sin.default),
}


@pytest.mark.parametrize("way", APART)
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_later_write_to_a_part_with_a_counter_of_its_own(way, is_kept, nested):
    """Of what is kept it is an error; of what is not, nobody reads the memory again."""
    make, operator = APART[way]

    def program(call):
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(2, 3, 3).requires_grad_()

        def function(x):
            h = make(x)
            return h, (h * 0.25 * torch.linspace(0, 1, 3, dtype=torch.float64)).tanh()

        h, y = call(function, x)
        with torch.no_grad():
            h.mul_(3)
        return gradients(y, x)

    run = Recorded("nested" if nested else "region", policy=[operator] if is_kept else None)
    if is_kept:
        with pytest.raises(MutationError, match="kept by the policy"):
            program(run)
    else:
        assert_as_eager(program, run)


@pytest.mark.parametrize("make", [torch.unsafe_chunk, torch.unsafe_split, torch.detach])
def test_a_later_write_to_a_part_of_what_a_replay_reads(make):
    x, base = leaf(4), torch.rand(4, dtype=torch.float64)
    with checkpoint_region():
        parts = make(base, 2) if make is not torch.detach else [base.detach()]
        y = (base.sin() * x).exp().sin()
    parts[0].add_(1)
    with pytest.raises(MutationError, match="from outside of the region"):
        y.sum().backward()
