"""Tensors that get another storage, by ``tensor.data = ...`` or ``swap_tensors``: in forward, around it, and before backward.

No operator and no version tells of that. Autograd saves a leaf itself, so that plain backward reads what the leaf has by then.
Programs here read in both ways: by an operator that saves the tensor, and by one that saves its own result alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckpt_hooks
from tests.behaviours.applied import ALL_REGIONS, FUNCTION_REGIONS, all_regions, function_regions
from tests.behaviours.runs import assert_as_eager, gradients, plain
from tests.measure import in_turns

#: Elements: few of them, and more than the 16 KiB up to which a tensor may pass for a small one.
SIZES = pytest.mark.parametrize("size", [6, 6000], ids=["small", "large"])


def skip_where_either_counts(run, read):
    """Skips a limit: autograd has the tensor itself, and reads what it is by then; a region inside another has forward's."""
    if run.form == "inside" and read is torch.mul:
        pytest.skip("a limit of a region inside another")


# Holders: each hands out a function which reads and writes to a tensor, and where that tensor is.


class Average(nn.Module):
    """A key, which follows a query with a momentum, as MoCo's encoder of keys does."""

    def __init__(self, size, read, first):
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, size))
        self.read, self.first, self.calls = read, first, 0

    def hold(self, key):
        """Keeps the tensor."""
        self.register_buffer("key", key)

    def held(self):
        """Returns the tensor."""
        return self.key

    def forward(self, x, *rest):
        key = self.held(*rest)
        y = self.read(x, key).sin()
        if self.calls >= self.first:
            key.data = key.data * 0.75 + self.query.data * 0.25
        self.calls += 1
        return self.read(y, key).sin() * self.query


class Frozen(Average):
    """Keeps it as a parameter without gradients."""

    def hold(self, key):
        self.key = nn.Parameter(key, requires_grad=False)


class InContainer(Average):
    """Keeps it in a list."""

    def hold(self, key):
        self.keys = [key]

    def held(self):
        return self.keys[0]


class ByClosure(Average):
    """Keeps it in a cell."""

    def hold(self, key):
        self.held = lambda: key


HOLDERS = {
    "buffer": Average,
    "list": InContainer,
    "frozen parameter": Frozen,
    "closure": ByClosure,
}


def averaging(holder, size, read, first):
    module = holder(size, read, first)
    module.hold(torch.linspace(1, 2, size))
    return module


@pytest.mark.parametrize(
    ("holder", "run", "size", "read", "first"), in_turns(HOLDERS, ALL_REGIONS, (6, 6000), (torch.add, torch.mul), (0, 3))
)
def test_a_forward_gives_a_tensor_another_storage(holder, run, size, read, first):
    """From the first forward on, or from the fourth."""
    if (holder, run, read, first) == ("frozen parameter", "nested", torch.mul, 0):
        pytest.skip("the self-check tells: one of two recomputes reads the other storage")
    run = ALL_REGIONS[run]
    skip_where_either_counts(run, read)

    def program(run):
        module, found = averaging(HOLDERS[holder], size, read, first), []
        for _ in range(6):
            x = torch.randn(size, requires_grad=True)
            y = run(module, x)
            left = module.held().clone()
            found += [*gradients(y, x), module.query.grad.clone(), left, module.held().clone(), module.calls]
            with torch.no_grad():
                module.query.mul_(0.9)
        return found

    assert_as_eager(program, run)


@all_regions
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["in order", "reversed"])
@pytest.mark.parametrize("holder", [Average, ByClosure])
def test_forwards_that_give_a_tensor_storages_before_the_first_backward(holder, order, run):
    """Each rerun finds the storage of its own forward, and the program its latest one."""
    size = 6

    def program(run):
        module, xs, found = averaging(holder, size, torch.add, 0), torch.randn(3, size).requires_grad_(), []
        for _ in range(3):
            ys = [run(module, x) for x in xs]
            for number in order:
                found += [*torch.autograd.grad(ys[number].sum(), [xs, module.query]), module.held().clone()]
        return found

    assert_as_eager(program, run)


class Reads(nn.Module):
    """Reads what it holds."""

    def __init__(self, held):
        super().__init__()
        self.register_buffer("buffer", held)
        self.plain = [held.clone()]

    def forward(self, x):
        return ((x + self.buffer).sin() + self.plain[0]).exp()


