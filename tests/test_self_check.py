"""The self-check: whatever state a recompute finds otherwise than forward is right, or an error in the first steps."""

import array
import collections
import contextlib
import ctypes
import functools
import io
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

from ckpt_hooks import (
    DeterminismError,
    MutationError,
    checkpoint,
    checkpoint_module,
    checkpoint_region,
    is_recomputing,
    policies,
    set_self_check,
)
from ckpt_hooks._recorded import explaining
from ckpt_hooks._tensors import determinism, samples
from tests.measure import renew


class Scaled(nn.Module):
    """Multiplies what lies between two layers by a number that a function reads."""

    def __init__(self, read):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = [types.MappingProxyType({"read": read})]  # where no walk looks

    def forward(self, x):
        return self.b(self.a(x) * self.read[0]["read"]())


# Holders of state: each makes two functions, one that reads a number, and one that changes it.


class Slots:
    """Holds a number."""

    __slots__ = ("value",)


class Meta(type):
    """Holds a number."""

    value = 1.0


class Classed(metaclass=Meta):
    """Holds a number."""

    value = 1.0


class OfLibrary(contextlib.AbstractContextManager):
    """Holds a number."""

    value = 1.0

    def __exit__(self, *exc_info):
        pass


class Node:
    """Holds a number."""


_GLOBAL = 1.0


def _read_global():
    return _GLOBAL


def a_global():
    def change():
        global _GLOBAL
        _GLOBAL += 1

    return lambda: _read_global(), change


def attribute_of(holder, name="value", first=1.0):
    def make():
        found = holder()
        setattr(found, name, first)

        def change():
            setattr(found, name, getattr(found, name) + 1)

        return lambda: getattr(found, name), change

    return make


def entry_of(make_holder, key):
    def make():
        holder = make_holder()

        def change():
            holder[key] = holder[key] + 1

        return lambda: float(holder[key]), change

    return make


def environment():
    os.environ["CKPT_HOOKS_TEST"] = "1"

    def change():
        os.environ["CKPT_HOOKS_TEST"] = str(int(os.environ["CKPT_HOOKS_TEST"]) + 1)

    return lambda: float(os.environ["CKPT_HOOKS_TEST"]), change


def iterator():
    numbers = itertools.count(1)
    latest = [next(numbers)]

    def change():
        latest[0] = next(numbers)

    return lambda: float(latest[0]), change


