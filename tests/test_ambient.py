"""Rule 7 for what is captured so far: generators, autocast, default device; restored for a recompute, and put back after it."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import grad

from ckpt_hooks import DeterminismError, checkpoint
from ckpt_hooks._ambient import streams
from tests.measure import Calls, CountOps, Log, as_library, leaf


def dropout(x):
    return F.dropout(x.sin(), 0.5).exp() * torch.rand_like(x)


def test_random_numbers_are_those_of_forward(impl):
    x = leaf(8)
    torch.manual_seed(1)
    (g,) = grad(impl(dropout, x).sum(), x)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    (expected,) = grad(dropout(x).sum(), x)
    assert torch.equal(g, expected)
    assert torch.equal(after, torch.get_rng_state())


def test_numbers_drawn_between_forward_and_backward_are_left_alone(impl):
    x = leaf(8)
    torch.manual_seed(1)
    y = impl(dropout, x).sum()
    between = torch.rand(3)
    (g,) = grad(y, x)
    after = torch.rand(3)
    torch.manual_seed(1)
    z = dropout(x).sum()
    assert torch.equal(between, torch.rand(3))
    assert torch.equal(g, grad(z, x)[0])
    assert torch.equal(after, torch.rand(3))


def test_nested_regions_draw_what_they_drew(impl):
    def nested(x, depth):
        return dropout(x) if depth == 0 else dropout(impl(nested, dropout(x), depth - 1))

    def plain(x, depth):
        return dropout(x) if depth == 0 else dropout(plain(dropout(x), depth - 1))

    x = leaf(8)
    torch.manual_seed(1)
    (g,) = grad(impl(nested, x, 3).sum(), x)
    after = torch.rand(1)
    torch.manual_seed(1)
    (expected,) = grad(plain(x, 3).sum(), x)
    assert torch.equal(g, expected)
    assert torch.equal(after, torch.rand(1))


def test_preserve_rng_state_false_draws_anew_and_disturbs_nothing():
    masks = Log()

    def function(x):
        mask = torch.rand_like(x)
        masks.append(mask)
        return x.sin() * mask

    x = leaf(8)
    y = checkpoint(function, x, preserve_rng_state=False).sum()
    state = torch.get_rng_state()
    y.backward()
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(*masks)


def test_a_recompute_that_draws_more_than_forward_disturbs_nothing():
    calls = Calls(lambda x: (torch.rand(5) if calls.count > 1 else None, x.sin().exp())[1])
    x = leaf(3)
    y = checkpoint(calls, x).sum()
    state = torch.get_rng_state()
    with pytest.raises(DeterminismError, match="the recompute has drawn other random numbers"):
        y.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_draws_that_forward_takes_back_are_drawn_again(impl):
    """Under ``fork_rng`` a function draws and leaves the generator as it was."""

    def function(x):
        with torch.random.fork_rng():
            return F.dropout(x.sin(), 0.5).exp()

    x = leaf(8)
    torch.manual_seed(1)
    y = impl(function, x).sum()
    torch.rand(3)
    (g,) = grad(y, x)
    torch.manual_seed(1)
    assert torch.equal(g, grad(function(x).sum(), x)[0])


def test_regions_that_draw_nothing_share_one_state():
    """However many there are, one copy of the generator's state is kept for all of them; a draw makes another."""
    first, second = streams.capture()[0], streams.capture()[0]
    assert second is first
    torch.rand(1)
    third = streams.capture()[0]
    assert third is not first
    assert torch.equal(third, torch.get_rng_state())


@pytest.mark.parametrize("draw", [1, 2, 623, 624, 625, 1248])
def test_any_number_of_draws_is_noticed(draw):
    """The state is compared in full: the generator's position repeats every 624 draws, its content does not."""
    before = streams.capture()[0]
    torch.empty(draw, dtype=torch.int32).random_()
    assert streams.capture()[0] is not before


def test_a_normal_number_left_over_from_before_is_noticed():
    """``torch.randn`` of one number draws two and keeps one: taking that one moves nothing but a flag."""
    torch.randn(1)
    before = streams.capture()[0]
    torch.randn(1)
    assert streams.capture()[0] is not before


