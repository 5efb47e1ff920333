"""What happens to the arguments of a region between forward and recompute."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ckpt_hooks import MutationError, checkpoint
from tests.measure import Log


class Point(collections.namedtuple("Point", ["x", "y"])):
    """A named tuple."""

    __slots__ = ()


@dataclasses.dataclass
class Plain:
    """A dataclass."""

    x: Any
    y: Any = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be assigned to."""

    x: Any
    y: Any = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    """A dataclass that cannot be assigned to, without a ``__dict__``."""

    x: Any
    y: Any = 2.0


@dataclasses.dataclass
class Unset:
    """A dataclass with a field that is not there yet, and one that is not for ``__init__``."""

    x: Any
    y: Any = dataclasses.field(default=2.0, init=False)
    later: Any = dataclasses.field(init=False, repr=False, compare=False)


class Items(list):  # type: ignore[type-arg]
    """A list with an attribute."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.label = "items"


class Couple(tuple):  # type: ignore[type-arg]
    """A tuple that is made of two values, not of a sequence, and has an attribute."""

    label: str

    def __new__(cls, first: Any, second: Any) -> Couple:
        couple = super().__new__(cls, (first, second))
        couple.label = "couple"
        return couple


class ReadOnly(collections.OrderedDict):  # type: ignore[type-arg]
    """A mapping that refuses changes once it is made, as configurations of model libraries do."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.closed = True

    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "closed", False):
            raise TypeError("read-only")
        super().__setitem__(key, value)

    def clear(self) -> None:
        raise TypeError("read-only")


class Outputs(collections.OrderedDict):  # type: ignore[type-arg]
    """Entries that are attributes as well, as in the outputs of Transformers' models."""

    def __init__(self, **entries: Any) -> None:
        super().__init__()
        for key, value in entries.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Tagged(dict):  # type: ignore[type-arg]
    """A dict that cannot be made without an argument."""

    def __new__(cls, tag: str, **entries: Any) -> Tagged:
        tagged = super().__new__(cls)
        tagged.tag = tag
        return tagged

    tag: str

    def __init__(self, tag: str, **entries: Any) -> None:
        super().__init__(entries)


class Namespace(dict):  # type: ignore[type-arg]
    """A dict whose entries are its attributes, in either direction."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


def _written_and_read(namespace: Any) -> Any:
    namespace.third = namespace.x
    namespace["fourth"] = namespace["third"]
    return namespace.fourth


class PrivateSlot(list):  # type: ignore[type-arg]
    """A list with an attribute in a slot whose name is mangled, and one in a slot that a subclass hides."""

    __slots__ = ("__private", "shown")

    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.__private, self.shown = items

    def private(self) -> Any:
        return self.__private


class HiddenSlot(PrivateSlot):
    """One that hides it."""

    shown = property(lambda self: PrivateSlot.shown.__get__(self), lambda self, value: PrivateSlot.shown.__set__(self, value))


class Pair(enum.Enum):
    """Members that are containers, each of which is one object."""

    FIRST = [1]  # noqa: RUF012
    SECOND = ([2], 3)


def _factory() -> float:
    return 0.5


# How to hold two values, and how to read the first and the second.
CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda a, b: [a, b], lambda c: c[0], lambda c: c[1]),
    "tuple": (lambda a, b: (a, b), lambda c: c[0], lambda c: c[1]),
    "namedtuple": (Point, lambda c: c.x, lambda c: c.y),
    "dict": (lambda a, b: {"x": a, 1: b}, lambda c: c["x"], lambda c: c[1]),
    "OrderedDict": (lambda a, b: collections.OrderedDict(x=a, y=b), lambda c: c["x"], lambda c: c["y"]),
    "defaultdict": (
        lambda a, b: collections.defaultdict(_factory, x=a, y=b),
        lambda c: c["x"] * (2 * c["absent"]),
        lambda c: c["y"],
    ),
    "dataclass": (Plain, lambda c: c.x, lambda c: c.y),
    "frozen dataclass": (Frozen, lambda c: c.x, lambda c: c.y),
    "frozen slotted dataclass": (FrozenSlotted, lambda c: c.x, lambda c: c.y),
    "list subclass": (Items, lambda c: c[0] if c.label == "items" else None, lambda c: c[1]),
    "tuple subclass": (Couple, lambda c: c[0] if c.label == "couple" else None, lambda c: c[1]),
    "read-only dict": (lambda a, b: ReadOnly(x=a, y=b), lambda c: c["x"], lambda c: c["y"]),
    "model outputs": (lambda a, b: Outputs(x=a, y=b), lambda c: c.x, lambda c: c["y"]),
    "dict that needs an argument": (
        lambda a, b: Tagged("t", x=a, y=b),
        lambda c: c["x"] if c.tag == "t" else None,
        lambda c: c["y"],
    ),
    "dict that is its own namespace": (lambda a, b: Namespace(x=a, y=b), _written_and_read, lambda c: c["y"]),
    "members of an enumeration": (
        lambda a, b: [a, b, Pair.FIRST, Pair.SECOND],
        lambda c: c[0] if c[2] is Pair.FIRST and c[3] is Pair.SECOND else None,
        lambda c: c[1],
    ),
    "mangled slot": (PrivateSlot, lambda c: c.private(), lambda c: c[1]),
    "hidden slot": (HiddenSlot, lambda c: c.private(), lambda c: c.shown),
    "nested": (
        lambda a, b: {"deep": [Point(Frozen((a,)), Plain([b]))]},
        lambda c: c["deep"][0].x.x[0],
        lambda c: c["deep"][0].y.x[0],
    ),
}


@pytest.fixture(params=list(CONTAINERS))
def container(request: pytest.FixtureRequest) -> Any:
    """How to make a container of two values, and how to read each."""
    return CONTAINERS[request.param]


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (3,)), requires_grad=True)


def copying_hooks(packed: list[torch.Tensor]) -> saved_tensors_hooks:
    """Hooks that note what is packed, and bring back another object each time."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.detach().clone()

    return saved_tensors_hooks(pack, torch.clone)


