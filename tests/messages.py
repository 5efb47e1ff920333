"""The messages of the package as its code has them: what is given to an error or a warning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ckpt_hooks

#: Makers of errors besides the classes: their first argument is a message, or a part of one.
_MAKERS = {"_error", "warn", "Lost"}


def _parts(node: ast.expr) -> tuple[str, ...]:
    """Returns what is written out of the text that an expression makes, in order."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return tuple(node.value.split("{region}"))
    if isinstance(node, ast.JoinedStr):
        return tuple(part for value in node.values if isinstance(value, ast.Constant) for part in _parts(value))
    return ()


def occurs(parts: tuple[str, ...], text: str) -> bool:
    """Whether all parts of a message are in a text, in order."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _calls(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called.endswith("Error") or called in _MAKERS:
                for argument in node.args[:2]:
                    yield node.lineno, argument


def messages() -> dict[tuple[str, ...], str]:
    """Returns where each message is in the code, by what is written out of it."""
    root = Path(ckpt_hooks.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        for line, argument in _calls(ast.parse(path.read_text())):
            parts = _parts(argument)
            if len("".join(parts)) >= 20:
                found[parts] = f"{path.relative_to(root)}:{line}"
    return found


def texts() -> dict[str, str]:
    """Returns every text of several words in the code that is no docstring, and where it is."""
    root = Path(ckpt_hooks.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3
            if is_text and id(node) not in docstrings:
                found[node.value] = f"{path.relative_to(root)}:{node.lineno}"
    return found