@pytest.mark.parametrize("mode", [CountOps, FakeTensorMode])
def test_states_are_compared_without_a_word_to_dispatch_modes(mode):
    """A mode that counts sees no operator, and fake tensors have no say in what is equal."""
    before = streams.capture()[0]
    with mode() as active:
        assert streams.capture()[0] is before
        torch.default_generator.set_state(torch.Generator().manual_seed(3).get_state())
        assert streams.capture()[0] is not before
    assert not getattr(active, "counts", None)


@as_library
class FakeDevice(types.SimpleNamespace):
    """A device module as backends register them: one generator a device, uninitialised at first."""

    __hash__ = object.__hash__  # as modules have it

    def __init__(self, devices=1, *, generators=True, initialized=True):
        super().__init__(initialized=initialized)
        self.reads = 0
        self.streams = [torch.Generator().manual_seed(i) for i in range(devices)]
        if generators:
            self.default_generators = tuple(self.streams)

    def is_initialized(self):
        return self.initialized

    def device_count(self):
        return len(self.streams)

    def get_rng_state(self, device=0):
        self.reads += 1
        return self.streams[device].get_state()

    def set_rng_state(self, state, device=0):
        self.streams[device].set_state(state)

    def draw(self, device=0):
        return torch.rand(8, generator=self.streams[device], dtype=torch.float64)


@pytest.fixture
def install(monkeypatch):
    """Puts a fake device module on torch under a name and lets the engine know of the name."""

    def put(name, module):
        monkeypatch.setattr(torch, name, module, raising=False)
        monkeypatch.setattr(streams, "_DEVICE_TYPES", [*streams._DEVICE_TYPES, name])
        monkeypatch.setattr(streams, "_modules_known_for", -1)
        return module

    yield put
    monkeypatch.undo()  # first, since it would put back for how many names the modules are known, and the fakes with it
    streams._modules_known_for = -1


@pytest.mark.parametrize("generators", [True, False], ids=["default_generators", "get_rng_state"])
@pytest.mark.parametrize("devices", [1, 3])
def test_every_device_of_every_type_is_captured_whatever_the_arguments(install, devices, generators):
    """Two accelerator types with several devices each, none of them among the arguments."""
    one = install("fake_one", FakeDevice(devices, generators=generators))
    two = install("fake_two", FakeDevice(devices, generators=generators))
    masks = Log()

    def function(x):
        mask = torch.stack([module.draw(i) for module in (one, two) for i in range(devices)]).sum(0)
        masks.append(mask)
        return (x * mask).sin()

    x = leaf(8)
    y = checkpoint(function, x).sum()
    one.draw(devices - 1)
    states = [stream.get_state() for stream in (*one.streams, *two.streams)]
    y.backward()
    assert torch.equal(*masks)
    assert all(torch.equal(s, t.get_state()) for s, t in zip(states, (*one.streams, *two.streams), strict=True))


def test_an_uninitialised_device_is_not_touched(install):
    fake = install("fake_one", FakeDevice(1, generators=False, initialized=False))
    x = leaf(3)
    checkpoint(torch.exp, x).sum().backward()
    assert fake.reads == 0


def test_a_backend_registered_later_is_found(install, monkeypatch):
    """Backends outside of torch rename ``privateuseone``, which may happen after this package was imported."""
    streams.capture()
    fake = FakeDevice(1)
    monkeypatch.setattr(torch, "late_backend", fake, raising=False)
    monkeypatch.setattr(streams, "private_backend_name", lambda: "late_backend")
    assert len(streams.capture()[1]) == 1


def read_casts():
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.amp.is_autocast_available(kind)]
    return torch.is_autocast_cache_enabled(), [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds]


def linear(x, w):
    return (x @ w).tanh() @ w


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_forward_is_in_force_in_recompute(impl, dtype):
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = impl(linear, x, w)
        expected = linear(x, w)
    assert y.dtype == dtype
    for a, b in zip(grad(y.sum(), (x, w)), grad(expected.sum(), (x, w)), strict=True):
        assert torch.equal(a, b)