def in_rerun(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which a region's function is called again."""
    weight, seen = leaf(), Log()

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return weight.sin().cos()

    checkpoint(function, *args, **kwargs).sum().backward()
    assert len(seen) == 2
    return seen[1]


# Capturing and rebuilding


def test_containers_come_back_with_type_and_values(container: Any) -> None:
    """A container of tensors comes back as another one of its type that holds the same."""
    make, first, second = container
    a, b = leaf(), leaf()
    given = make(a, b)
    (back,), kwargs = in_rerun(given, given=given)
    assert type(back) is type(given)
    assert back is not given
    assert torch.equal(first(back), a)
    assert second(back) is b
    assert kwargs["given"] is back
    assert first(given) is not None
    assert second(given) is b


def test_fields_that_are_not_set_stay_so() -> None:
    (back,), _ = in_rerun(Unset(leaf()))
    assert back.y == 2.0
    assert not hasattr(back, "later")


def test_frozen_dataclass_without_tensors_is_handed_on() -> None:
    given = (Frozen(1, (2, "a")), 3)
    (back,), _ = in_rerun(given)
    assert back is given


def test_return_types_of_torch_come_back_as_such() -> None:
    """What ``torch.max`` returns is a tuple that takes one sequence."""
    given = torch.max(leaf(3, 3), 0)
    (back,), _ = in_rerun(given)
    assert type(back) is torch.return_types.max
    assert back.indices is given.indices


def test_packed_sequences_come_back_as_such() -> None:
    """``PackedSequence`` is a named tuple with a constructor of its own, and optional parts."""
    lstm = nn.LSTM(2, 2)
    sequence = nn.utils.rnn.pack_sequence([leaf(3, 2), leaf(2, 2)])
    output, _ = checkpoint(lstm, sequence)
    output.data.sum().backward()
    found = [parameter.grad for parameter in lstm.parameters()]
    expected = torch.autograd.grad(lstm(sequence)[0].data.sum(), list(lstm.parameters()))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "value",
    [object(), nn.Linear(1, 1), len, torch.sin, {1, 2}, frozenset({3}), "text", b"bytes", range(3), 1.5, None, Plain, type],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_handed_on_as_they_are(value: Any) -> None:
    """Anything that is no tensor and no container is the same object in forward and in the rerun, at any depth."""
    seen: list[Any] = Log()

    def fn(x: torch.Tensor, direct: Any, items: list[Any], *, record: dict[str, Any]) -> torch.Tensor:
        seen.extend([direct, items[0], record["value"]])
        return x.sin().cos()

    checkpoint(fn, leaf(), value, [value], record={"value": value}).sum().backward()
    assert len(seen) == 6
    assert all(entry is value for entry in seen)


# The same thing twice


def twice(make: Callable[[], Any]) -> list[bool]:
    """Whether a function that is given one thing in five places sees one thing, in forward and recompute."""
    same: list[bool] = Log()

    def fn(x: torch.Tensor, a: Any, items: list[Any], *, c: Any, record: dict[str, Any]) -> torch.Tensor:
        same.append(a is items[0] is items[1] is c is record["d"])
        return x.sin().cos()

    thing = make()
    checkpoint(fn, leaf(), thing, [thing, thing], c=thing, record={"d": thing}).sum().backward()
    return same


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(leaf, id="tensor"),
        pytest.param(lambda: leaf() * 2, id="tensor with history"),
        pytest.param(lambda: [leaf()], id="list"),
        pytest.param(lambda: {"x": leaf()}, id="dict"),
        pytest.param(lambda: (leaf(),), id="tuple"),
        pytest.param(lambda: (1, object()), id="tuple without tensors"),
        pytest.param(lambda: Plain(leaf()), id="dataclass"),
        pytest.param(lambda: Frozen(leaf()), id="frozen dataclass"),
        pytest.param(lambda: Frozen(1), id="frozen dataclass without tensors"),
        pytest.param(lambda: Point(1, 2), id="namedtuple without tensors"),
        pytest.param(object, id="object"),
    ],
)
@pytest.mark.parametrize("around", ["nothing", "save_on_cpu", "a region"])
def test_one_thing_in_several_places_is_one_thing_in_the_rerun(make: Callable[[], Any], around: str) -> None:
    """Functions ask whether two arguments are the same object: the answer is that of forward, whatever is around."""
    if around == "nothing":
        same = twice(make)
    elif around == "save_on_cpu":
        with save_on_cpu():
            same = twice(make)
    else:
        same = Log()

        def outer(x: torch.Tensor) -> torch.Tensor:
            thing = make()

            def fn(x: torch.Tensor, a: Any, items: list[Any], *, c: Any) -> torch.Tensor:
                same.append(a is items[0] is c)
                return x.sin().cos()

            return checkpoint(fn, x * 2, thing, [thing], c=thing).tan()

        checkpoint(outer, leaf()).sum().backward()
    assert len(same) >= 2
    assert all(same)


