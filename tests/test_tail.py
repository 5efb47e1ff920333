"""Rule 5: a rerun that has nothing left to do returns, where that is quicker than to stop it; and only there."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from ckpt_hooks import _tail as tail
from ckpt_hooks import checkpoint
from ckpt_hooks._bytecode import OPERATORS
from ckpt_hooks._operators import WRITES_UNSAID
from tests.measure import CountOps
from tests.measure import leaf as new_leaf

events: list[str] = []
counter = 0
unbound_later = F


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    """Starts each test without verdicts of others, and without events."""
    monkeypatch.setattr(tail, "_kinds", {})
    events.clear()


def value(*shape: int) -> torch.Tensor:
    """Returns a tensor that is no leaf, so that a function that saves it has to be run again for that."""
    return new_leaf(*shape).clone()


def operators_in_backward(y: torch.Tensor) -> list[str]:
    """Returns which operators a backward runs, by name, as the profiler sees them."""
    with torch.autograd.profiler.profile(use_kineto=False) as profiler:
        y.sum().backward()
    return [event.name.removeprefix("aten::") for event in profiler.function_events]


def has_returned(function, *args, marker: str = "add") -> bool:
    """Whether the rerun of a function has got to an operator that comes after all that it saves."""
    _, *found = [marker in operators_in_backward(checkpoint(function, *args)) for _ in range(4)]
    # What is met for the first time is stopped; then it is judged, and remembered.
    assert len(set(found)) == 1
    return found[0]


# ---- what returns ----


def plus(x, y):
    return y + x.sin()


def plus_in_branches(x, y):
    if y is not None:
        z = x.sin() if x.ndim else x.cos()
    else:
        z = note(x)
        z = note(z)
    y = y + z
    return y  # noqa: RET504


def plus_if(x, y, more=None):
    z = x.sin()
    if more is None:
        z = y + z
    return z


def plus_dropout(x, y):
    return y + F.dropout(x.sin(), 0.0, True)


def plus_dropout_afterwards(x, y):
    z = torch.sin(x)
    z = F.dropout(z, 0.0)
    return torch.add(y, z)


def plus_by_a_call(x, y):
    return plus(x, y)


class Residual(nn.Module):
    """A block that ends like those of transformers."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)

    def forward(self, x, y):
        """Adds what it computes to its second argument."""
        return y + self.inner(F.gelu(self.norm(x)))


@pytest.mark.parametrize(
    "function",
    [
        plus,
        plus_dropout,
        plus_dropout_afterwards,
        plus_by_a_call,
        plus_in_branches,
        plus_if,
        functools.partial(plus),
        Residual(),
        Residual().forward,
        lambda x, y: y + x @ x.t(),
        lambda x, y: y + F.scaled_dot_product_attention(x, x, x),
        lambda x, y: y + x.exp(),
        lambda x, y: y + x * x,
    ],
)
def test_rule_5_what_only_adds_and_returns_does_return(function):
    """The result is that of plain autograd, and of a rerun that was stopped."""
    x, y = value(4, 4), value(4, 4)
    assert has_returned(function, x, y)
    gradients = torch.autograd.grad(checkpoint(function, x, y).sum(), (x, y))
    plain = torch.autograd.grad(function(x, y).sum(), (x, y))
    assert all(map(torch.equal, gradients, plain))


def test_rule_5_functions_that_call_modules_return():
    """Modules in closures, among arguments' callers, and in modules."""
    block, x, y = Residual(), value(4, 4), value(4, 4)
    assert has_returned(lambda x, y: block(x, y), x, y)
    sequence = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    assert not has_returned(lambda x: sequence(x) + 1, x)  # loops over what it holds


def test_rule_5_a_loop_over_a_range_is_left():
    """Whether it goes on cannot be seen: if it does, it is stopped at the next operator that saves."""

    def in_a_row(x, times):
        for i in range(times):
            x = x.exp() if i % 2 else x.sin()
        return x + 1

    x = value(4)
    assert has_returned(in_a_row, x, 3)
    (g,) = torch.autograd.grad(checkpoint(in_a_row, x, 3).sum(), x)
    assert torch.equal(g, torch.autograd.grad(in_a_row(x, 3).sum(), x)[0])


