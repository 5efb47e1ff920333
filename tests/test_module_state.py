"""State of modules: where it is looked for, what is copied, what a rerun leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import checkpoint, trace
from tests.measure import same_bits


def leaf(size):
    """Returns a leaf with the same elements each time, for which nothing is drawn."""
    return torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()


class Counting(nn.Module):
    """Multiplies by how often it was called, which it keeps in a buffer."""

    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("calls", torch.zeros(size, dtype=torch.float64))

    def forward(self, x):
        self.calls.add_(1)
        return (x * self.calls[0].clone()).sin()


def run(module, x):
    """Returns the gradient, and what the module's buffers are before and after backward."""
    y = checkpoint(module, x)
    before = [buffer.clone() for buffer in module.buffers()]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient, before, [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("size", [1, 100_000], ids=["small", "large"])
def test_buffers_written_in_place_are_rewound(size):
    x, module, plain = leaf(3), Counting(size), Counting(size)
    for _ in range(6):
        gradient, before, after = run(module, x)
        assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
        assert all(map(torch.equal, before, after))
    assert torch.equal(module.calls, plain.calls)


def test_views_and_aliases_of_a_buffer_see_it_rewound():
    module, x = Counting(), leaf(3)
    alias, view, version = module.calls, module.calls[:], None
    y = checkpoint(module, x)
    version = alias._version
    y.sum().backward()
    assert module.calls is alias
    assert (alias.item(), view.item(), alias._version) == (1, 1, version)


def test_attributes_that_the_first_forward_adds_are_found():
    class Lazy(nn.Module):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = torch.ones(1, dtype=torch.float64)
            self.scale.mul_(2)
            return (x * self.scale.clone()).sin()

    x, module, plain = leaf(3), Lazy(), Lazy()
    for _ in range(4):
        gradient, _, _ = run(module, x)
        assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
        assert torch.equal(module.scale, plain.scale)


@pytest.mark.usefixtures("no_gc")
def test_what_is_known_of_a_module_goes_with_it():
    """Whether its buffers are copied or watched; without the garbage collector."""

    def alive():
        plain = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided]
        return sum(not one.is_nested and one.untyped_storage().nbytes() == 4 * 1013 for one in plain)

    modules = [nn.Sequential(nn.BatchNorm1d(1013, affine=False), nn.Tanh()), nn.Sequential(Table(1013))]
    for _ in range(6):
        for module in modules:
            checkpoint(module, torch.rand(2, 1013, requires_grad=True)).sum().backward()
    assert alive() > 3
    gone = [weakref.ref(module) for module in modules]
    del modules, module
    assert [one() for one in gone] == [None, None]
    assert alive() == 0