def test_autocast_around_backward_alone_is_not(impl):
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    y, expected = impl(linear, x, w), linear(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = grad(y.sum(), (x, w))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        without = grad(expected.sum(), (x, w))  # the operators of backward itself run under autocast in either case
    for a, b in zip(got, without, strict=True):
        assert torch.equal(a, b)


def test_autocast_of_several_device_types_at_once():
    """Settings of every type are seen by the rerun, and afterwards they are what they were."""
    seen = Log()

    def function(x):
        seen.append(read_casts())
        return x.exp()

    x = leaf(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        torch.set_autocast_enabled("mps", True)
        torch.set_autocast_dtype("mps", torch.bfloat16)
        y = checkpoint(function, x)
        torch.set_autocast_enabled("mps", False)
        torch.set_autocast_dtype("mps", torch.float16)
    before = read_casts()
    y.sum().backward()
    assert seen[0] == seen[1] != before
    assert read_casts() == before


def test_autocast_leaves_no_cached_casts_behind():
    """Casts of a recompute live in a level of their own and go with it."""
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(linear, x, w)
    y.sum().backward()
    with CountOps() as ops, torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x, w)
    assert ops.counts["_to_copy"] == 2


def test_autocast_switched_inside_a_region(impl):
    def function(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = linear(x, w)
        return x.float() @ w

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for a, b in zip(grad(impl(function, x, w).sum(), (x, w)), grad(function(x, w).sum(), (x, w)), strict=True):
        assert torch.equal(a, b)


def test_default_device_of_forward_is_in_force_in_recompute(impl):
    def function(x):
        return (x * torch.ones(3)).sin()

    x = torch.randn(3, device="meta", requires_grad=True)
    with torch.device("meta"):
        y = impl(function, x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "meta"


def test_default_device_around_backward_alone_is_not():
    def function(x):
        return (x * torch.ones(3)).sin()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(function, x)
    with torch.device("meta"):
        y.sum().backward()
        assert torch.get_default_device().type == "meta"
    assert x.grad is not None
    assert x.grad.device.type == "cpu"


def test_set_default_device():
    x = torch.randn(3, device="meta", requires_grad=True)
    torch.set_default_device("meta")
    try:
        y = checkpoint(lambda x: (x * torch.ones(3)).sin(), x)
    finally:
        torch.set_default_device(None)
    y.sum().backward()
    assert torch.get_default_device().type == "cpu"


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what ``torch.Tensor.sin`` returns, and counts how often it was entered."""

    entered = 0

    def __enter__(self):
        self.entered += 1
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


def test_function_modes_of_forward_are_active_in_recompute_and_are_not_entered_again():
    x, mode = leaf(3), Doubling()
    with mode:
        y = checkpoint(lambda x: x.sin().exp(), x)
        expected = x.sin().exp()
    assert torch.equal(grad(y.sum(), x)[0], grad(expected.sum(), x)[0])
    assert mode.entered == 1
    assert torch.overrides._get_current_function_mode_stack() == []


def test_function_modes_around_backward_alone_are_not():
    x = leaf(3)
    y, expected = checkpoint(lambda x: x.sin().exp(), x), x.sin().exp()
    with torch.device("meta"), Doubling():
        before = torch.overrides._get_current_function_mode_stack()
        assert len(before) == 2
        assert torch.equal(grad(y.sum(), x)[0], grad(expected.sum(), x)[0])
        assert all(one is other for one, other in zip(before, torch.overrides._get_current_function_mode_stack(), strict=True))


def test_the_default_device_set_around_backward_alone_is_not_seen():
    seen, x = Log(), leaf(3)

    def function(x):
        seen.append(torch.get_default_device())
        return x.sin().exp()

    y = checkpoint(function, x).sum()
    torch.set_default_device("meta")
    try:
        y.backward()
        assert torch.get_default_device() == torch.device("meta")
        assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert seen == [torch.device("cpu")] * 2
    assert torch.empty(1).device.type == "cpu"
