"""The instructions of a code, with what there is to know of them in each version of Python."""

from __future__ import annotations

import dis
import itertools
import re
from collections.abc import Collection
from types import CodeType

__all__ = [
    "ATTRIBUTES",
    "BRANCHES",
    "CALLS",
    "JUMPS",
    "RETURNS",
    "VARIABLES",
    "Instructions",
    "is_arithmetic",
    "is_harmless",
]

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

CALLS = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD"})
ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
RETURNS = frozenset({"RETURN_CONST", "RETURN_VALUE"})
BRANCHES = re.compile("POP_JUMP_(FORWARD_)?IF_(TRUE|FALSE|NONE|NOT_NONE)")
JUMPS = frozenset({"JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_FORWARD"})
_ALL_JUMPS = frozenset({*dis.hasjabs, *dis.hasjrel})

#: Instructions of Python 3.13 and later that are two in one.
_PAIRS = {
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}


class Instructions:
    """The instructions of a code, by their indices."""

    def __init__(self, code: CodeType) -> None:
        """Reads a code."""
        bytecode = dis.Bytecode(code)
        self._all = list(itertools.chain.from_iterable(map(_one_by_one, bytecode)))
        self._guarded = getattr(bytecode, "exception_entries", ())
        self._index_at: dict[int, int] = {one.offset: index for index, one in reversed([*enumerate(self._all)])}

    def __getitem__(self, index: int) -> dis.Instruction:
        return self._all[index]

    def some(self, index: int, count: int) -> list[dis.Instruction]:
        """Returns so many instructions from an index on, or as many as there are."""
        return self._all[index : index + count]

    def at(self, offset: int) -> int:
        """Returns the index of the instruction that an offset is in."""
        return max(index for index, one in enumerate(self._all) if one.offset <= offset)

    def stored_from(self, names: Collection[str]) -> set[str]:
        """Returns the local variables that are bound to what an instruction of some names has just loaded."""
        pairs = itertools.pairwise(self._all)
        return {one.argval for before, one in pairs if one.opname == "STORE_FAST" and before.opname in names}

    def target_of(self, index: int) -> int:
        """Returns the index of the instruction that one jumps to."""
        offset: int = self._all[index].argval
        return self._index_at[offset]

    def is_guarded(self, index: int) -> bool:
        """Whether there is an exception handler or a ``finally`` around an instruction; before Python 3.11, others tell."""
        offset = self._all[index].offset
        return any(entry.start <= offset < entry.end for entry in self._guarded)

    def loading(self, call: int) -> list[dis.Instruction]:
        """Returns the instructions that put on the stack what a call calls; none where there are branches in between."""
        if self._all[call].opname not in CALLS:
            return []
        depth = 1  # after the call, above what was there when its expression began
        found: list[tuple[int, dis.Instruction]] = []
        for instruction in reversed(self._all[: call + 1]):
            if instruction.opcode in _ALL_JUMPS:
                return []
            found.append((depth, instruction))
            depth -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            if depth == 0:
                break
        if any(one.is_jump_target for _, one in found[:-1]):
            return []
        # A method with its object or a function with NULL; before Python 3.11, a function alone.
        callee = 1 if self._all[call].opname == "CALL_FUNCTION" else 2
        loads = [(after, one) for after, one in found[1:] if one.opname != "PRECALL"]
        end = next((number for number, (after, _) in enumerate(loads) if after == callee), len(loads))
        return [instruction for _, instruction in reversed(loads[end:]) if instruction.opname != "PUSH_NULL"]


def _one_by_one(instruction: dis.Instruction) -> list[dis.Instruction]:
    if instruction.opname not in _PAIRS:
        return [instruction]
    first, second = (
        instruction._replace(opname=name, opcode=dis.opmap[name], arg=0, argval=value)
        for name, value in zip(_PAIRS[instruction.opname], instruction.argval, strict=True)
    )
    return [first, second._replace(label=None)]  # type: ignore[call-arg, unused-ignore]


def is_harmless(instruction: dis.Instruction) -> bool:
    """Whether an instruction can do nothing that anybody would notice, whatever it does it with."""
    return instruction.opname in _HARMLESS


def is_arithmetic(instruction: dis.Instruction, *, with_products: bool = False) -> bool:
    """Whether an instruction computes something of two values, and leaves them as they are.

    Args:
        instruction: The instruction.
        with_products: Whether products of matrices count.
    """
    if with_products and (instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"):
        return True
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr in _ARITHMETIC
    return instruction.opname in _ARITHMETIC_BEFORE