class Table(nn.Module):
    """Scales by a buffer to which nobody writes."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("table", torch.ones(*(shape or (3,))))

    def forward(self, x):
        return (x * self.table[..., :1]).sin()


class AllAlike(nn.Sequential):
    """Is equal to every other one."""

    def __eq__(self, other):
        return isinstance(other, AllAlike)

    def __hash__(self):
        return 1


@pytest.mark.parametrize("kind", [nn.Sequential, AllAlike])
def test_regions_leave_nothing_in_a_module(kind):
    modules = [kind(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    names, pickled = [set(vars(one)) for one in modules[0].modules()], pickle.dumps(modules[0])
    for _ in range(5):
        for module in modules:
            checkpoint(module, torch.rand(4, 3, requires_grad=True)).sum()
    assert [set(vars(one)) for one in modules[0].modules()] == names
    assert pickle.dumps(modules[0]) == pickled
    for other in (copy.deepcopy(modules[0]), pickle.loads(pickled), copy.copy(modules[0])):
        found = run(other, torch.rand(4, 3, requires_grad=True))
        assert all(map(torch.equal, found[1], found[2]))


def test_quiet_writes_are_found():
    """By a kernel that moves no version, as batch norm's: seen in the bytes of tensors of usual size."""

    class Quiet(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.register_buffer("calls", torch.zeros(size, dtype=torch.float64))

        def forward(self, x):
            with torch.autograd._unsafe_preserve_version_counter(self.calls):
                self.calls.add_(1)
            return (x * self.calls[0].clone()).sin()

    for size in (1, 8000):
        x, module, plain = leaf(3), Quiet(size), Quiet(size)
        for _ in range(3):
            gradient, before, after = run(module, x)
            assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
            assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("kind", ["packed", "transposed", "complex", "frozen parameter"])
def test_a_quiet_write_of_a_sign_of_zero_is_found(kind):
    """By value -0.0 is 0.0, and a rerun that found the other one would go to the other infinity."""

    class Flips(nn.Module):
        def __init__(self):
            super().__init__()
            zero = torch.zeros(3, 2, dtype=torch.complex128 if kind == "complex" else torch.float64)
            self.zero = (
                nn.Parameter(zero, requires_grad=False)
                if kind == "frozen parameter"
                else nn.Buffer(zero if kind == "packed" else zero.t())
            )

        def forward(self, x):
            with torch.autograd._unsafe_preserve_version_counter(self.zero):
                self.zero.neg_()
            real = torch.view_as_real(self.zero) if self.zero.is_complex() else self.zero
            return (x * (1 / real).clamp(-1, 1).flatten()[0]).sin()

    x, module, plain = leaf(3), Flips(), Flips()
    for _ in range(3):
        gradient, before, after = run(module, x)
        assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
        assert all(map(same_bits, before, after))


def test_memory_shared_with_numpy_stays_where_it_is():
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(100_000)
    module, x = Counting(), leaf(3)
    module.calls = torch.from_numpy(array)
    gradient, _, _ = run(module, x)
    assert torch.equal(gradient, x.detach().cos())
    assert array[0] == 1
    assert module.calls.data_ptr() == array.ctypes.data


def test_regions_share_copies_of_what_nobody_writes_to():
    """Where they are made at all: of small tensors, and while the first forwards run. Of large frozen weights none is made."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Buffer(torch.ones(1000, dtype=torch.float64))
            self.strided = nn.Buffer(torch.ones(50, 2, dtype=torch.float64).t())
            self.large = nn.Buffer(torch.ones(200_000, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.zeros((1 << 22) + 1), requires_grad=False)

        def forward(self, x):
            return (x * self.small[0] * self.strided[0, 0] * self.large[0]).sin()

    held = []
    for count in (1, 4):
        module, x = Reads(), leaf(3)
        with trace() as found:
            outputs = [checkpoint(module, x) for _ in range(count)]
        held.append(found.steps[0].held_bytes["state"])
        del outputs
    assert held[0] == held[1]


def test_preserve_buffers_false_looks_at_nothing():
    module = Counting()
    y = checkpoint(preserve_buffers=False)(module)(leaf(3))
    y.sum().backward()
    assert module.calls.item() == 2


def test_a_tensor_of_the_closure_is_rewound():
    state, x = torch.zeros(1, dtype=torch.float64), leaf(3)

    def function(x):
        state.add_(1)
        return (x * state.clone()).sin()

    (gradient,) = torch.autograd.grad(checkpoint(function, x).sum(), x)
    assert state.item() == 1
    assert torch.equal(gradient, x.detach().cos())
    gc.collect()


def test_parameters_can_be_swapped_after_a_step():
    """As conversions of modules do it on demand, and refuse to where somebody has a weak reference."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(3)
    for _ in range(5):
        checkpoint(module, x).sum().backward()
    module.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert checkpoint(module, x.double()).dtype is torch.float64


def test_attributes_that_do_not_compare_with_others():
    """As arrays of NumPy, which answer element by element, or raise."""

    class Incomparable:
        def __eq__(self, other):
            raise TypeError("not to be compared")

        __hash__ = None

    numpy = pytest.importorskip("numpy")
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(3)
    module.mean, module.other = numpy.ones(3), Incomparable()
    assert checkpoint(module, x).shape == (3,)


def test_forwards_that_fail_do_not_count():
    """As in a search for the largest batch: what the first good one adds is found."""

    class Late(nn.Module):
        failing = True

        def forward(self, x):
            if self.failing:
                raise MemoryError
            if not hasattr(self, "scale"):
                self.scale = torch.ones(1, dtype=torch.float64)
            self.scale.mul_(2)
            return (x * self.scale.clone()).sin()

    x, module, plain = leaf(3), nn.Sequential(Late()), nn.Sequential(Late())
    for _ in range(6):
        with pytest.raises(MemoryError):
            checkpoint(module, x)
    Late.failing = False
    for _ in range(3):
        gradient, _, _ = run(module, x)
        assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])