def test_rule_5_a_loop_that_goes_on_is_stopped_at_the_next_operator_that_saves():
    """Where the last handle that is alive is not that of the last operator, the loop has turns left."""

    def in_a_row(x):
        seen = []
        for _ in range(4):
            x = x.sin()
            seen.append(x)
        return seen

    def turns(x):
        for _ in range(4):
            x = x.sin()
        return x

    x = value(4)
    first = checkpoint(in_a_row, x)[0]
    assert operators_in_backward(first).count("sin") == 1
    turns_run = []
    for _ in range(3):
        y = checkpoint(turns, x)
        node = y.grad_fn.next_functions[0][0].next_functions[0][0]  # the second of four
        del y
        with torch.autograd.profiler.profile(use_kineto=False) as profiler:
            node(torch.ones(4, dtype=torch.float64))
        turns_run.append([event.name for event in profiler.function_events].count("aten::sin"))
    # The first, and the second, which saves what is asked for; once known, that one goes on, and the third is stopped.
    assert turns_run == [2, 3, 3]


@pytest.mark.parametrize("in_context", [False, True])
def test_rule_5_context_variables_make_no_difference(in_context):
    """A rerun in a copy of a context is called by C code in between."""
    x, y = value(4), value(4)
    context = contextvars.copy_context()
    if in_context:
        context.run(contextvars.ContextVar("variable").set, 1)
    assert context.run(has_returned, plus, x, y)


# ---- what is stopped ----


class Counts:
    """Has things to do after its last operator."""

    def __init__(self):
        self.calls = 0
        self.kept = None
        self.items = {}

    def add(self, x):
        z = x.sin()
        self.calls += 1
        return z

    def keep(self, x):
        z = x.sin()
        self.kept = "kept" if self.kept is None else "again"
        return z

    def put(self, x):
        z = x.sin()
        self.items[len(self.items)] = 1
        return z

    @property
    def noting(self):
        events.append("property")
        return 1.0

    def ask(self, x):
        z = x.sin()
        return z * self.noting

    def happened(self):
        return self.calls + len(self.items) + (self.kept is not None) + (self.kept == "again") + len(events)


@pytest.mark.parametrize("name", ["add", "keep", "put", "ask"])
def test_rule_5_objects_are_not_changed_twice(name):
    """Attributes, items, and properties, which may do anything."""
    for _ in range(2):
        events.clear()
        counts = Counts()
        checkpoint(getattr(counts, name), value(4)).sum().backward()
        assert counts.happened() == 1


def by_call(x):
    z = x.sin()
    events.append("after")
    return z


def by_print(x):
    z = x.sin()
    print(events.append("printed"))  # noqa: T201
    return z


def by_global(x):
    global counter
    z = x.sin()
    counter += 1
    events.extend(["global"] * counter)
    counter = 0
    return z


def by_context(x):
    with noting():
        return x.sin()


def by_finally(x):
    try:
        return x.sin()
    finally:
        events.append("finally")


def by_generator(x):
    def values():
        yield x.sin()
        events.append("generator")

    return sum(values())


def by_branch(x, *, flag=True):
    z = x.sin()
    if flag:
        events.append("branch")
    return z


def by_loop(x):
    for function in [torch.sin, note]:
        x = function(x)
    return x


def by_range(x):
    for i in range(2):
        x = note(x) if i else x.sin()
    return x


def by_while(x):
    turns = 0
    while turns < 2:
        x = note(x) if turns else x.sin()
        turns += 1
    return x


def by_comprehension(x):
    return sum([function(x) for function in (torch.sin, note)])


def by_map(x):
    return sum(map(lambda function: function(x), (torch.sin, note)))  # noqa: C417


def by_reduce(x):
    return functools.reduce(lambda x, function: function(x), (torch.sin, note), x)


def by_wrapper(x):
    return noted(x)


def by_star(x):
    return note(*[x.sin()])


def by_default_of_a_lambda(x):
    also = lambda y, then=note: then(y)  # noqa: E731
    return also(x.sin())


def by_in_place_operator(x):
    z = x.sin()
    events.__iadd__(["in place"])
    return z


def by_augmented_assignment(x):
    z, mine = x.sin(), events
    mine += ["augmented"]
    return z


def by_shift(x):
    z, mine = x.sin(), Shifts()
    mine << "shifted"
    return z


def by_unpacking(x):
    z = x.sin()
    _first, *_ = Iterates()
    return z


def by_format(x):
    z = x.sin()
    _ = f"{Formats()}"
    return z


