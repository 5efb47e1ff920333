"""What a frame of Python has left to do, read from its bytecode.

Nothing, in the sense that nobody could tell whether it has been done, is: loads and stores of local variables, arithmetic, a
few functions of torch, branches on variables, a return. Whatever else there is, known or not, is something.

Two things are taken for granted: that ``+``, ``-``, ``*``, ``/``, ``%``, ``@`` and ``**`` do arithmetic, and that what is
called by way of a local variable or an attribute calls Python code once, and does nothing about what that returns: is no
``map`` over it, say.
"""

from __future__ import annotations

import builtins
import dis
import re
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional

__all__ = ["OPERATORS", "Reader"]

#: Operators that write to nothing, by their names as functions and as methods.
OPERATORS = frozenset(
    {
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
        "embedding",
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
    }
)

#: Methods without arguments that save a tensor if theirs requires grad.
_SAVING = frozenset({"cos", "exp", "log", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh"})

#: Functions that may be called on the way out, and with how many arguments at most, by position: further ones may tell them
#: to work in place.
_FUNCTIONS = ((functional.dropout, 3), (torch.add, 2), (torch.sub, 2), (torch.mul, 2), (torch.div, 2))

_ARITHMETIC = frozenset({"+", "-", "*", "/", "%", "@", "**"})

#: The same before Python 3.11.
_ARITHMETIC_BEFORE = frozenset(
    {
        "BINARY_ADD",
        "BINARY_MATRIX_MULTIPLY",
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
        "COMPARE_OP",
        "COPY",
        "DUP_TOP",
        "END_FOR",
        "EXTENDED_ARG",
        "IS_OP",
        "LOAD_CONST",
        "LOAD_DEREF",
        "LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_LOAD_FAST",
        "LOAD_GLOBAL",
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
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_STORES = frozenset({"STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"})
_RETURNS = frozenset({"RETURN_CONST", "RETURN_VALUE"})
_BRANCHES = re.compile("POP_JUMP_(FORWARD_|BACKWARD_)?IF_(TRUE|FALSE|NONE|NOT_NONE)")
_JUMPS = frozenset({"JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_FORWARD"})
_ALL_JUMPS = frozenset({*dis.hasjabs, *dis.hasjrel})

_UNKNOWN: Any = object()


class Reader:
    """Reads what is left to do in a frame.

    Attributes:
        own: Names among the globals of the frame that were looked up for that, and what they are bound to; None if to nothing.
        others: Names in modules of Python that were, and what they are bound to.
    """

    def __init__(self, frame: FrameType) -> None:
        """Prepares to read the code of a frame, from the instruction that it is at."""
        self._frame = frame
        self._instructions = list(dis.get_instructions(frame.f_code))
        self.own: list[tuple[str, Any]] = []
        self.others: list[tuple[dict[str, Any], str, Any]] = []

    def is_done(self, *, is_innermost: bool) -> bool:
        """Returns whether nothing is left to do as long as names are bound as they are now.

        Args:
            is_innermost: Whether the frame has called an operator, and not another frame.
        """
        now = max(index for index, one in enumerate(self._instructions) if one.offset <= self._frame.f_lasti)
        is_harmless = self._runs_operator(now) if is_innermost else self._calls_once(now)
        return is_harmless and self._all_ways_from(now + 1, has_tensor=is_innermost)

    def _all_ways_from(self, start: int, *, has_tensor: bool) -> bool:
        """Whether all ways from an instruction lead to a return, over nothing that could be noticed.

        Or to an operator that surely saves a tensor: the rerun is stopped there. A loop is not gone through twice.

        Args:
            start: The index of the instruction.
            has_tensor: Whether a tensor is what the instruction finds on top of the stack.
        """
        index_at = {instruction.offset: index for index, instruction in enumerate(self._instructions)}
        # Where to go on, which local variables are tensors for sure then, whether the top of the stack is one, and whether the
        # way has gone back already.
        ways: list[tuple[int, frozenset[str], bool, bool]] = [(start, frozenset(), has_tensor, False)]
        seen = set(ways)
        while ways:
            index, tensors, has_tensor, has_turned = ways.pop()
            instruction = self._instructions[index]
            name, following, makes_tensor = instruction.opname, [index + 1], False
            if name in _RETURNS or self._is_stopped(index, tensors):
                continue
            if name in _STORES:
                stored = {instruction.argval} if isinstance(instruction.argval, str) else set(instruction.argval)
                tensors = tensors | stored if has_tensor and name == "STORE_FAST" else tensors - stored
            elif name in _CALLS or name in _ATTRIBUTES:
                if not (self._is_harmless_call(index) if name in _CALLS else self._is_of_module(index)):
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
        if self._instructions[now].opname not in _CALLS:
            return _is_arithmetic(self._instructions[now])
        loading = self._loading(now)
        called = self._resolve(loading)
        if called is _UNKNOWN:
            return len(loading) > 1 and loading[-1].opname in _ATTRIBUTES and loading[-1].argval in OPERATORS
        return any(called is getattr(library, name, None) for library in (torch, functional) for name in OPERATORS)

    def _calls_once(self, now: int) -> bool:
        """Whether an instruction calls a function or a module, as far as one can tell."""
        if self._instructions[now].opname not in _CALLS:
            return self._instructions[now].opname in _CALLS_WITH_MORE
        called = self._resolve(self._loading(now))
        return called is _UNKNOWN or isinstance(called, FunctionType | MethodType | torch.nn.Module)

    def _is_stopped(self, index: int, tensors: frozenset[str]) -> bool:
        """Whether to look up a method of a variable is to call an operator that saves a tensor, as it is in ``x = x.sin()``."""
        if index == 0 or self._instructions[index].opname not in _ATTRIBUTES:
            return False
        variable, method, call = self._instructions[index - 1], self._instructions[index], self._instructions[index + 1]
        if call.opname == "PRECALL":
            call = self._instructions[index + 2]
        is_method_of_tensor = variable.opname in _LOADS and variable.argval in tensors
        return is_method_of_tensor and method.argval in _SAVING and call.opname in _CALLS and not call.arg

    def _is_harmless_call(self, index: int) -> bool:
        called = self._resolve(self._loading(index))
        most = next((most for function, most in _FUNCTIONS if function is called), -1)
        return (self._instructions[index].arg or 0) <= most

    def _is_of_module(self, index: int) -> bool:
        """Whether an attribute is one of a module of Python, to ask for which calls no code."""
        start = index
        while start and self._instructions[start].opname in _ATTRIBUTES:
            start -= 1
        return self._resolve(self._instructions[start : index + 1]) is not _UNKNOWN

    def _is_over_range(self, index: int) -> bool:
        """Whether a loop is one over a range, which to go on with calls no code."""
        if index < 2 or self._instructions[index - 1].opname != "GET_ITER":
            return False
        return self._resolve(self._loading(index - 2)) is range

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
        # A method with its object or a function with NULL; before Python 3.11, a function alone.
        callee = 1 if self._instructions[call].opname == "CALL_FUNCTION" else 2
        loads = [(after, one) for after, one in found[1:] if one.opname != "PRECALL"]
        end = next((number for number, (after, _) in enumerate(loads) if after == callee), len(loads))
        return [instruction for _, instruction in reversed(loads[end:]) if instruction.opname != "PUSH_NULL"]

    def _resolve(self, loading: list[dis.Instruction]) -> Any:
        """Returns what instructions load by a global name, or by names in modules of Python, and notes how these are bound."""
        if [instruction.opname for instruction in loading[:1]] != ["LOAD_GLOBAL"]:
            return _UNKNOWN
        if any(instruction.opname not in _ATTRIBUTES for instruction in loading[1:]):
            return _UNKNOWN
        first, *others = (instruction.argval for instruction in loading)
        found = self._frame.f_globals.get(first)
        own, path = [(first, found)], []
        if found is None:
            others, found = [first, *others], builtins
        for name in others:
            if not isinstance(found, ModuleType) or name not in vars(found):
                return _UNKNOWN
            path.append((vars(found), name, vars(found)[name]))
            found = vars(found)[name]
        self.own += own
        self.others += path
        return found


def _is_arithmetic(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr in _ARITHMETIC
    return instruction.opname in _ARITHMETIC_BEFORE