def test_a_lazy_module_that_stays_one():
    """Without a class to become it is known by having been made."""

    class Own(torch.nn.modules.lazy.LazyModuleMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.UninitializedParameter(), 0

        def initialize_parameters(self, x):
            self.weight.materialize(x.shape)
            nn.init.ones_(self.weight)

        def forward(self, x):
            self.calls += 1
            return (x * self.weight).sin().exp()

    module, found = Own(), []
    for _ in range(3):
        before = module.calls
        checkpoint(module, torch.ones(3)).sum().backward()
        found.append(module.calls - before)
    assert found == [1, 1, 1]


@pytest.mark.usefixtures("no_gc")
def test_parameters_without_gradients_are_not_kept():
    """Where a framework gathers them for forward and puts others in their place."""
    module = nn.Linear(3, 3).requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    gathered = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    alive = weakref.ref(gathered)
    module.weight = gathered
    y = checkpoint(lambda x: module(x.sin()).exp(), x)
    module.weight = nn.Parameter(torch.empty(3, 3, device="meta"), requires_grad=False)
    del gathered
    assert alive() is None
    del y


class SharesMemory(nn.Module):
    """Has a buffer under two names, or a view of it, and binds the second one anew in each forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("whole", torch.ones(4))
        self.register_buffer("part", self.share())

    def share(self):
        return self.whole if self.kind == "same" else self.whole[:]

    def forward(self, x):
        written = self.part if self.kind == "view that is written" else self.whole
        written.add_(1)
        y = (x * self.part.clone()).sin() * self.whole.clone()
        if self.kind == "both bound anew":
            self.whole = self.whole + 1
        self.part = self.share()
        return y


@pytest.mark.parametrize("kind", ["same", "view", "view that is written", "both bound anew"])
def test_tensors_that_are_gone_share_memory_in_a_rerun_as_they_did(kind):
    plain, module = SharesMemory(kind), SharesMemory(kind)
    x = leaf(4)
    pending = []
    for _ in range(3):
        expected = torch.autograd.grad(plain(x).sum(), x)[0]
        pending.append((checkpoint(module, x).sum(), expected))
    for y, expected in reversed(pending):
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    assert torch.equal(module.whole, plain.whole)
    assert torch.equal(module.part, plain.part)


def test_a_frozen_parameter_that_is_gone_is_a_parameter_in_a_rerun():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            assert isinstance(self.step, nn.Parameter)
            y = (x * self.step).sin()
            self.step = nn.Parameter(self.step + 1, requires_grad=False)
            return y

    plain, module = Steps(), Steps()
    x = leaf(3)
    for _ in range(3):
        expected = torch.autograd.grad(plain(x).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(checkpoint(module, x).sum(), x)[0], expected)
    assert torch.equal(module.step, plain.step)


def test_an_argument_that_comes_to_require_grad_keeps_its_class_and_attributes():
    weight = nn.Parameter(torch.linspace(0, 1, 3), requires_grad=False)
    weight.tag = "mine"

    def function(x, weight):
        assert isinstance(weight, nn.Parameter)
        assert weight.tag == "mine"
        weight.requires_grad_()
        return (x * weight).sin()

    x = leaf(3)
    checkpoint(function, x, weight).sum().backward()
    assert torch.equal(x.grad, (x * weight).cos() * weight)


def test_modules_of_a_trainer_and_of_a_list_of_layers_are_not_those_of_a_layer():
    """Their state is not a region's; that of a module in an object of the layer's own is."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    trainer, layers = types.SimpleNamespace(model=model), types.SimpleNamespace(layers=list(model))
    for layer in model:
        layer.trainer, layer.others = trainer, layers
        layer.register_buffer("table", torch.ones(100_000))
    model[0].helper = types.SimpleNamespace(norm=nn.BatchNorm1d(300_000))
    held = []
    for layer in model[:2]:
        checkpoint(layer, torch.ones(3, 2))  # the first forward also copies what is not known yet
        with trace() as found:
            y = checkpoint(layer, torch.ones(3, 2))
        held.append(found.steps[0].held_bytes["state"])
        del y
    assert held[1] < 2 * 400_000
    assert held[0] - held[1] >= 2 * 1_200_000


def test_an_attribute_that_the_caller_has_replaced_is_in_a_rerun_what_it_was():
    """Nobody else holds the tensor any more."""

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = None

        def forward(self, x):
            return (x * self.scale).sin()

    module, x = Scales(), leaf(3)
    for number in range(1, 7):
        module.scale = torch.full((3,), float(number))
        y = checkpoint(module, x).sum()
        gone = weakref.ref(module.scale)
        module.scale = torch.zeros(3)
        assert gone() is None
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], (x * number).cos() * number)
        assert not module.scale.any()