def swap(module, other):
    torch.utils.swap_tensors(module.buffer, other)


def swap_in_a_list(module, other):
    torch.utils.swap_tensors(module.plain[0], other)


def give(module, other):
    module.buffer.data, other.data = other.data, module.buffer.data


@all_regions
@SIZES
@pytest.mark.parametrize("swaps_back", [False, True], ids=["stays", "goes back"])
@pytest.mark.parametrize("change", [swap, swap_in_a_list, give])
def test_a_tensor_that_is_another_one_in_backward(change, swaps_back, size, run):
    """The program has both tensors all the time. No autograd of its own needs the one that it takes away."""

    def program(run):
        module, other, found = Reads(torch.linspace(1, 2, size)), torch.linspace(-1, 1, size), []
        for _ in range(4):
            x = torch.randn(size, requires_grad=True)
            y = run(module, x)
            change(module, other)
            found += [*gradients(y, x), module.buffer.clone(), module.plain[0].clone(), other.clone()]
            if swaps_back:
                change(module, other)
        return found

    assert_as_eager(program, run)


@function_regions
def test_an_argument_of_an_inner_region_has_the_storage_of_forward(run):
    """Which the rerun of the outer region finds in the tensor, and the program after it no more."""

    def program(run):
        module, x = Reads(torch.linspace(1, 2, 6)), torch.randn(6, requires_grad=True)
        y = run(lambda x: run(lambda h, held: ((h.exp() + held).sin() + held).exp(), x.sin(), module.buffer), x)
        give(module, torch.linspace(-1, 1, 6))
        return gradients(y, x)

    assert_as_eager(program, run)


@all_regions
def test_views_and_aliases_see_one_storage_in_a_rerun(run):
    """What shared memory in forward does so in the rerun, and what does not share it any more stays apart."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.linspace(1, 2, 6))
            self.part = self.whole[2:]

        def forward(self, x):
            self.whole.mul_(1.5)  # which the part sees
            y = (x + self.part.sum()).sin()
            self.whole.data = self.whole.data * 2  # which it does not see from here on
            self.whole.add_(1)
            y = (y + self.part.sum() * self.whole.sum()).sin()
            self.part = self.whole[2:]
            return y.exp()

    def program(run):
        module, found = Shares(), []
        for _ in range(4):
            x = torch.randn(3, requires_grad=True)
            found += [*gradients(run(module, x), x), module.whole.clone(), module.part.clone()]
            module.part.add_(1)
            found.append(module.whole.clone())
        return found

    assert_as_eager(program, run)


def test_memory_of_a_storage_that_forward_takes_away_goes_with_backward():
    """A region may hold forward's until then, and no longer."""
    module = averaging(Average, 6000, torch.add, 0)
    memory = StorageWeakRef(module.key.untyped_storage())
    for _ in range(2):
        ckpt_hooks.checkpoint(module, torch.randn(6000, requires_grad=True)).sum().backward()
    assert memory.expired()


# --------------------------------------------------------------------------------------------------- conversions of modules


class Convertible(nn.Module):
    """Has parameters of all sizes, trained and frozen, one of them not contiguous, and the state of a batch norm."""

    def __init__(self, *, has_frozen=True):
        super().__init__()
        self.small, self.norm, self.large = nn.Linear(6, 70), nn.BatchNorm1d(70), nn.Linear(70, 70)
        self.frozen = nn.Linear(70, 70).requires_grad_(not has_frozen)
        self.turned = nn.Parameter(torch.randn(70, 60).t())

    def forward(self, x):
        x = self.frozen(self.large(self.norm(self.small(x)).sin()).sin())
        return (x @ self.turned.t()).sin() + self.turned.sin().sum()


def there_and_back(module, there="double", back="float"):
    getattr(module, there)()
    getattr(module, back)()


