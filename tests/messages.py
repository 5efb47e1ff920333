"""The messages of the package as its code has them: patterns of what is given to an error or a warning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ckpt_hooks

#: Makers of errors besides the classes: their first argument is a message, or a part of one.
_MAKERS = {"_error", "warn", "Lost"}


def _pattern(node: ast.expr) -> str | None:
    """Returns a regular expression for the text that an expression makes; None where little of it is written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value).replace(r"\{region\}", ".*?")
    if isinstance(node, ast.JoinedStr):
        parts = [_pattern(part) if isinstance(part, ast.Constant) else ".*?" for part in node.values]
        return "".join(part or "" for part in parts)
    return None


def _calls(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called.endswith("Error") or called in _MAKERS:
                for argument in node.args[:2]:
                    yield node.lineno, argument


def patterns() -> dict[str, str]:
    """Returns where each message is in the code, by its pattern."""
    root = Path(ckpt_hooks.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        for line, argument in _calls(ast.parse(path.read_text())):
            pattern = _pattern(argument)
            if pattern is not None and len(re.sub(r"\\.|\.\*\?", " ", pattern)) >= 20:
                found[pattern] = f"{path.relative_to(root)}:{line}"
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