def stream():
    text = io.StringIO("".join(f"{number}\n" for number in range(1, 100)))
    return lambda: float(text.getvalue().splitlines()[text.tell() // 2]), lambda: text.read(2)


def waiting():
    numbers = queue.Queue()
    numbers.put(1.0)
    return lambda: numbers.queue[0], lambda: numbers.put(numbers.get() + 1)


def cached():
    @functools.lru_cache
    def read():
        return float(next(numbers))

    numbers = itertools.count(1)
    return read, read.cache_clear


def weakly_held():
    node = Node()
    node.value = 1.0
    refer = weakref.ref(node)

    def change(node=node):
        node.value += 1

    return lambda: refer().value, change


def far_away():
    deep = [1.0]
    outer = deep
    for _ in range(12):
        outer = [outer]

    def read():
        found = outer
        while isinstance(found[0], list):
            found = found[0]
        return found[0]

    def change():
        deep[0] += 1

    return read, change


def default_of_function():
    def read(value=1.0):
        return value

    def change():
        read.__defaults__ = (read.__defaults__[0] + 1,)

    return read, change


def generator():
    def numbers():
        for number in itertools.count(1):
            for _ in range(1000):
                yield float(number)
                if moved:
                    moved.clear()
                    break

    moved, made = [], numbers()
    return lambda: next(made), lambda: moved.append(True)


HOLDERS = {
    "a global of a called function": a_global,
    "an imported module": attribute_of(lambda: types.ModuleType("configuration")),
    "a class": attribute_of(lambda: type("Made", (), {})),
    "a metaclass": attribute_of(lambda: Meta),
    "slots": attribute_of(Slots),
    "an object of a library's class": attribute_of(OfLibrary),
    "a namespace": attribute_of(types.SimpleNamespace),
    "a thread's own": attribute_of(threading.local),
    "a parameter": attribute_of(lambda: nn.Parameter(torch.zeros(1))),
    "a function": attribute_of(lambda: lambda: None),
    "a function's default": default_of_function,
    "a view of memory": entry_of(lambda: memoryview(array.array("d", [1.0])), 0),
    "an array": entry_of(lambda: array.array("d", [1.0]), 0),
    "bytes": entry_of(lambda: bytearray(b"\1"), 0),
    "memory of C": entry_of(lambda: (ctypes.c_double * 1)(1.0), 0),
    "a dict keyed by objects": entry_of(lambda: {Classed: 1.0}, Classed),
    "a counter": entry_of(lambda: collections.Counter({Classed: 1}), Classed),
    "a chain of dicts": entry_of(lambda: collections.ChainMap({Classed: 1.0}), Classed),
    "the environment": environment,
    "an iterator": iterator,
    "a generator": generator,
    "a stream of text": stream,
    "a queue": waiting,
    "a cache": cached,
    "a weak reference": weakly_held,
    "a list far away": far_away,
}

FORMS = {
    "checkpoint": lambda module: functools.partial(checkpoint, module),
    "of a lambda": lambda module: functools.partial(checkpoint, lambda x: module(x)),
    "of a method": lambda module: functools.partial(checkpoint, module.forward),
    "a module": checkpoint_module,
}


def train(make, form, *, when):
    """Returns gradients of some steps; state changes between forward and backward, or as forward reads it."""
    torch.manual_seed(0)
    read, change = make()

    def read_and_change():
        value = read()
        change()
        return value

    module = Scaled(read_and_change if when == "in forward" else read)
    call, gradients = form(module), []
    for _ in range(4):
        result = call(torch.randn(3, 4, requires_grad=True)).sum()
        if when == "between":
            change()
        result.backward()
        gradients += [one.grad.clone() for one in module.parameters()]
    return gradients


@pytest.mark.parametrize("when", ["between", "in forward"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_no_kind_of_state_is_silent(holder, form, when):
    expected = train(HOLDERS[holder], lambda module: module, when=when)
    try:
        found = train(HOLDERS[holder], FORMS[form], when=when)
    except DeterminismError:
        return
    assert all(map(torch.equal, found, expected))


def of_python():
    """Returns random numbers that no region brings back."""
    return torch.tensor([random.random() for _ in range(4)])


def noisy(make=of_python):
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    return lambda x: last(first(x) * make())


def step(function, **options):
    x = torch.randn(3, 4, requires_grad=True)
    (checkpoint(**options)(function)(x) if options else checkpoint(function, x)).sum().backward()


def test_the_error_says_what_to_do():
    with pytest.raises(DeterminismError, match=r"self-check in pass 1 .*track_rng.*checkpoint_region.*\"metadata\""):
        step(noisy())
    with pytest.raises(DeterminismError, match="MulBackward"):
        step(noisy())


@pytest.mark.parametrize("check", ["metadata", "none"])
def test_a_region_can_do_without(check):
    for _ in range(4):
        step(noisy(), determinism_check=check)


def test_random_numbers_drawn_anew_are_no_difference():
    for _ in range(4):
        step(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), preserve_rng_state=False)


def told_in(function, count):
    """Returns the passes in which errors came, and those in which warnings came."""
    errors, warned = [], []
    for number in range(1, count + 1):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                step(function)
            except DeterminismError:
                errors.append(number)
        if found:
            warned.append(number)
    return errors, warned


def test_passes_at_doubling_distances_are_compared_and_late_ones_warn():
    assert told_in(noisy(), 130) == ([1, 2, 4, 8, 16, 32], [64])


def test_a_warning_comes_once():
    with set_self_check("warn"):
        assert told_in(noisy(), 20) == ([], [1])


def test_the_check_can_be_off():
    set_self_check(False)
    try:
        assert told_in(noisy(), 4) == ([], [])
        with set_self_check("error"):
            assert told_in(noisy(), 4) == ([1, 2, 4], [])
        assert told_in(noisy(), 4) == ([], [])
    finally:
        set_self_check("error")


@pytest.mark.parametrize("level", ["error", "warn", "0", "none"])
def test_the_environment_sets_the_level(level):
    program = (
        "import random, torch, warnings; from ckpt_hooks import checkpoint; warnings.simplefilter('error'); random.seed(0)\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "checkpoint(lambda x: (x.sin() * random.random()).sin(), x).sum().backward()"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "CKPT_HOOKS_SELF_CHECK": level}, capture_output=True, text=True
    )
    assert (found.returncode == 0) == (level == "0"), found.stderr
    words = {
        "error": "ckpt_hooks.errors.DeterminismError: ",
        "warn": "UserWarning: region",
        "0": "",
        "none": "Set it to error, warn, or 0",
    }
    assert words[level] in found.stderr


def test_a_wrong_level_is_an_error():
    for level in ("of", True, None, 0):
        with pytest.raises(ValueError, match="level"):
            set_self_check(level)


def test_a_change_of_flags_begins_anew():
    module = Scaled(random.random)
    assert told_in(module, 7)[0] == [1, 2, 4]
    module.eval()
    assert told_in(module, 3)[0] == [1, 2]


@pytest.mark.parametrize(
    "run", [step, lambda replica: step(lambda x: replica(x)), lambda replica: step(replica, policy=policies.nothing_saveable)]
)
def test_replicas_which_data_parallel_makes_anew_in_each_step_count_together(run, monkeypatch):
    """Torch's own function makes them; its copies to devices are copies on the host."""
    replicate, passed, compared = sys.modules["torch.nn.parallel.replicate"], samples.Sampled.passed, []
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(
        replicate, "_broadcast_coalesced_reshape", lambda tensors, *_, **options: [[one.clone() for one in tensors]] * 2
    )
    monkeypatch.setattr(samples.Sampled, "passed", lambda self: (compared.append(self.number), passed(self)))
    module = Scaled(lambda: 1.0)
    for number in range(14):
        module.train(number < 10)  # begins anew
        for replica in replicate.replicate(module, [0, 1]):
            run(replica)
    assert [number for number, _ in itertools.groupby(compared)] == [1, 2, 4, 8, 16, 1, 2, 4, 8]


@pytest.fixture
def sampled(monkeypatch):
    """The numbers of the passes that are sampled."""
    numbers, begin = [], samples.Sampled.__init__
    monkeypatch.setattr(samples.Sampled, "__init__", lambda self, place: (begin(self, place), numbers.append(self.number))[0])
    return numbers


def test_forwards_without_a_backward_are_sampled_at_doubling_distances(sampled):
    function = noisy()
    for _ in range(1000):
        checkpoint(function, torch.randn(3, 4, requires_grad=True))
    assert sampled == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_forwards_of_a_line_without_a_backward_are_sampled_in_rows(sampled):
    """Modules may share a line, so many passes are sampled before the first of their backwards."""
    graphs = []
    for _ in range(700):
        with checkpoint_region():
            graphs.append(torch.randn(3, 4, requires_grad=True).sin().cos())
    assert sampled == [*range(1, 129), *range(256, 384), *range(639, 701)]


def test_a_row_of_samples_ends_with_the_graph_of_its_first(sampled):
    for _ in range(700):
        with checkpoint_region():
            y = torch.randn(3, 4, requires_grad=True).sin().cos()
        del y
    assert sampled == [1, 2, 3, 4, 6, 7, 11, 12, 20, 21, 37, 38, 70, 71, 135, 136, 264, 265, 521, 522]


def test_a_forward_without_a_backward_leaves_the_first_step_compared(sampled):
    layers, x = [nn.Linear(4, 4) for _ in range(12)], torch.randn(3, 4)
    for count in (1, 2):
        y = x
        for layer in layers:
            with checkpoint_region():
                y = layer(y).exp()
        if count == 2:
            y.sum().backward()
        del y
    assert sampled == [*range(1, 25)]


def test_backward_after_many_forwards_begins_anew(sampled):
    function = noisy(lambda: 1.0)
    for _ in range(2):
        results = [checkpoint(function, torch.randn(3, 4, requires_grad=True)).sum() for _ in range(100)]
        torch.stack(results).sum().backward()
    assert sampled == [1, 2, 4, 8, 16, 32, 64, 128, 129, 131, 135, 143, 159, 191]


def test_a_step_between_forwards_without_a_backward_is_compared():
    """The distances alone would reach only forwards without a backward, which are the passes of even numbers."""
    function, told = noisy(), []
    for number in range(1, 40, 2):
        try:
            step(function)
        except DeterminismError:
            told.append(number)
        checkpoint(function, torch.randn(3, 4, requires_grad=True))
    assert told == [1, 3, 5, 9, 17, 33]


def test_layers_by_one_lambda_are_places_of_their_own():
    layers = [Scaled(of_python if number == 2 else lambda: 1.0) for number in range(12)]
    x = torch.randn(3, 4, requires_grad=True)
    for layer in layers:
        x = checkpoint(lambda h: layer(h), x)
    with pytest.raises(DeterminismError):
        x.sum().backward()


def test_partials_and_objects_are_places():
    class Call:
        def __init__(self, function):
            self.function = function

        def __call__(self, x):
            return self.function(x)

    for function in (functools.partial(Scaled(of_python)), Call(Scaled(of_python)), Call(noisy())):
        assert told_in(function, 5)[0] == [1, 2, 4]
    # Objects of a class may be new ones in each step.
    assert told_in(Call(lambda x: (x.sin() * of_python()).cos()), 40)[0] == [*range(1, 17), 37]


def test_closures_over_many_numbers_share_a_place():
    def of(index):
        return lambda x: (x.sin() * (of_python() + index + zeros[0])).cos()

    errors, zeros = [], [0.0]
    for index in range(72):
        try:
            step(of(index))
        except DeterminismError:
            errors.append(index)
    assert errors == [*range(66), 67, 71]  # 64 have places of their own, and the others passes 1, 2, ... of one


def test_another_order_of_additions_is_no_difference():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)

    def gather(x):
        rows = torch.randint(0, 50, (len(x),))
        return last(torch.zeros(50, 8).index_put((rows,), first(x), accumulate=True))[rows]

    try:
        for _ in range(8):
            checkpoint(gather, torch.randn(20000, 8, requires_grad=True)).square().sum().backward()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("noise", "is_told"), [(1e-6, False), (1e-2, True)])
def test_differences_are_told_by_their_size(noise, is_told):
    draws = random.Random(0)

    def differ(x):
        h = x.sin()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(draws.randrange(1 << 30))
            h.data += noise * h.norm() / h.numel() ** 0.5 * torch.randn(h.shape, generator=generator)
        return h.cos()

    def passes():
        checkpoint(types.MappingProxyType({0: differ})[0], torch.randn(64, 64, requires_grad=True)).sum().backward()

    if is_told:
        with pytest.raises(DeterminismError):
            passes()
    else:
        passes()


def test_bits_count_where_deterministic_algorithms_are_asked_for():
    draws = [0.0]

    def differ(x):
        draws[0] += 1
        return (x.sin() * (1 + 1e-6 * types.MappingProxyType({0: draws})[0][0])).cos()

    holder = types.MappingProxyType({0: differ})
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(DeterminismError):
            checkpoint(lambda x: holder[0](x), torch.randn(64, 64, requires_grad=True)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_nobody_filled_is_a_warning_once():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    contents = itertools.count()

    def pad(x):
        h = x.new_empty(len(x) + 4, 4)
        h[len(x) :].data.fill_(float(next(contents)))  # what happens to be there
        h[: len(x)] = first(x)
        return last(h)[: len(x)]

    assert told_in(pad, 4) == ([], [1])


def hidden(call):
    """Returns a module that calls a function where no walk looks."""
    module = Scaled(lambda: 1.0)
    module.read = [types.MappingProxyType({"read": call})]
    return module


UPDATES = {
    "add_": lambda state: state.add_(1),
    "a part": lambda state: state[1:].mul_(2),
    "lerp_": lambda state: state.lerp_(torch.ones(4), 0.1),
    "index_put_": lambda state: state.index_put_((torch.tensor([1]),), torch.ones(1), accumulate=True),
    "scatter_add_": lambda state: state.scatter_add_(0, torch.tensor([1]), torch.ones(1)),
    "a list": lambda state: torch._foreach_add_([state], 1.0),
    "statistics": lambda state: torch.nn.functional.batch_norm(torch.randn(3, 4), state, torch.ones(4), training=True),
}

#: A second run leaves the same, or runs on memory of its own.
WRITES = {
    "copy_": lambda state: state.copy_(torch.ones(4)),
    "out=": lambda state: torch.add(torch.ones(4), 1, out=state),
    "filled before": lambda state: state.zero_().add_(1),
    "rows": lambda state: state.index_put_((torch.tensor([1]),), torch.ones(1)),
    "scatter_": lambda state: state.scatter_(0, torch.tensor([1]), 2.0),
    "or": lambda state: state.view(torch.int32).bitwise_or_(3),
    "beta=0": lambda state: state.addmv_(torch.ones(4, 4), torch.ones(4), beta=0),
    "clamp_": lambda state: state.clamp_(0, 1),
    "no statistics": lambda state: torch.nn.functional.batch_norm(torch.randn(3, 4), state, torch.ones(4)),
    "its own": lambda state: torch.zeros(4).add_(1).mul_(2),
    "its own, untold": lambda state: torch.frombuffer(bytearray(16), dtype=torch.float32).add_(1).mul_(2),
    "its own statistics": lambda state: torch.nn.functional.batch_norm(
        torch.randn(3, 4), torch.zeros(4), torch.ones(4), training=True
    ),
}


def updating(write, state):
    def read():
        write(state)
        return 1.0

    return hidden(read)


@pytest.mark.parametrize("kind", UPDATES)
def test_an_update_done_twice_is_an_error_that_names_the_line(kind):
    state = torch.zeros(4)
    with pytest.raises(
        MutationError, match=r"(?s)updated by forward and again by its recompute.*test_self_check.py:.*in pass 1"
    ):
        step(updating(UPDATES[kind], state))
    if kind != "statistics":  # whose writes no version counts
        assert state._version == 1  # nothing was written again


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_that_may_be_done_twice_is_no_error(kind):
    step(updating(WRITES[kind], torch.zeros(4)))


LABELS = torch.tensor([[1, 2], [3, 3]]), torch.tensor([6, 5]), torch.tensor([2, 1])


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_operator_that_saves_other_tensors_under_a_mode(scale):
    """``ctc_loss`` saves lengths as tensors there: values are compared without the mode, and a difference is a warning."""

    def function(x):
        h = x * (scale if is_recomputing() else 1.0) * 3
        return torch.nn.functional.ctc_loss(h.log_softmax(-1), *LABELS)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(6, 2, 4, requires_grad=True)
            checkpoint(function, x).backward()
            assert scale != 1 or torch.equal(x.grad, torch.autograd.grad(function(x), x)[0])
    assert len(caught) == (scale != 1)


def test_an_update_done_twice_is_warned_of_once():
    state = torch.zeros(4)
    module = updating(UPDATES["add_"], state)
    with set_self_check("warn"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            step(module)
    assert ["a tensor from outside of the region, float32[4]" in str(one.message) for one in found] == [True]


def test_an_update_that_is_put_back_counts_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(2000))
            self.total = torch.zeros(3)

        def forward(self, x):
            self.count.add_(1)
            self.total.add_(x.detach().sum())
            return self.b(self.norm(self.a(x)))

    torch.manual_seed(0)
    plain, module = Counting(), Counting()
    module.load_state_dict(plain.state_dict())
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        plain(x).sum().backward()
        checkpoint(module, x).sum().backward()
    assert torch.equal(module.total, plain.total)
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))