# Containers are captured


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda items, record: items.append(1), id="append"),
        pytest.param(lambda items, record: items.__setitem__(0, torch.zeros(3)), id="rebind an item"),
        pytest.param(lambda items, record: record.__setitem__("w", torch.zeros(3)), id="rebind an entry"),
        pytest.param(lambda items, record: record.update(scale=0.0), id="rebind a number"),
        pytest.param(lambda items, record: record["deep"][0].update(shift=9.0), id="rebind in the depth"),
        pytest.param(lambda items, record: setattr(record["plain"], "x", torch.zeros(3)), id="assign to a dataclass"),
    ],
)
@pytest.mark.parametrize("around", ["nothing", "save_on_cpu"])
def test_what_the_caller_does_to_containers_is_not_seen(change: Callable[..., Any], around: str) -> None:
    """Lists, dicts and dataclasses are those of forward, whatever happened to the originals since."""

    def fn(items: list[Any], *, record: dict[str, Any]) -> torch.Tensor:
        total = sum(item * (index + 1) for index, item in enumerate(items))
        plain = record["plain"].x * record["plain"].y
        return (total * record["w"] * record["scale"] + record["deep"][0]["shift"]).sin() * plain

    def arguments() -> tuple[list[Any], dict[str, Any]]:
        record = {"w": w, "scale": 2.0, "deep": ({"shift": 0.5},), "plain": Plain(v, 3.0)}
        return [x, x * 2], record

    x, w, v = leaf(), leaf(), leaf()
    items, record = arguments()
    with save_on_cpu() if around == "save_on_cpu" else torch.enable_grad():
        y = checkpoint(fn, items, record=record)
    change(items, record)
    y.sum().backward()
    items, record = arguments()
    expected = torch.autograd.grad(fn(items, record=record).sum(), [x, w, v])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(w.grad, expected[1])
    assert torch.equal(v.grad, expected[2])


# Iterators


@dataclasses.dataclass
class Stream:
    """A dataclass that holds something to be read once."""

    items: Any


@pytest.mark.parametrize(
    ("arguments", "keywords", "named"),
    [
        pytest.param((iter([1]),), {}, r"args\[1\] is an iterator \(list_iterator\)", id="list iterator"),
        pytest.param(((i for i in [1]),), {}, r"args\[1\] is an iterator \(generator\)", id="generator"),
        pytest.param((1, [2, iter("a")]), {}, r"args\[2\]\[1\] is an iterator", id="in a list"),
        pytest.param(({"k": (iter("a"),)},), {}, r"args\[1\]\['k'\]\[0\] is an iterator", id="in a tuple in a dict"),
        pytest.param((Stream(iter("a")),), {}, r"args\[1\]\.items is an iterator", id="in a dataclass"),
        pytest.param((), {"items": iter("a")}, r"kwargs\['items'\] is an iterator", id="keyword"),
    ],
)
def test_iterators_are_refused_by_name(arguments: tuple[Any, ...], keywords: dict[str, Any], named: str) -> None:
    """What can be read once is refused in forward, before the function runs, with its place and the way out."""
    calls: list[int] = []
    with pytest.raises(TypeError, match=named + ".*Pass a list or a tuple"):
        checkpoint(lambda *args, **kwargs: calls.append(1), leaf(), *arguments, **keywords)
    assert calls == []