class Shifts:
    """Notes what it is shifted by."""

    def __lshift__(self, other):
        events.append(other)
        return self


class Iterates:
    """Notes that it is iterated over."""

    def __iter__(self):
        events.append("iterated")
        return iter([1, 2])


class Formats:
    """Notes that it is formatted."""

    def __format__(self, how):
        return str(self)

    def __str__(self):
        events.append("formatted")
        return ""


@contextlib.contextmanager
def noting():
    yield
    events.append("context")


def called_by(function):
    return lambda x, y: function(x, y)


def note(x):
    events.append("note")
    return x


def noted_by(function):
    @functools.wraps(function)
    def wrapper(x):
        return note(function(x))

    return wrapper


@noted_by
def noted(x):
    return x.sin()


@pytest.mark.parametrize(
    "function",
    [
        by_augmented_assignment,
        by_branch,
        by_call,
        by_comprehension,
        by_context,
        by_default_of_a_lambda,
        by_finally,
        by_format,
        by_generator,
        by_global,
        by_in_place_operator,
        by_loop,
        by_map,
        by_print,
        by_range,
        by_reduce,
        by_shift,
        by_star,
        by_unpacking,
        by_while,
        by_wrapper,
    ],
)
def test_rule_5_what_has_more_to_do_is_stopped(function):
    """All of it happens once, in forward, or as often as leaving a block by an exception makes it happen."""
    leaves_by_exception = function is by_finally
    for _ in range(3):  # also when it is known
        events.clear()
        checkpoint(function, value(4)).sum().backward()
        assert len(events) == 1 + leaves_by_exception


def test_rule_5_nonlocal_variables_are_not_set_twice():
    """A closure's variable is seen by others."""
    count = 0

    def function(x):
        nonlocal count
        z = x.sin()
        count += 1
        return z

    checkpoint(function, value(4)).sum().backward()
    assert count == 1


memory = torch.zeros(4, dtype=torch.float64)


def deep_inside():
    """Returns a tensor from where nobody looks for state."""
    return memory


def by_method(x):
    cache = deep_inside()
    z = x.sin()
    cache.copy_(z.detach())
    return z


def by_item(x):
    cache = deep_inside()
    z = x.sin()
    cache[1:] = 1.0
    return z


def by_operator(x):
    cache = deep_inside()
    z = x.sin()
    cache += 1.0
    return z


def by_dropout(x):
    cache = deep_inside()
    z = x.sin()
    F.dropout(cache, 0.5, True, True)
    return z


def by_out(x):
    cache, ones = deep_inside(), torch.ones(4, dtype=torch.float64)
    z = x.sin()
    torch.add(ones, ones, out=cache)
    return z


def by_handler(x):
    z = x.sin()
    try:
        return z + torch.ones(3)
    except RuntimeError:
        events.append("handled")
        return z


def by_coroutine(x):
    async def coroutine():
        return x.sin()

    try:
        coroutine().send(None)
    except StopIteration as end:
        events.append("ended")
        return end.value


def by_conditional_method(x):
    flag, const, c = True, torch.ones(4, dtype=torch.float64), events
    y = x.sin()
    z = (const if flag else y).exp()
    c.append("exp")
    return y + z


def by_conditional_property(x):
    one, c = Counts(), torch
    y = x.sin()
    return y + (one if one is not None else c).noting


def by_conditional_function(x):
    own, g = True, note
    y = x.sin()
    return (g if own else torch.add)(y)


def by_conditional_loop(x):
    one = True
    for _ in Iterates() if one else range(2):
        x = x.sin()
    return x


def by_argument_of_a_condition(x):
    functions = [torch.sin, note]
    return functools.reduce(apply, functions if functions else [], x)


def by_reduce_of_arguments(x):
    arguments = apply, [torch.sin, note], x
    return functools.reduce(*arguments)


def by_sum_with_a_name(x):
    return sum(map(lambda function: function(x), (torch.sin, note)), start=0)  # noqa: C417


def by_truth(x):
    flag = Flag()
    z = x.sin()
    return z if flag else x


def by_comparison(x):
    flag = Flag()
    z = x.sin()
    return z if flag == 1 else x


def by_percent(x):
    one = Formats()
    z = x.sin()
    text = "%s" % one  # noqa: UP031
    return z if text == "" else x


def by_tensor_of_another_class(x):
    other = Noting(torch.ones(4, dtype=torch.float64))
    z = x.sin()
    z + other
    return z


