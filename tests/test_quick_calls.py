"""Torch's bindings in place of overloads: which stand in, that they lead to the same, and where none is called."""

from __future__ import annotations

import itertools
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_hooks import checkpoint_region, set_self_check
from ckpt_hooks._operators.facts import facts_of
from ckpt_hooks._torch.quick_calls import binding_of
from tests.regions import plain

aten = torch.ops.aten

#: Operators of transformers and convolutional networks, with the number of arguments that autograd gives them.
COMMON = {
    **dict.fromkeys((aten.sin.default, aten.exp.default, aten.rsqrt.default, aten.relu.default, aten.t.default), 1),
    **dict.fromkeys((aten.gelu.default, aten.silu.default, aten.clone.default, aten.tanh.default), 1),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor), 2),
    **dict.fromkeys((aten.view.default, aten.expand.default, aten.permute.default, aten.embedding.default), 2),
    **dict.fromkeys((aten.addmm.default, aten.transpose.int, aten._softmax.default, aten.select.int), 3),
    **dict.fromkeys((aten.split.Tensor, aten.sum.dim_IntList, aten.mean.dim, aten.where.self), 3),
    aten.native_layer_norm.default: 5,
    aten.convolution.default: 9,
}


@pytest.mark.parametrize("overload", COMMON, ids=str)
def test_common_operators_have_a_binding(overload):
    assert binding_of(overload, COMMON[overload]) is not None


@pytest.mark.parametrize("overload", [aten.add.Scalar, aten.max.dim, aten.cat.default, aten.reshape.default], ids=str)
def test_others_have_none(overload):
    """An overload that a binding does not choose, one with results by name, one without a binding by position, a composite."""
    assert all(binding_of(overload, count) is None for count in range(1, len(overload._schema.arguments) + 1))


class Seen(TorchDispatchMode):
    """Notes the first operator, which does not run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, [(id(arg) if isinstance(arg, torch.Tensor) else arg) for arg in args], kwargs or {}))
        raise StopIteration


TENSOR = torch.ones(2, 3)
#: Other values than those by which a binding is chosen.
OTHERS = {
    "Tensor": (TENSOR, torch.ones((), dtype=torch.int64)),
    "int": (0, -1),
    "float": (0.5, 3),
    "number": (-2, 0.25, False),
    "bool": (False,),
    "str": ("mean",),
    "List[int]": ([2, -1], [0, 1, 2]),
    "List[bool]": ([False, True],),
    "List[float]": ([0.5],),
    "ScalarType": (torch.float64, torch.int8),
}


def _calls_of(overload, count):
    values = []
    for argument in overload._schema.arguments[:count]:
        kind = str(argument.real_type)
        inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        values.append((*OTHERS[inner], *([None] if inner != kind else [])))
    return itertools.islice(itertools.product(*values), 64)


def _seen_of(call, args):
    with pytest.raises((StopIteration, TypeError, RuntimeError, ValueError, IndexError)), Seen() as seen:  # noqa: PT012
        call(*args)
        raise ValueError
    return seen.calls


def test_a_binding_leads_to_its_overload_with_the_same_arguments():
    bound = 0
    for packet in [getattr(aten, name) for name in dir(aten)]:
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in [getattr(packet, name) for name in packet.overloads()]:
            facts = facts_of(overload)
            for count, places in enumerate(facts.tensors):
                if not (facts.is_fast and places and (binding := binding_of(overload, count))):
                    continue
                bound += 1
                for args in _calls_of(overload, count):
                    expected = _seen_of(overload._op, args)
                    if expected and expected[0][0] is overload:
                        assert _seen_of(binding, args) == expected, (overload, args)
    assert bound > 400


class Asked(TorchFunctionMode):
    """Notes the functions called, without getters and questions."""

    names: ClassVar[list[str]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (torch.Tensor, tuple)) and func.__name__ not in ("detach", "stride", "__get__"):
            Asked.names.append(func.__name__)
        return out


def _in_a_mode(region, x, layer):
    """Operators of a node that is called come from no function, and the mode is there."""
    Asked.names = []
    with Asked(), region():
        y = layer(x).sin() * x
        y.grad_fn(torch.ones(2, 3))
    return [y, *torch.autograd.grad(y.sum(), x)], Asked.names


def test_function_modes_see_the_functions_of_the_program():
    x, layer = torch.ones(2, 3, requires_grad=True), nn.Linear(3, 3)
    expected, names = _in_a_mode(plain, x, layer)
    assert "sin" in names
    for _ in range(2):
        found, asked = _in_a_mode(checkpoint_region, x, layer)
        assert [name for name in asked if "." not in name] == names  # others are overloads
        assert all(map(torch.equal, found, expected))


class Named(torch.Tensor):
    """Notes the operators that it handles."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Named.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_sees_the_functions_of_the_program():
    """By the calls of the program; not by a replay, which reads the tensor itself."""
    found = []
    w = torch.full((3, 3), 0.5, requires_grad=True)
    scale = torch.full((2, 3), 2.0).as_subclass(Named)
    for region in (plain, checkpoint_region, checkpoint_region):
        with set_self_check(False), region():
            y = ((torch.ones(2, 3) @ w).sin() * scale).cos()
        assert {"mul", "cos"} <= {*Named.names}
        Named.names = []
        found.append(torch.autograd.grad(y.sum().as_subclass(torch.Tensor), w)[0])
        assert {"mul", "sin", "cos"}.isdisjoint(Named.names)
        Named.names = []
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_is_in_force_is_not_asked_when_a_binding_is_looked_for():
    facts = facts_of(aten.acosh.default)
    facts.calls[1] = None
    Asked.names = []
    with Asked(), Seen() as seen:
        facts.find_call(1)
    assert facts.calls[1] is torch.acosh
    assert Asked.names == seen.calls == []


def test_without_a_further_thread_the_overload_is_called(monkeypatch):
    def cannot_start(self):
        raise RuntimeError("can't start new thread")

    facts = facts_of(aten.acosh.default)
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    assert facts.find_call(1) is facts.call