# Partials


def test_partial_is_called_as_it_is() -> None:
    """Positional and keyword arguments of partials, nested and overridden ones too, arrive as they do in a call."""
    seen: list[Any] = Log()

    def fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(([float(arg.detach().sum()) for arg in args], {key: kwargs[key] for key in sorted(kwargs)}))
        return (args[0] * args[1] * args[2]).sin()

    one, two, three = (torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    inner = functools.partial(fn, one, a=1, b=1, c=1)
    checkpoint(functools.partial(inner, two, b=2, c=2), three, c=3).sum().backward()
    assert seen == [([2.0, 4.0, 6.0], {"a": 1, "b": 2, "c": 3})] * 2
    expected = torch.autograd.grad((one * two * three).sin().sum(), [one, two, three])
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip((one, two, three), expected, strict=True))


# Mutation after forward


def _multiply(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * 2 * mask).sin().cos()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(lambda x, m: checkpoint(_multiply, x, m), "args[1]", id="positional"),
        pytest.param(lambda x, m: checkpoint(_multiply, x, mask=m), "kwargs['mask']", id="keyword"),
        pytest.param(lambda x, m: checkpoint(lambda x, c: _multiply(x, c[1]), x, [0, m]), "args[1][1]", id="list"),
        pytest.param(lambda x, m: checkpoint(lambda x, c: _multiply(x, c[1]), x, (0, m)), "args[1][1]", id="tuple"),
        pytest.param(
            lambda x, m: checkpoint(lambda x, c: _multiply(x, c["mask"]), x, {"mask": m}), "args[1]['mask']", id="dict"
        ),
        pytest.param(lambda x, m: checkpoint(lambda x, c: _multiply(x, c.x), x, Plain(m)), "args[1].x", id="dataclass"),
        pytest.param(lambda x, m: checkpoint(lambda x, c: _multiply(x, c.x), x, FrozenSlotted(m)), "args[1].x", id="frozen"),
        pytest.param(
            lambda x, m: checkpoint(lambda x, *, c: _multiply(x, c["a"][0].x), x, c={"a": [Plain(m)]}),
            "kwargs['c']['a'][0].x",
            id="nested keyword",
        ),
    ],
)
def test_mutation_after_forward_names_the_argument(call: Callable[..., torch.Tensor], argument: str) -> None:
    """An input that was modified in place raises, with its place as one would write it and both versions."""
    mask = torch.ones(3)
    mask.mul_(1)
    y = call(leaf(), mask)
    mask.zero_()
    mask.add_(1)
    with pytest.raises(MutationError, match="modified by an inplace operation") as caught:
        y.sum().backward()
    error = caught.value
    assert error.tensor == argument
    assert (error.expected, error.found) == (1, 3)
    assert str(error).startswith(f"region {error.region[0]!r}: {argument}, a float32[3] tensor, has been modified")
    assert "is at version 3; expected version 1" in str(error)