class Flag:
    """Notes that it is asked."""

    def __bool__(self):
        events.append("bool")
        return True

    def __eq__(self, other):
        events.append("eq")
        return True

    __hash__ = None


def apply(x, function):
    return function(x)


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (by_argument_of_a_condition, 1),
        (by_coroutine, 1),
        (by_comparison, 1),
        (by_conditional_function, 1),
        (by_conditional_loop, 2),
        (by_conditional_method, 1),
        (by_conditional_property, 1),
        (by_handler, 1),
        (by_percent, 1),
        (by_reduce_of_arguments, 1),
        (by_sum_with_a_name, 1),
        (by_tensor_of_another_class, 1),
        (by_truth, 1),
    ],
)
def test_rule_5_what_might_have_more_to_do_is_stopped(function, times):
    """Ways that only some readings of the code show."""
    for _ in range(4):
        events.clear()
        y = checkpoint(function, value(4))
        before = len(events)
        y.sum().backward()
        assert before == 1
        assert len(events) == times


def test_rule_5_a_memo_is_not_filled_by_a_rerun():
    """What ``lru_cache`` is around returns to it first, which keeps the result."""

    class Remembers(nn.Module):
        @functools.lru_cache  # noqa: B019
        def cached(self, x):
            return x.sin()

        def forward(self, x):
            return self.cached(x.clone()) + 1

    module, x = Remembers(), value(4)
    for _ in range(4):
        Remembers.cached.cache_clear()
        checkpoint(module, x).sum().backward()
        assert Remembers.cached.cache_info().currsize == 1


def test_rule_5_methods_with_names_of_operators_are_not_trusted():
    """Only those of tensors, as they are in torch, are what their names say."""

    class Other:
        sin = staticmethod(torch.sin)

    def function(x):
        one = Other()
        return one.sin(x) + 1

    def patched(x):
        return x.sin() + 1

    x = value(4)
    assert not has_returned(function, x)
    assert has_returned(patched, x)
    region = checkpoint(patched, x)
    with mock.patch.object(torch.Tensor, "sin", lambda tensor: note(tensor).cos(), create=True):
        assert not any(name == "add" for name in operators_in_backward(checkpoint(patched, x)))
    region.sum().backward()


def test_nothing_of_the_users_is_kept():
    """Neither models nor namespaces, whatever names code has looked up."""
    names: dict[str, object] = {"torch": torch, "F": F, "block": nn.Linear(4, 4, dtype=torch.float64)}
    exec("def function(x):\n    return F.dropout(block(x), 0.0) + 1\ndef other(x):\n    return function(x)", names)
    alive = [weakref.ref(names["block"])]
    x = value(4)
    assert has_returned(names["function"], x)
    assert has_returned(names["other"], x)
    names.clear()
    assert [one() for one in alive] == [None]


def test_code_that_was_judged_stays():
    """Another code could have the identity of one that is gone, and have more to do."""
    names: dict[str, object] = {}
    exec("def function(x):\n    return x.sin() + 1", names)
    assert has_returned(names["function"], value(4))
    code = weakref.ref(names["function"].__code__)
    names.clear()
    assert code() is not None


@pytest.mark.parametrize("which", ["argument", "closure", "result"])
def test_rule_5_large_tensors_are_not_computed_with(which):
    """A sum with something large takes long, and memory that nobody expects a recompute to need."""
    large = torch.ones(tail.MOST_ELEMENTS * 2, dtype=torch.float64)

    def with_closure(x):
        own = large
        return own + x.sin()

    def with_a_result(x):
        own = x.detach().expand(tail.MOST_ELEMENTS * 2)
        return own + x.sin()

    functions = {"argument": plus, "closure": with_closure, "result": with_a_result}
    assert not has_returned(functions[which], value(1), *([large] if which == "argument" else []))


def test_rule_5_sizes_are_looked_at_each_time():
    """Arguments may be larger in another step."""
    x = value(1)
    assert has_returned(plus, x, torch.ones(4))
    large = torch.ones(tail.MOST_ELEMENTS * 2)
    assert "add" not in operators_in_backward(checkpoint(plus, x, large))
    assert "add" in operators_in_backward(checkpoint(plus, x, torch.ones(4)))