def steps_with(convert, run, module=Convertible):
    """Trains a module that is converted between each forward and backward, and returns gradients and state."""
    module, found = module(), []
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        x = torch.randn(4, 6, requires_grad=True)
        y = run(module, x)
        convert(module)
        found += [*gradients(y, x), *(None if p.grad is None else p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += map(torch.clone, module.state_dict().values())
    return found


@all_regions
@pytest.mark.parametrize("overwrites", [False, True], ids=["data", "new parameters"])
def test_a_module_is_converted_there_and_back(overwrites, run):
    """The same bits in other memory, or in new parameters: the graph has forward's, but for frozen ones."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    try:
        assert_as_eager(lambda run: steps_with(there_and_back, run, lambda: Convertible(has_frozen=not overwrites)), run)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def test_parameters_of_a_converted_module_by_other_ways():
    """As an argument, by a closure, and by two modules one of which is in the other."""

    def program(run):
        module, found = Convertible(), []
        for function, args in [
            (lambda x, weight: (x @ weight.t()).sin().exp(), (module.small.weight,)),
            (lambda x: (x @ module.small.weight.t()).sin().exp(), ()),
            (lambda x, weight=module.small.weight: (x @ weight.t()).sin().exp(), ()),
            (lambda x: run(module, x), ()),
        ]:
            x = torch.randn(4, 6, requires_grad=True)
            y = run(function, x, *args)
            there_and_back(module)
            found += [*gradients(y, x), module.small.weight.grad.clone()]
        return found

    assert_as_eager(program, FUNCTION_REGIONS["region"])


def change_on_the_way(change):
    """Returns a conversion there and back which makes another weight in between."""

    def convert(module):
        module.double()
        module.large.weight.data = change(module.large.weight.data.clone())
        module.float()

    return convert


LOSSY = {
    "lost bits": lambda module: there_and_back(module, "half"),
    "rows in another order": change_on_the_way(lambda weight: weight.flip(0)),
    "two numbers exchanged": change_on_the_way(lambda weight: weight[:, [1, 0, *range(2, 70)]]),
    "signs": change_on_the_way(lambda weight: weight * (1 - 2 * torch.eye(70))),
    "another layout": change_on_the_way(lambda weight: weight.t().contiguous().t()),
}


@function_regions
@pytest.mark.parametrize("convert", LOSSY.values(), ids=LOSSY)
def test_a_conversion_that_loses_something(convert, run):
    with pytest.raises(ckpt_hooks.MutationError, match=r"weight|bias"):
        steps_with(convert, run)


def test_memory_of_a_converted_parameter_is_not_held():
    """What tells of the same bits is a hash, made when the module is converted."""
    module = Convertible()
    memory = [StorageWeakRef(one.untyped_storage()) for one in module.parameters() if one.requires_grad]
    y = ckpt_hooks.checkpoint(module, torch.randn(4, 6, requires_grad=True))
    module.double()
    assert all(one.expired() for one in memory)
    module.float()
    y.sum().backward()


@all_regions
def test_conversions_that_swap_tensors(run):
    """Torch refuses these between forward and backward, with and without regions: the graph has the other tensor."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for each in (plain, run):
            with pytest.raises(RuntimeError, match=r"Couldn't swap|poisoned by swap_tensors|another tensor than forward saw"):
                steps_with(there_and_back, each, lambda: nn.Linear(6, 6))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# ------------------------------------------------------------------------------------------------------------------ arguments


def test_memory_of_a_parameter_that_is_an_argument_is_not_held():
    """A framework may free it by ``.data``. A rerun that would read what is gone says so."""
    weight, x = nn.Parameter(torch.ones(6000)), torch.randn(6000, requires_grad=True)
    memory = StorageWeakRef(weight.untyped_storage())
    y = ckpt_hooks.checkpoint(lambda x, weight: ((weight * 2) * x).sin().sin(), x, weight)
    weight.data = torch.zeros(6000)
    assert memory.expired()
    with pytest.raises(ckpt_hooks.MutationError, match=r"args\[1\]|weight"):
        y.sum().backward()


@all_regions
def test_tensors_made_in_inference_mode(run):
    """They count no versions, also with memory of other tensors."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.latest = torch.zeros(())

        def forward(self, x):
            x, self.latest = (x + self.latest).sin(), x.detach().mean() * 0.5
            return x.exp()

    def program(run):
        module, found = Keeps(), []
        for step in range(4):
            x = torch.randn(3, requires_grad=True)
            y = run(module, x)
            with torch.inference_mode():
                run(module, x)
            if step % 2:
                module.latest.data = torch.full((), 0.9)
            found += [*gradients(y, x), module.latest + 0]
        return found

    assert_as_eager(program, run)