def test_mutation_of_a_leaf_that_the_region_saves(impl: Callable[..., Any]) -> None:
    """An optimizer step between forward and backward raises, where the leaf is all that the region saves too."""
    x = leaf()
    y = impl(torch.sin, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What is around a region


def test_inputs_at_any_depth_go_through_the_hooks_around(container: Any) -> None:
    """Each tensor of a container is packed once by the hooks around the region, and unpacked once a recompute."""
    make, first, second = container
    packed: list[torch.Tensor] = []
    unpacked: list[torch.Tensor] = []
    a, b = leaf() * 1, leaf() * 1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        y = checkpoint(lambda c: (first(c).sin() * second(c)).cos(), make(a, b))
    assert {id(tensor) for tensor in packed} == {id(a), id(b)}
    assert len(packed) == 2
    assert unpacked == []
    torch.autograd.grad(y.sum(), a, retain_graph=True)
    assert len(unpacked) == 2
    torch.autograd.grad(y.sum(), a)
    assert len(unpacked) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_a_tensor_that_occurs_often_comes_back_as_one(nested: bool) -> None:
    """The user's hooks see it once; a region around sees each occurrence, which it may meet as two tensors in its rerun."""
    packed: list[torch.Tensor] = []
    seen: list[int] = []
    x = leaf()

    def function(a: torch.Tensor, b: torch.Tensor, c: list[torch.Tensor], *, d: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(len({id(a), id(b), id(c[0]), id(c[1]), id(d["x"])}))
        return (a * b * c[0] * d["x"]).sin()

    def around(h: torch.Tensor) -> torch.Tensor:
        with copying_hooks(packed):
            return checkpoint(function, h, h, [h, h], d={"x": h})

    y = checkpoint(around, x * 1) if nested else around(x * 1)
    assert len(packed) == (5 if nested else 1)
    y.sum().backward()
    assert set(seen) == {1}
    assert torch.equal(x.grad, torch.autograd.grad((x * x * x * x).sin().sum(), x)[0])


def test_a_leaf_comes_back_as_itself_through_any_hooks() -> None:
    weight, seen = leaf(), Log()

    def inner(w: torch.Tensor) -> torch.Tensor:
        seen.append(w is weight)
        return w.sin().exp()

    checkpoint(lambda: checkpoint(inner, weight) * 1).sum().backward()
    with save_on_cpu():
        y = checkpoint(inner, weight)
    y.sum().backward()
    assert seen == [True] * 4


def test_an_input_that_autograd_refuses_to_save_may_be_passed_on() -> None:
    """An inference tensor, or a view whose base was modified, is no error where nothing needs it, in a nested region too."""
    x = leaf(4)
    h = x * 1
    part, _ = h.chunk(2)
    h.view(-1).mul_(2)
    with torch.inference_mode():
        inference = torch.ones(4)

    def inner(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    (g,) = torch.autograd.grad(checkpoint(lambda x: checkpoint(inner, x, part, inference), x).sum(), x)
    assert torch.equal(g, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda fn, h: checkpoint(fn, h), id="positional"),
        pytest.param(lambda fn, h: checkpoint(lambda *, h: fn(h), h=h), id="keyword"),
        pytest.param(lambda fn, h: checkpoint(functools.partial(fn, h)), id="partial"),
        pytest.param(lambda fn, h: checkpoint(functools.partial(lambda *, h: fn(h), h=h)), id="partial's keyword"),
        pytest.param(lambda fn, h: checkpoint(lambda a, b, c: fn(a), h, h, [h]), id="several times"),
        pytest.param(lambda fn, h: checkpoint()(fn)(h), id="curried"),
    ],
)
@pytest.mark.parametrize("around", ["a region", "save_on_cpu"])
def test_inputs_are_not_kept_alive_however_they_are_given(call: Callable[..., Any], around: str, no_gc: None) -> None:
    """Positional, by keyword or in a partial: what the hooks around have taken care of, the region lets go of."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def outer(x: torch.Tensor) -> torch.Tensor:
        # By a factor, which saves nothing, so that only the region could keep it.
        h = x * 2.0
        alive.append(weakref.ref(h))
        return call(lambda h: h.sin().cos(), h).tan()

    x = leaf()
    if around == "a region":
        y = checkpoint(outer, x)
    else:
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            y = outer(x)
    assert alive[0]() is None
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x * 2.0).sin().cos().tan().sum(), x)[0])


def test_copy_of_arguments_is_not_asked_of_tensors() -> None:
    class Uncopyable(torch.Tensor):
        def __copy__(self) -> Any:
            raise AssertionError

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError

    tensor = torch.rand(3).as_subclass(Uncopyable)
    (back, items), _ = in_rerun(tensor, [tensor, Plain(tensor)])
    assert back is items[0] is items[1].x is tensor
    with pytest.raises(AssertionError):
        copy.copy(tensor)


def test_a_copy_of_somebodys_hooks_that_a_rerun_wrote_to_is_no_argument_any_more():
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        y = checkpoint(lambda h: h.mul_(2).sin(), leaf(3) * 1)
    y.sum().backward(retain_graph=True)
    with pytest.raises(MutationError, match=r"args\[0\]") as caught:
        y.sum().backward()
    assert (caught.value.expected, caught.value.found) == (0, 1)
    assert type(caught.value.expected) is int


def test_a_copy_of_somebodys_hooks_may_be_another_one_in_each_backward():
    copies, x = list[torch.Tensor](), leaf(3)
    with saved_tensors_hooks(lambda tensor: copies.append(tensor.detach().clone()) or copies[-1], lambda tensor: tensor):
        y = checkpoint(determinism_check="none")(lambda h: h.sin().cos())(x * 1)
    for h in (x.detach(), x.detach() + 1):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(found, torch.autograd.grad(h.requires_grad_().sin().cos().sum(), h)[0])
        copies[0].add_(1)