@pytest.mark.parametrize("function", [by_dropout, by_item, by_method, by_operator, by_out])
def test_rule_5_what_writes_is_stopped_before_it_does(function):
    """What it writes to may be anybody's."""
    memory.fill_(1.0)
    y = checkpoint(function, value(4))
    version = memory._version
    y.sum().backward()
    assert memory._version == version


def test_rule_5_an_operator_that_saves_and_then_writes_is_stopped():
    """It saves a factor before it writes, to a tensor that is anybody's."""

    def function(x):
        z = deep_inside().detach()
        return z.addcmul_(x, torch.full((4,), 2.0, dtype=torch.float64))

    memory.fill_(1.0)
    y = checkpoint(function, value(4))
    version = memory._version
    y.sum().backward()
    assert memory._version == version


def test_rule_5_names_that_mean_something_else_are_looked_at_again():
    """A verdict is about what names are bound to."""
    x, y = value(4), value(4)
    assert has_returned(plus_dropout, x, y)
    region = checkpoint(plus_dropout, x, y)
    with mock.patch.object(F, "dropout", lambda tensor, *_: note(tensor)):
        region.sum().backward()
        assert events == []
        checkpoint(plus_dropout, x, y).sum().backward()
        assert events == ["note"]
    assert has_returned(plus_dropout, x, y)


def test_rule_5_globals_of_the_function_are_looked_at_again():
    """The same for a name in the function's own module."""
    global unbound_later

    def function(x):
        return unbound_later.dropout(x.sin(), 0.0, True) + 1

    x = value(4)
    assert has_returned(function, x)
    region = checkpoint(function, x)
    unbound_later = mock.Mock(dropout=lambda tensor, *_: note(tensor))
    try:
        region.sum().backward()
        assert events == []
    finally:
        unbound_later = F


def test_rule_5_a_large_operator_is_stopped():
    """How long it would take to end is not known: the sizes of all that it saves have to be small."""
    few = tail.MOST_ELEMENTS // 4
    x = value(2, 4)
    assert has_returned(plus, x, torch.ones(1))
    assert not has_returned(plus, value(tail.MOST_ELEMENTS + 1), torch.ones(1))
    for size, returns in ((few, True), (few + 1, False)):
        weight = new_leaf(4, size)
        assert has_returned(lambda x, y, weight=weight: y + torch.matmul(weight.t(), x.t()), x, torch.ones(1)) is returns


def test_rule_5_modes_see_as_much_as_before():
    """A dispatch mode around backward counts what is brought back, and no more."""
    x, y = value(4), value(4)
    region = checkpoint(plus, x, y)
    with CountOps() as ops:
        region.sum().backward()
    assert ops.counts["add"] == 0
    assert ops.counts["sin"] == 0


class Noting(torch.Tensor):
    """Is told of every operator on it."""

    count = 0

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.count += 1
        if func in (torch.ops.aten.sin.default, torch.ops.aten.add.Tensor):
            events.append(func.__name__.split(".")[0])
        out = func(*pytree.tree_map_only(Noting, lambda one: one.inner, args), **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Noting, out)