# A device, on which kernels add in another order each time


@pytest.fixture
def device(monkeypatch):
    """Has the host pass for a device; returns how often the program waited for it."""
    waits = []
    numbers_of = samples.numbers_of

    def counted(found):
        waits.append(sum(isinstance(one, torch.Tensor) for one in found))
        return numbers_of(found)

    for module in (determinism, samples, explaining):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(samples, "numbers_of", counted)
    return waits


def in_another_order(x: torch.Tensor, noise: float) -> torch.Tensor:
    """Gives back what it gets, but for noise of some part of its norm that is another one each time."""
    own = torch.Generator().manual_seed(next(_seeds))
    direction = torch.nn.functional.normalize(torch.randn(x.shape, generator=own).flatten(), dim=0).view_as(x)
    return x + (noise * x.norm() * direction).to(x.dtype)


class InAnotherOrder(torch.autograd.Function):
    """The same, as a custom function."""

    @staticmethod
    def forward(ctx, x, noise):
        return in_another_order(x, noise)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# For a region that is recorded, which does not run a function's forward again.
operator = torch.library.custom_op("ckpt_hooks_self_check::in_another_order", in_another_order, mutates_args=())
operator.register_autograd(lambda ctx, grad: (grad, None))

_seeds = itertools.count()


def checkpoint_with_policy(function, x):
    with checkpoint_region(policy=policies.dots_saveable):
        return function(x)


