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
import itertools
import re
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module, functional

from ._refit import PLAIN

__all__ = ["CALLS_OF_MODULES", "MOST_ELEMENTS", "OPERATORS", "Reader", "is_run_by", "is_small"]

#: How many elements a small tensor has at most.
MOST_ELEMENTS = 1 << 13

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
_FUNCTIONS = ((functional.dropout, 3), (torch.add, 2), (torch.sub, 2), (torch.mul, 2), (torch.div, 2))

_LIBRARIES = (torch, functional, torch.nn)
_OPERATORS = [getattr(library, name) for library in (torch, functional) for name in OPERATORS if hasattr(library, name)]
_METHODS = {name: vars(torch.Tensor).get(name) for name in OPERATORS}

_ARITHMETIC = frozenset({"+", "-", "*", "/", "%", "**"})

#: The same before Python 3.11.
_ARITHMETIC_BEFORE = frozenset(
    {
        "BINARY_ADD",
        "BINARY_MODULO",
        "BINARY_MULTIPLY",
        "BINARY_POWER",
        "BINARY_SUBTRACT",
        "BINARY_TRUE_DIVIDE",
    }
)

#: What else may be left to do, by the names that versions of Python have for it. Whatever has another name is unknown.
_HARMLESS = frozenset(
    {
        "BUILD_LIST",
        "BUILD_TUPLE",
        "CACHE",
        "COPY",
        "DUP_TOP",
        "END_FOR",
        "EXTENDED_ARG",
        "IS_OP",
        "LOAD_CONST",
        "LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK",
        "LOAD_SMALL_INT",
        "NOP",
        "NOT_TAKEN",
        "POP_ITER",
        "POP_TOP",
        "PRECALL",
        "PUSH_NULL",
        "ROT_THREE",
        "ROT_TWO",
        "SWAP",
        "TO_BOOL",
        "UNARY_NOT",
    }
)