def test_rule_5_tensors_of_other_classes_are_told_as_much_as_before():
    """What they do when an operator runs on them is theirs."""
    x = Noting(torch.randn(4)).requires_grad_().clone()
    checkpoint(lambda x: x.sin(), x).sum().backward()
    assert events == ["sin"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_rule_5_weights_of_other_classes_are_told_as_much_as_before(bias, graph, monkeypatch):
    """Also where the tensor that is saved last is none of them, and where such a weight is not saved at all."""
    linear = nn.Linear(4, 4, bias=bias)
    linear.weight = nn.Parameter(Noting(linear.weight.detach()))
    x = torch.randn(2, 4, requires_grad=graph).clone()
    told = []
    for active in (False, True):
        with monkeypatch.context() as patch:
            if not active:
                patch.setattr("ckpt_hooks._filling.is_all_but_done", lambda *_: False)
            for _ in range(3):
                Noting.count = 0
                checkpoint(linear, x).sum().backward()
            told.append(Noting.count)
    assert told[0] == told[1] > 0


class Asked(nn.Module):
    """Is asked for its truth."""

    def forward(self, x):
        """Asks."""
        z = x.sin()
        return z if self else x

    def __len__(self):
        """Notes it."""
        events.append("len")
        return 1


def test_rule_5_modules_are_asked_as_often_as_before():
    """A module may be a container, whose length is its truth."""
    module = Asked()
    for _ in range(4):
        events.clear()
        checkpoint(module, value(4)).sum().backward()
        assert events.count("len") == 1


def test_rule_5_tensors_that_may_have_grown_are_not_computed_with():
    """Those of closures and attributes may be larger in another step, and nobody looks at them then."""
    held = torch.ones(4, dtype=torch.float64)
    module = Counts()
    module.held = held

    def from_closure(x):
        return held + x.sin()

    def from_attribute(x):
        own = module.held
        return own + x.sin()

    assert not has_returned(from_closure, value(4))
    assert not has_returned(from_attribute, value(4))


def test_rule_5_a_dictionary_of_variables_is_left_alone():
    """What ``locals()`` has returned is filled anew whenever somebody looks at the variables."""
    found = []

    def function(x):
        found.append(locals())
        y = x.sin()
        return y + 1

    for _ in range(3):
        checkpoint(function, value(4)).sum().backward()
    assert all("y" not in one for one in found)


def test_rule_5_deep_functions_are_stopped():
    """The way out is not looked at for longer than it takes to stop."""
    x, y = value(4), value(4)
    for depth, returns in ((3, True), (30, False)):
        function = plus
        for _ in range(depth):
            function = called_by(function)
        assert has_returned(function, x, y) is returns


def test_rule_5_functions_without_code_are_stopped():
    """An operator that is itself the function may be any."""
    x = value(4)
    assert checkpoint(torch.Tensor.sin, x).grad_fn is not None
    (g,) = torch.autograd.grad(checkpoint(torch.Tensor.sin, x).sum(), x)
    assert torch.equal(g, x.cos())
    assert not any(kind.ways for kind in tail._kinds.values())


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_that_may_go_on_write_to_nothing(name):
    """By their schemas, but for variants with ``out=``, through which no gradient flows."""
    packet = getattr(torch.ops.aten, name)
    assert name not in WRITES_UNSAID
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        writes = [argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
        assert all(argument.is_out or overload.endswith("out") for argument in writes), schema


def test_what_is_remembered_is_bounded(monkeypatch):
    """It does not grow without end."""
    monkeypatch.setattr(tail, "_MOST_KINDS", 3)
    monkeypatch.setattr(tail, "_MOST_CASES", 2)
    x = value(4)
    for number in range(10):
        names: dict[str, object] = {}
        exec(f"def function(x): return x.sin() + {number}\ndef other(x): return str(x.sin())[:0] or x.sin()", names)
        for _ in range(3):
            checkpoint(names["function"], x).sum().backward()
            checkpoint(names["other"], x).sum().backward()
    module = Chosen()
    for module.which in 3 * list(range(4)):
        checkpoint(module, x).sum().backward()
    assert len(tail._kinds) <= 3
    assert all(len(known) <= 2 for kind in tail._kinds.values() for known in (kind.ways, kind.met, kind.left_to_do))


class Chosen(nn.Module):
    """Ends in one of several operators, or in one with something left to do."""

    which = 0

    def forward(self, x):
        if self.which == 0:
            return x.sin() + 1
        if self.which == 1:
            return x.cos() + 1
        if self.which == 2:
            return x.exp() + 1
        return note(x.sin())


def test_functions_that_never_return_are_asked_no_more(monkeypatch):
    """After so many times that something was left to do, it is not looked for any more; once they returned, it is."""
    asked = []
    ask = tail.is_all_but_done
    monkeypatch.setattr("ckpt_hooks._filling.is_all_but_done", lambda *args: asked.append(1) or ask(*args))
    x, module = value(4), Chosen()
    module.which = 3
    for _ in range(tail._PATIENCE + 20):
        checkpoint(module, x).sum().backward()
    # The lambda's frame has shifted all others by one, which makes no difference to what is stopped.
    assert len(asked) == tail._PATIENCE + 2
    assert len(events) == tail._PATIENCE + 20  # those of forward


def test_functions_that_return_sometimes_are_always_asked(monkeypatch):
    """Where one way has nothing left to do, the others do not put an end to the asking."""
    monkeypatch.setattr(tail, "_PATIENCE", 3)
    x, module = value(4), Chosen()
    for which in (0, 0, 0, *[3] * 10):
        module.which = which
        checkpoint(module, x).sum().backward()
    module.which = 0
    assert "add" in operators_in_backward(checkpoint(module, x))