def recorded(function, x):
    with checkpoint_region():
        return function(x)


@pytest.mark.parametrize("run", [checkpoint, recorded, checkpoint_with_policy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_of_another_order_is_no_difference_and_more_is_one(device, run, dtype):
    class Block(nn.Module):
        def forward(self, x):
            noisy = InAnotherOrder.apply if run is checkpoint else operator
            return noisy(x.sin(), noise).exp().matmul(weight).tanh()

    weight, block = torch.randn(64, 64, dtype=dtype), Block()
    renew(recorded, checkpoint_with_policy)

    def step(amount):
        nonlocal noise
        noise = amount
        run(block, torch.randn(32, 64, dtype=dtype, requires_grad=True)).sum().backward()

    noise = 0.0
    small, large = (1e-6, 1e-2) if dtype is torch.float32 else (1e-3, 0.3)
    for _ in range(3):
        step(small)
    with pytest.raises(DeterminismError, match="self-check in pass"):
        step(large)


@pytest.mark.parametrize("run", [checkpoint, recorded, checkpoint_with_policy])
def test_a_checked_pass_waits_for_a_device_once(device, run):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    renew(recorded, checkpoint_with_policy)
    run(layers, torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert len(device) == 1
    assert device[0] >= 12  # samples of six tensors, twice
    device.clear()
    for _ in range(40):
        run(layers, torch.randn(3, 8, requires_grad=True)).sum().backward()
    if run is checkpoint:
        assert len(device) == 5  # 2, 4, 8, 16, 32


def test_nothing_is_compared_while_a_graph_is_captured(device, monkeypatch):
    monkeypatch.setattr(samples, "is_capturing", lambda device_type: True)
    for run, noisy in (checkpoint, InAnotherOrder.apply), (recorded, operator):
        x = torch.randn(3, 4, requires_grad=True)
        run(lambda x: noisy(x.sin(), 1.0).exp(), x).sum().backward()
    assert set(device) <= {0}


def test_buffers_that_are_not_put_back_may_be_updated_twice():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return self.layer(x).exp()

    module = Counting()
    step(module, preserve_buffers=False)
    assert module.count == 2


def test_a_backward_that_failed_leaves_later_ones_compared(device):
    x = torch.randn(3, 4, requires_grad=True)
    with checkpoint_region():  # a line that no other test has passed
        y = operator(x.sin(), 1.0).exp().tanh()
    failing = [True]

    def fail(grad):
        if failing:
            raise ValueError("a hook fails")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="a hook fails"):
        y.sum().backward(retain_graph=True)
    failing.clear()
    with pytest.raises(DeterminismError, match="self-check"):
        y.sum().backward()


@pytest.mark.parametrize("form", ["entered", "called"])
def test_passes_of_a_line_count_together(form):
    """Of the line that enters a region, or that calls a function which is one."""

    def block(x, noise):
        return operator(x.sin(), noise).exp()

    def entered(x, noise):
        with checkpoint_region():
            return block(x, noise)

    def step(noise):
        function = entered if form == "entered" else checkpoint_region()(block)
        function(torch.randn(3, 4, requires_grad=True), noise).sum().backward()

    for _ in range(3):
        checkpoint_region()(block)(torch.randn(3, 4, requires_grad=True), 0.0).sum().backward()
    for _ in range(2):
        step(0.0)
    with pytest.raises(DeterminismError, match="self-check in pass 3 "):
        step(1.0)