def after_others(change, norm, forwards=6):
    """Returns what a module's gradient and statistics are when a norm has come into it after some forwards."""

    def outcome(run):
        torch.manual_seed(0)
        module, x, own = Helped(), torch.rand(4, 3, requires_grad=True), copy.deepcopy(norm)
        for _ in range(forwards):
            run(module, x)
        change(module, own)
        for _ in range(2):
            run(module, x).sum().backward()
        return [x.grad, *own.buffers()]

    return outcome(checkpoint), outcome(lambda module, x: module(x))


class Helped(nn.Module):
    """Has a part, and may have a helper, which is no module."""

    def __init__(self):
        super().__init__()
        self.helper = None
        self.parts = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
        del self.parts[2]  # which has the modules be in an ``OrderedDict``
        self.before = list(self.parts)

    def forward(self, x):
        y = self.parts(x).exp()
        if "calls" in self._buffers:
            self.calls.add_(1)
            y = y * self.calls.clone()
        return y if self.helper is None else self.helper.norm(y).sin().exp()


CHANGES = {
    "in an object": lambda module, norm: setattr(module, "helper", types.SimpleNamespace(norm=norm)),
    "in place of another": lambda module, norm: module.parts.__setitem__(1, norm),
    "in the dictionary": lambda module, norm: module.parts._modules.update({"1": norm}),
    "appended": lambda module, norm: module.parts.append(norm),
    "a buffer": lambda module, norm: module.register_buffer("calls", torch.zeros(1)),
}


@pytest.mark.parametrize("is_new", [True, False], ids=["made then", "made before"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_state_that_comes_into_a_module_after_some_forwards_is_rewound(change, is_new):
    change_then = (lambda module, norm: (nn.Linear(1, 1), change(module, norm))) if is_new else change
    found, expected = after_others(change_then, nn.BatchNorm1d(3))
    assert all(map(torch.equal, found, expected))


def test_a_module_with_buffers_in_inference_mode_with_gradients_enabled():
    norm, plain, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.rand(4, 3)
    with torch.inference_mode(), torch.enable_grad():
        assert torch.equal(checkpoint(norm, x), plain(x))
    assert torch.equal(norm.running_mean, plain.running_mean)
