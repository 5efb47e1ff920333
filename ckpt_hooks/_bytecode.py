"""What a frame of Python has left to do, read from its bytecode.

Nothing, in the sense that nobody could tell whether it has been done, is: loads and stores of local variables, arithmetic on
small tensors and numbers, a few functions of torch, branches, a loop over a range that is left, a return. Whatever else there
is, known or not, is something, and so is what an exception handler or a ``finally`` is around, or what is called in a way that
does not show which code it runs: ``map`` and ``functools.lru_cache`` do something about what that returns.

Objects are looked at when code is read. Types of local variables, and what is called, are taken to be of the same kind when the
code gets to the same place again.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module, functional

from ._instructions import (
    ATTRIBUTES,
    BRANCHES,
    CALLS,
    JUMPS,
    RETURNS,
    VARIABLES,
    Instructions,
    is_arithmetic,
    is_harmless,
)
from ._refit import PLAIN
from ._torch import CALL_OF_FORWARD, CALL_OF_MODULES

__all__ = ["MOST_ELEMENTS", "OPERATORS", "SIMPLE", "Reader", "is_run_by", "is_small"]

#: How many elements a small tensor has at most.
MOST_ELEMENTS = 1 << 12

#: How much code is read: bytes of a function, and instructions of what it has left to do.
_LONGEST = 1 << 12
_MOST_INSTRUCTIONS = 64

#: Operators that write to nothing, by their names as functions and as methods.
OPERATORS = frozenset(
    [
        "add",
        "addmm",
        "avg_pool2d",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "cos",
        "div",
        "exp",
        "gelu",
        "group_norm",
        "layer_norm",
        "leaky_relu",
        "linear",
        "log",
        "log_softmax",
        "matmul",
        "max_pool2d",
        "mean",
        "mm",
        "mul",
        "pow",
        "relu",
        "rms_norm",
        "rsqrt",
        "scaled_dot_product_attention",
        "sigmoid",
        "silu",
        "sin",
        "softmax",
        "sqrt",
        "square",
        "sub",
        "sum",
        "tanh",
    ]
)

#: Methods without arguments that save a tensor if theirs requires grad.
_SAVING = frozenset({"cos", "exp", "log", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh"})

#: Functions that may be called on the way out, and with how many arguments at most, by position: further ones may tell them
#: to work in place.
_FUNCTIONS = {functional.dropout: 3, torch.add: 2, torch.sub: 2, torch.mul: 2, torch.div: 2}

_LIBRARIES = (torch, functional, torch.nn)
_OPERATORS = [getattr(library, name) for library in (torch, functional) for name in OPERATORS if hasattr(library, name)]
_METHODS = {name: vars(torch.Tensor).get(name) for name in OPERATORS}

#: Types of objects that are nothing but a value.
SIMPLE = frozenset({bool, float, int, str, type(None)})

#: Types of local variables on which arithmetic and branches call no code of others.
_KNOWN_TYPES = PLAIN | SIMPLE | {torch.Size, torch.device, torch.dtype}

_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOKS_AT_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec"})

#: Where a tensor comes from that nobody has seen the size of before.
_ELSEWHERE = ATTRIBUTES | {"LOAD_DEREF", "LOAD_GLOBAL"}

_UNKNOWN: Any = object()


def is_small(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is small, and of no class of others, which would be told of what is done with it."""
    return type(tensor) in PLAIN and tensor.numel() <= MOST_ELEMENTS


def is_run_by(code: CodeType, called: Any) -> bool:
    """Returns whether to call an object is to run a code, and nothing else around it."""
    if issubclass(type(called), Module):
        return code is CALL_OF_MODULES and type(called).__call__ is Module.__call__
    if type(called) is MethodType:
        called = called.__func__
    return type(called) is FunctionType and code is called.__code__