_CALLS = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD"})
_CALLS_WITH_MORE = frozenset({"CALL_FUNCTION_EX", "CALL_FUNCTION_KW", "CALL_KW"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_RETURNS = frozenset({"RETURN_CONST", "RETURN_VALUE"})
_BRANCHES = re.compile("POP_JUMP_(FORWARD_)?IF_(TRUE|FALSE|NONE|NOT_NONE)")
_JUMPS = frozenset({"JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_FORWARD"})
_ALL_JUMPS = frozenset({*dis.hasjabs, *dis.hasjrel})
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

#: Types of local variables on which arithmetic and branches call no code of others.
_KNOWN_TYPES = PLAIN | {bool, float, int, str, torch.Size, torch.device, torch.dtype, type(None)}

_CALL_OF_MODULES: CodeType = Module._wrapped_call_impl.__code__
_CALL_OF_FORWARD: CodeType = Module._call_impl.__code__

#: What runs to call a module, before and after the code of its forward.
CALLS_OF_MODULES = (_CALL_OF_MODULES, _CALL_OF_FORWARD)

#: Instructions of Python 3.13 and later that are two in one.
_PAIRS = {
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}

_UNKNOWN: Any = object()


def is_small(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is small, and of no class of others, which would be told of what is done with it."""
    return type(tensor) in PLAIN and tensor.numel() <= MOST_ELEMENTS


def is_run_by(code: CodeType, called: Any) -> bool:
    """Returns whether to call an object is to run a code, and nothing else around it."""
    if isinstance(called, Module):
        return code is _CALL_OF_MODULES and type(called).__call__ is Module.__call__
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
        bytecode = dis.Bytecode(code)
        self._instructions = list(itertools.chain.from_iterable(map(_one_by_one, bytecode)))
        self._guarded = getattr(bytecode, "exception_entries", ())
        now = max(index for index, one in enumerate(self._instructions) if one.offset <= self._frame.f_lasti)
        if self._is_guarded(now) or not (self._runs_operator(now) if self._called is None else self._calls(now, self._called)):
            return False
        if self._instructions[now + 1].opname in _RETURNS:
            return True
        return self._has_known_variables() and self._all_ways_from(now + 1)

    def _is_guarded(self, index: int) -> bool:
        """Whether there is an exception handler or a ``finally`` around an instruction; before Python 3.11, others tell."""
        offset = self._instructions[index].offset
        return any(entry.start <= offset < entry.end for entry in self._guarded)

    def _has_known_variables(self) -> bool:
        found = self._frame.f_locals.values()
        return all(type(one) in _KNOWN_TYPES or isinstance(one, Module) for one in found) and all(
            is_small(one) for one in found if isinstance(one, torch.Tensor)
        )

    def _all_ways_from(self, start: int) -> bool:
        """Whether all ways from an instruction lead to a return, over nothing that could be noticed.

        Or to an operator that surely saves a tensor: the rerun is stopped there. A loop is not gone through twice.
        """
        index_at = {one.offset: index for index, one in reversed([*enumerate(self._instructions)])}
        # Where to go on, which local variables are tensors with a graph then, whether one is on top of the stack, and whether
        # the way has gone back already.
        ways: list[tuple[int, frozenset[str], bool, bool]] = [(start, frozenset(), self._called is None, False)]
        seen = set(ways)
        while ways:
            index, tensors, has_tensor, has_turned = ways.pop()
            if self._is_guarded(index) or len(seen) > _MOST_INSTRUCTIONS:
                return False
            instruction = self._instructions[index]
            name, following, makes_tensor = instruction.opname, [index + 1], False
            if name in _RETURNS or self._is_stopped(index, tensors):
                continue
            if name == "STORE_FAST":
                tensors = tensors | {instruction.argval} if has_tensor else tensors - {instruction.argval}
            elif name in _CALLS:
                if not self._is_harmless_call(index):
                    return False
            elif name == "LOAD_GLOBAL":
                following = [self._after_known_name(index)]
                if following[0] == index:
                    return False
            elif name in _JUMPS:
                following, makes_tensor = [index_at[instruction.argval]], has_tensor
                if following[0] <= index:
                    if has_turned:
                        return False
                    has_turned = True
            elif _BRANCHES.fullmatch(name) or (name == "FOR_ITER" and self._is_over_range(index)):
                following.append(index_at[instruction.argval])
                if following[1] <= index:
                    return False
            elif not (name in _HARMLESS or _is_arithmetic(instruction)):
                return False
            for way in ((index, tensors, makes_tensor, has_turned) for index in following):
                if way not in seen:
                    seen.add(way)
                    ways.append(way)
        return True

    def _runs_operator(self, now: int) -> bool:
        """Whether an instruction runs an operator that writes to nothing."""
        instruction = self._instructions[now]
        if instruction.opname not in _CALLS:
            is_product = instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"
            return self._has_known_variables() and (is_product or _is_arithmetic(instruction))
        loading = self._loading(now)
        if loading and loading[0].opname == "LOAD_GLOBAL":
            return self._resolve(loading, _OPERATORS)
        return self._is_method(loading) and type(self._frame.f_locals.get(loading[0].argval)) in PLAIN

    def _is_method(self, loading: list[dis.Instruction]) -> bool:
        """Whether instructions load a method of a variable that has the name of an operator, which torch's tensors have."""
        if len(loading) != 2 or loading[0].opname not in _VARIABLES or loading[1].opname not in _ATTRIBUTES:
            return False
        name = loading[1].argval
        if name not in OPERATORS or vars(torch.Tensor).get(name) is not _METHODS[name]:
            return False
        self.others.append((vars(torch.Tensor), name, _METHODS[name]))
        return True

    def _calls(self, now: int, code: CodeType) -> bool:
        """Whether an instruction runs a code, and does nothing about what that returns."""
        frame, name = self._frame, self._instructions[now].opname
        if frame.f_code is _CALL_OF_MODULES:
            return code is _CALL_OF_FORWARD
        if frame.f_code is _CALL_OF_FORWARD:
            module = frame.f_locals["self"]
            return "forward" not in vars(module) and is_run_by(code, inspect.getattr_static(module, "forward", None))
        loading = self._loading(now) if name in _CALLS else []
        if not loading:
            return False
        first, *attributes = loading
        if first.opname == "LOAD_GLOBAL":
            found = frame.f_globals.get(first.argval)
        elif first.opname in _VARIABLES or first.opname == "LOAD_DEREF":
            found = frame.f_locals.get(first.argval)
        else:
            return False
        for attribute in attributes:
            if attribute.opname not in _ATTRIBUTES:
                return False
            found = _attribute_of(found, attribute.argval)
        return is_run_by(code, found)

    def _is_stopped(self, index: int, tensors: frozenset[str]) -> bool:
        """Whether a method is looked up to call an operator that saves a tensor, as in ``x = x.sin()``."""
        if self._instructions[index].opname not in _VARIABLES or self._instructions[index].argval not in tensors:
            return False
        following = self._instructions[index + 1 : index + 4]
        call = next((one for one in following[1:] if one.opname != "PRECALL"), following[-1])
        is_method = self._is_method([self._instructions[index], following[0]]) and following[0].argval in _SAVING
        return is_method and call.opname in _CALLS and not call.arg and not any(one.is_jump_target for one in following[:2])

    def _is_harmless_call(self, index: int) -> bool:
        loading = self._loading(index)
        most = next((most for function, most in _FUNCTIONS if self._resolve(loading, [function])), -1)
        return (self._instructions[index].arg or 0) <= most

    def _after_known_name(self, index: int) -> int:
        """Returns where the loading of a function that may be called ends; where it begins if it is another one."""
        end = index + 1
        while self._instructions[end].opname in _ATTRIBUTES and not self._instructions[end].is_jump_target:
            end += 1
        return end if self._resolve(self._instructions[index:end], [function for function, _ in _FUNCTIONS]) else index

    def _is_over_range(self, index: int) -> bool:
        """Whether a loop is one over a range, which to go on with calls no code."""
        is_iterated = index > 1 and self._instructions[index - 1].opname == "GET_ITER"
        if not is_iterated or self._instructions[index - 1].is_jump_target:
            return False
        return self._resolve(self._loading(index - 2), [range])

    def _loading(self, call: int) -> list[dis.Instruction]:
        """Returns the instructions that put on the stack what a call calls; none where there are branches in between."""
        if self._instructions[call].opname not in _CALLS:
            return []
        depth = 1  # after the call, above what was there when its expression began
        found: list[tuple[int, dis.Instruction]] = []
        for instruction in reversed(self._instructions[: call + 1]):
            if instruction.opcode in _ALL_JUMPS:
                return []
            found.append((depth, instruction))
            depth -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            if depth == 0:
                break
        if any(one.is_jump_target for _, one in found[:-1]):
            return []
        # A method with its object or a function with NULL; before Python 3.11, a function alone.
        callee = 1 if self._instructions[call].opname == "CALL_FUNCTION" else 2
        loads = [(after, one) for after, one in found[1:] if one.opname != "PRECALL"]
        end = next((number for number, (after, _) in enumerate(loads) if after == callee), len(loads))
        return [instruction for _, instruction in reversed(loads[end:]) if instruction.opname != "PUSH_NULL"]

    def _resolve(self, loading: list[dis.Instruction], wanted: list[Any]) -> bool:
        """Returns whether a global name, or names in torch's modules, load one of some functions; notes how they are bound."""
        if not loading or loading[0].opname != "LOAD_GLOBAL":
            return False
        names = [instruction.argval for instruction in loading]
        found = self._frame.f_globals.get(names[0])
        own = [(names[0], found)]
        others: list[tuple[Any, str, Any]] = []
        if found is None:
            others.append((vars(builtins), names[0], vars(builtins).get(names[0])))
            found = others[0][2]
        for instruction in loading[1:]:
            if instruction.opname not in _ATTRIBUTES or not any(found is library for library in _LIBRARIES):
                return False
            others.append((vars(found), instruction.argval, vars(found).get(instruction.argval)))
            found = others[-1][2]
        if not any(found is one for one in wanted):
            return False
        self.own += own
        self.others += others
        return True


def _one_by_one(instruction: dis.Instruction) -> list[dis.Instruction]:
    if instruction.opname not in _PAIRS:
        return [instruction]
    first, second = (
        instruction._replace(opname=name, opcode=dis.opmap[name], arg=0, argval=value)
        for name, value in zip(_PAIRS[instruction.opname], instruction.argval, strict=True)
    )
    return [first, second._replace(label=None)]  # type: ignore[call-arg, unused-ignore]


def _attribute_of(owner: Any, name: str) -> Any:
    """Returns an attribute of a module, of either kind, without running code; something unknown otherwise."""
    if type(owner) is ModuleType:
        return vars(owner).get(name, _UNKNOWN)
    if not isinstance(owner, Module) or name in vars(owner):
        return _UNKNOWN
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    return owner._modules.get(name, _UNKNOWN) if found is _UNKNOWN else found


def _is_arithmetic(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr in _ARITHMETIC
    return instruction.opname in _ARITHMETIC_BEFORE