class Reader:
    """Reads what is left to do in a frame.

    Attributes:
        own: Names among the globals of the frame that have to stay bound for that to hold, and what to; None if to nothing.
        others: The same in other namespaces, all of torch and Python.
    """

    def __init__(self, frame: FrameType, called: CodeType | None) -> None:
        """Prepares to read the code of a frame, from the instruction that it is at.

        Args:
            frame: The frame.
            called: The code that it has called; None if an operator.
        """
        self._frame = frame
        self._called = called
        self.own: list[tuple[str, Any]] = []
        self.others: list[tuple[Any, str, Any]] = []

    def is_done(self) -> bool:
        """Returns whether nothing is left to do, as long as names are bound as they are now."""
        code = self._frame.f_code
        if code.co_flags & _RESUMED or len(code.co_code) > _LONGEST or type(self._frame.f_globals) is not dict:
            return False
        if not _LOOKS_AT_VARIABLES.isdisjoint(code.co_names):  # which to look at them here would change
            return False
        self._instructions, self._variables = Instructions(code), self._frame.f_locals
        now = self._instructions.at(self._frame.f_lasti)
        is_harmless = self._runs_operator(now) if self._called is None else self._calls(now, self._called)
        if self._instructions.is_guarded(now) or not is_harmless:
            return False
        if self._instructions[now + 1].opname in RETURNS:
            return True
        return self._has_known_variables() and self._all_ways_from(now + 1)

    def _has_known_variables(self) -> bool:
        """Whether variables are of types that call no code of others, and tensors small, with no others to come there."""
        variables = self._variables
        if not all(type(one) in _KNOWN_TYPES or issubclass(type(one), Module) for one in variables.values()):
            return False
        tensors = {name for name, one in variables.items() if type(one) in PLAIN}
        if not all(is_small(variables[name]) for name in tensors) or not tensors.isdisjoint(self._frame.f_code.co_freevars):
            return False
        return tensors.isdisjoint(self._instructions.stored_from(_ELSEWHERE))

    def _all_ways_from(self, start: int) -> bool:
        """Whether all ways from an instruction lead to a return, over nothing that could be noticed.

        Or to an operator that surely saves a tensor: the rerun is stopped there. A loop is not gone through twice.
        """
        # Where to go on, which local variables are tensors with a graph then, whether one is on top of the stack, and whether
        # the way has gone back already.
        ways: list[tuple[int, frozenset[str], bool, bool]] = [(start, frozenset(), self._called is None, False)]
        seen = set(ways)
        while ways:
            index, tensors, has_tensor, has_turned = ways.pop()
            if self._instructions.is_guarded(index) or len(seen) > _MOST_INSTRUCTIONS:
                return False
            instruction = self._instructions[index]
            name, following, makes_tensor = instruction.opname, [index + 1], False
            if name in RETURNS or self._is_stopped(index, tensors):
                continue
            if name == "STORE_FAST":
                tensors = tensors | {instruction.argval} if has_tensor else tensors - {instruction.argval}
            elif name in CALLS:
                if not self._is_harmless_call(index):
                    return False
            elif name == "LOAD_GLOBAL":
                following = [self._after_known_name(index)]
                if following[0] == index:
                    return False
            elif name in JUMPS:
                following, makes_tensor = [self._instructions.target_of(index)], has_tensor
                if following[0] <= index:
                    if has_turned:
                        return False
                    has_turned = True
            elif BRANCHES.fullmatch(name) or (name == "FOR_ITER" and self._is_over_range(index)):
                following.append(self._instructions.target_of(index))
                if following[1] <= index:
                    return False
            elif not (is_harmless(instruction) or is_arithmetic(instruction)) or self._asks_more_than_it_seems(index):
                return False
            for way in ((index, tensors, makes_tensor, has_turned) for index in following):
                if way not in seen:
                    seen.add(way)
                    ways.append(way)
        return True

    def _asks_more_than_it_seems(self, index: int) -> bool:
        """Whether a variable is a module, which may be asked for anything, or a tensor that a branch is to wait for."""
        variable, following = self._instructions[index], self._instructions.some(index + 1, 1)
        found = self._variables.get(variable.argval) if variable.opname in VARIABLES else None
        is_asked = following and (following[0].opname in ("TO_BOOL", "UNARY_NOT") or BRANCHES.fullmatch(following[0].opname))
        return issubclass(type(found), Module) or bool(type(found) in PLAIN and is_asked)

    def _runs_operator(self, now: int) -> bool:
        """Whether an instruction runs an operator that writes to nothing."""
        instruction = self._instructions[now]
        if instruction.opname not in CALLS:
            return self._has_known_variables() and is_arithmetic(instruction, with_products=True)
        loading = self._instructions.loading(now)
        if loading and loading[0].opname == "LOAD_GLOBAL":
            return self._resolve(loading, _OPERATORS) is not None
        return self._is_method(loading) and type(self._variables.get(loading[0].argval)) in PLAIN

    def _is_method(self, loading: list[dis.Instruction]) -> bool:
        """Whether instructions load a method of a variable that has the name of an operator, which torch's tensors have."""
        if len(loading) != 2 or loading[0].opname not in VARIABLES or loading[1].opname not in ATTRIBUTES:
            return False
        name = loading[1].argval
        if name not in OPERATORS or vars(torch.Tensor).get(name) is not _METHODS[name]:
            return False
        self.others.append((vars(torch.Tensor), name, _METHODS[name]))
        return True

    def _calls(self, now: int, code: CodeType) -> bool:
        """Whether an instruction runs a code, and does nothing about what that returns."""
        frame, name = self._frame, self._instructions[now].opname
        if frame.f_code is CALL_OF_MODULES:
            return code is CALL_OF_FORWARD
        if frame.f_code is CALL_OF_FORWARD:
            module = self._variables["self"]
            return "forward" not in vars(module) and is_run_by(code, inspect.getattr_static(module, "forward", None))
        loading = self._instructions.loading(now) if name in CALLS else []
        if not loading:
            return False
        first, *attributes = loading
        if first.opname == "LOAD_GLOBAL":
            found = frame.f_globals.get(first.argval)
        elif first.opname in VARIABLES or first.opname == "LOAD_DEREF":
            found = self._variables.get(first.argval)
        else:
            return False
        for attribute in attributes:
            if attribute.opname not in ATTRIBUTES:
                return False
            found = _attribute_of(found, attribute.argval)
        return is_run_by(code, found)

    def _is_stopped(self, index: int, tensors: frozenset[str]) -> bool:
        """Whether a method is looked up to call an operator that saves a tensor, as in ``x = x.sin()``."""
        variable, *following = self._instructions.some(index, 4)
        if (
            variable.opname not in VARIABLES
            or variable.argval not in tensors
            or not self._is_method([variable, *following[:1]])
        ):
            return False
        method, call, *_ = (one for one in following if one.opname != "PRECALL")
        is_call = call.opname in CALLS and not call.arg and not any(one.is_jump_target for one in (method, call))
        return method.argval in _SAVING and is_call

    def _is_harmless_call(self, index: int) -> bool:
        called = self._resolve(self._instructions.loading(index), _FUNCTIONS)
        return (self._instructions[index].arg or 0) <= _FUNCTIONS.get(called, -1)

    def _after_known_name(self, index: int) -> int:
        """Returns where the loading of a function that may be called ends; where it begins if it is another one."""
        end = index + 1
        while self._instructions[end].opname in ATTRIBUTES and not self._instructions[end].is_jump_target:
            end += 1
        loading = self._instructions.some(index, end - index)
        return index if self._resolve(loading, _FUNCTIONS) is None else end

    def _is_over_range(self, index: int) -> bool:
        """Whether a loop is one over a range, which to go on with calls no code."""
        is_iterated = index > 1 and self._instructions[index - 1].opname == "GET_ITER"
        if not is_iterated or self._instructions[index - 1].is_jump_target:
            return False
        return self._resolve(self._instructions.loading(index - 2), [range]) is range

    def _resolve(self, loading: list[dis.Instruction], wanted: Iterable[Any]) -> Any:
        """Returns which of some functions a global name, or names in torch's modules, load, and notes how they are bound.

        None if they load something else.
        """
        if not loading or loading[0].opname != "LOAD_GLOBAL":
            return None
        name = loading[0].argval
        found = self._frame.f_globals.get(name)
        own, others = [(name, found)], list[tuple[Any, str, Any]]()
        if found is None:
            found = vars(builtins).get(name)
            others.append((vars(builtins), name, found))
        for instruction in loading[1:]:
            if instruction.opname not in ATTRIBUTES or not any(found is library for library in _LIBRARIES):
                return None
            others.append((vars(found), instruction.argval, vars(found).get(instruction.argval)))
            found = others[-1][2]
        if not any(found is one for one in wanted):
            return None
        self.own += own
        self.others += others
        return found


def _attribute_of(owner: Any, name: str) -> Any:
    """Returns an attribute of a module, of either kind, without running code; something unknown otherwise."""
    if type(owner) is ModuleType:
        return vars(owner).get(name, _UNKNOWN)
    if not issubclass(type(owner), Module) or name in vars(owner):
        return _UNKNOWN
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    return owner._modules.get(name, _UNKNOWN) if found is _UNKNOWN else found
