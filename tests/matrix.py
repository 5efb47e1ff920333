"""Which tests notice that a mechanism is off: mutants of the package against its tests, and against random programs.

A mutant is one branch that is always or never taken, one part of a condition left out, one statement or context manager
dropped, one call that returns its first argument, one function that returns None, one operator swapped, one ``not`` left out,
or one number off by one. A sample is drawn among lines that tests run: from each room in proportion to its lines, and evenly
from the kinds::

    python -m tests.matrix --results /tmp/before              # needs coverage, in an environment of your own
    python -m tests.matrix --results /tmp/after --sample /tmp/before/sample.json   # the same mutants, whatever has moved
    python -m tests.matrix --compare /tmp/before /tmp/after

Tests are collected once. Each mutant gets a process of its own, forked from there, in which functions have the mutant's code,
and which runs the tests that run its line: the quickest case of each function, then its other cases, until enough functions
have failed or the time is up; then 150 random programs, unless enough have failed. Processes that tests start do not have the
mutant. ``results.jsonl`` has a line for each mutant; a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item

import ckpt_hooks
from tests.fuzz import aliasing, aliasing_programs
from tests.fuzz.features import parse
from tests.fuzz.implementations import IMPLEMENTATIONS
from tests.fuzz.run import fuzz, is_failure

PACKAGE = Path(ckpt_hooks.__file__).parent

#: Modules of words: what they do wrong is read, and changes no result.
WORDS = ("advice", "errors", "explaining", "misuse", "mutation", "pictures", "words")

_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
]
SWAPPED = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}

FUZZERS = [("ours", "all"), ("ours-varied", "core"), ("ours-mixed", "core"), ("ours-kept", "core"), ("aliasing", "ours-region")]
PROGRAMS = 30  # of each

_MOST_TESTS = 1000  # for a mutant


# -- Mutants -------------------------------------------------------------------------------------------------------------------


def changes_in(tree: ast.Module) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yields the name of each mutant, its line, and what makes it of the tree."""
    seen: Counter[str] = Counter()

    def named(kind: str, function: str, node: ast.AST, change: Callable[[], Any]) -> tuple[str, int, Callable[[], Any]]:
        name = f"{function}: {kind}: {ast.unparse(node).splitlines()[0][:100]}"
        seen[name] += 1
        return f"{name} #{seen[name]}", node.lineno, change

    for function, top in _functions(tree, ""):
        for owner in ast.walk(top):
            for part in ("body", "orelse", "finalbody"):
                found = getattr(owner, part, None)
                for index, statement in enumerate(found if isinstance(found, list) else []):
                    for kind, change in _changes_of(found, index, statement):
                        yield named(kind, function, statement, change)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child


def _changes_of(body: list[Any], index: int, statement: ast.AST) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(statement, ast.If):
        yield "never", lambda: setattr(statement, "test", ast.Constant(False))
        if not isinstance(statement.body[0], ast.Raise):
            yield "always", lambda: setattr(statement, "test", ast.Constant(True))
        if isinstance(statement.test, ast.BoolOp):
            yield "first part", lambda: setattr(statement, "test", statement.test.values[0])
            yield "last part", lambda: setattr(statement, "test", statement.test.values[-1])
    value = getattr(statement, "value", None)
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    is_store = isinstance(statement, (ast.Assign, ast.AugAssign)) and isinstance(targets[0], (ast.Attribute, ast.Subscript))
    if is_store or (isinstance(statement, ast.Expr) and isinstance(value, ast.Call)):
        yield "without", lambda: body.__setitem__(index, ast.Pass())
    elif isinstance(statement, (ast.Assign, ast.Return)) and isinstance(value, ast.Call) and _takes_one(value):
        yield "no call", lambda: setattr(statement, "value", value.args[0])
    if isinstance(statement, ast.Return) and value is not None and not isinstance(value, ast.Constant):
        yield "None", lambda: setattr(statement, "value", None)
    if isinstance(statement, ast.With) and all(item.optional_vars is None for item in statement.items):
        yield "without", lambda: body.__setitem__(slice(index, index + 1), statement.body)
    if not isinstance(statement, (ast.Raise, ast.Assert, ast.FunctionDef, ast.ClassDef)):
        for child in ast.iter_child_nodes(statement):
            yield from _changes_inside(child)


def _changes_inside(node: ast.AST) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the changes of an expression, but for words and types."""
    if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case, ast.JoinedStr)):
        return
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield f"swapped {ast.unparse(node)[:40]}", lambda: node.ops.__setitem__(0, SWAPPED[type(node.ops[0])]())
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPPED:
        yield f"swapped {ast.unparse(node)[:40]}", lambda: setattr(node, "op", SWAPPED[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"one more than {node.value}", lambda: setattr(node, "value", node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"without not {ast.unparse(node)[:40]}", lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes_inside(child)


def _takes_one(call: ast.Call) -> bool:
    return bool(call.args) and not isinstance(call.args[0], ast.Starred)


def mutated(path: str, name: str | None) -> types.CodeType:
    """Returns the code of a module, with a mutant in it."""
    tree = ast.parse((PACKAGE / path).read_text())
    if name is not None:
        change = next(change for other, _, change in changes_in(tree) if other == name)
        _name_variables(tree)
        change()
    return compile(ast.fix_missing_locations(tree), str(PACKAGE / path), "exec", dont_inherit=True)


def _name_variables(tree: ast.Module) -> None:
    """Has each function name its variables, since a function's new code must have as many free variables as the old code."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        found = sorted({node.id for node in ast.walk(function) if isinstance(node, ast.Name)})
        names = [ast.Name("__class__" if name == "super" else name, ast.Load()) for name in found]
        function.body.append(ast.If(ast.Constant(False), [ast.Expr(ast.List(names, ast.Load()))], []))


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    yield (code.co_name, code.co_firstlineno), code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def switch(functions: dict[types.CodeType, list[types.FunctionType]], path: str, name: str) -> None:
    """Gives all functions of a module the code of a mutant."""
    new = dict(_codes(mutated(path, name)))
    for key, code in _codes(mutated(path, None)):
        for function in functions.get(code, []):
            with contextlib.suppress(KeyError, ValueError):  # a nested function went, or a closure reads less than it did
                function.__code__ = new[key]


def draw(number: int, seed: int, lines: dict[str, dict[str, list[str]]]) -> list[str]:
    """Returns mutants of lines that tests run, no two of one function: rooms in proportion to their lines."""
    draws, sizes = random.Random(seed), Counter()
    rooms: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(PACKAGE.rglob("*.py")):
        path = str(file.relative_to(PACKAGE))
        room, text = path.partition("/")[0], file.read_text()
        sizes[room] += text.count("\n")
        if not any(word in path for word in WORDS):
            for name, line, _ in changes_in(ast.parse(text)):
                if lines.get(path, {}).get(str(line)):
                    kind = name.split(": ")[1].split()[0]
                    rooms[room][kind].append(f"{path}: {name}")
    sample: dict[str, str] = {}
    sizes = Counter({room: size for room, size in sizes.items() if rooms[room]})
    for _ in range(100 * number):
        room = rooms[draws.choices(list(sizes), list(sizes.values()))[0]]
        mutant = draws.choice(room[draws.choice(sorted(room))])
        sample.setdefault(":".join(mutant.split(":")[:2]), mutant)
        if len(sample) == number:
            break
    return list(sample.values())


# -- Tests ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "features"), FUZZERS)
def test_random_programs(name: str, features: str) -> None:
    """Collected by this script alone."""
    if name == "aliasing":
        programs = map(aliasing_programs.generate, range(PROGRAMS))
        assert all(aliasing.check(program, IMPLEMENTATIONS[features]).kind != "differs" for program in programs)
    else:
        chosen = parse(features, name) - {"inference"}
        assert not any(is_failure(found, chosen) for found in fuzz(IMPLEMENTATIONS[name], range(PROGRAMS), chosen))


def function_of(test: str) -> str:
    return test.partition("[")[0]


class Matrix:
    """Runs the tests of each mutant, in place of pytest's loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.results = options, options.results
        self.results.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in pkgutil.walk_packages([str(PACKAGE)], "ckpt_hooks."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
        functions = defaultdict(list)
        for found in gc.get_objects():
            if type(found) is types.FunctionType and found.__code__.co_filename.startswith(str(PACKAGE)):
                functions[found.__code__].append(found)
        gc.collect()
        gc.freeze()
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        lines, unstable = self.covered()
        sample, file = self.options.sample or self.results / "sample.json", self.results / "results.jsonl"
        if not sample.exists():
            sample.write_text(json.dumps(draw(self.options.mutants, self.options.seed, lines), indent=1))
        known = {json.loads(line)["mutant"] for line in file.read_text().splitlines()} if file.exists() else set()
        for mutant in (mutant for mutant in json.loads(sample.read_text()) if mutant not in known):
            path, name = mutant.split(": ", 1)
            changes = changes_in(ast.parse((PACKAGE / path).read_text())) if (PACKAGE / path).exists() else []
            line = next((line for other, line, _ in changes if other == name), None)
            start, tests = time.monotonic(), self.chosen(lines.get(path, {}).get(str(line), []), unstable)
            failed: list[str] = []
            while tests:
                ran, is_lost = self.forked(tests, failed, lambda path=path, name=name: switch(functions, path, name))
                tests = tests[ran:] if is_lost else []
            row = {"mutant": mutant, "found": line is not None, "failed": failed, "seconds": round(time.monotonic() - start, 1)}
            with file.open("a") as results:
                results.write(json.dumps(row) + "\n")
        return True

    def covered(self) -> tuple[dict[str, dict[str, list[str]]], set[str]]:
        """Returns the tests that run each line, the quickest of each function first, and the tests that fail as it is."""
        file, data, took = (self.results / name for name in ("lines.json", "coverage", "seconds.json"))
        if not took.exists():
            import coverage

            os.environ.setdefault("COVERAGE_CORE", "ctrace")
            tracer = coverage.Coverage(data_file=str(data), source=[str(PACKAGE)], messages=False)
            tracer.set_option("run:disable_warnings", ["trace-changed", "module-not-imported", "already-imported"])
            seconds, failed = dict[str, float](), list[str]()

            @contextlib.contextmanager
            def around(test: str) -> Iterator[None]:
                start = time.monotonic()
                tracer.start()
                tracer.switch_context(test)
                try:
                    yield
                finally:
                    tracer.stop()
                    seconds[test] = round(time.monotonic() - start, 3)

            def after() -> None:
                tracer.save()
                took.write_text(json.dumps(seconds))

            self.forked(list(self.items), failed, lambda: None, around, after)
            took.write_text(json.dumps([json.loads(took.read_text()), failed]))
        seconds, failed = json.loads(took.read_text())
        if not file.exists():
            file.write_text(json.dumps(self.lines_of(data, seconds)))
        tests, numbers = json.loads(file.read_text())
        return {path: {line: [tests[n] for n in found] for line, found in of.items()} for path, of in numbers.items()}, set(
            failed
        )

    def lines_of(self, data: Path, seconds: dict[str, float]) -> tuple[list[str], dict[str, dict[int, list[int]]]]:
        """Returns all tests, and of each line the numbers of its tests in the order in which they run."""
        import coverage

        tests = sorted(self.items, key=lambda test: seconds.get(test, 0))
        numbers = {test: number for number, test in enumerate(tests)}
        found, lines = coverage.CoverageData(str(data)), dict[str, dict[int, list[int]]]()
        found.read()
        for path in found.measured_files():
            of_line = lines[str(Path(path).relative_to(PACKAGE))] = {}
            for line, contexts in found.contexts_by_lineno(path).items():
                quick_first = sorted(numbers[test] for test in contexts if test in numbers)
                leading = {function_of(tests[number]): number for number in reversed(quick_first)}.values()
                of_line[line] = list(dict.fromkeys([*sorted(leading), *quick_first]))[:_MOST_TESTS]
        return tests, lines

    def chosen(self, tests: Sequence[str], unstable: set[str]) -> list[str]:
        """Returns tests that pass as it is; random programs come last."""
        found = [test for test in tests if test not in unstable and test in self.items]
        return sorted(found, key=lambda test: "test_random_programs" in test)

    def forked(
        self, tests: list[str], failed: list[str], before: Callable[[], Any], around: Any = None, after: Any = int
    ) -> tuple[int, bool]:
        """Runs tests in a process of their own; returns how many it came through, and whether it was lost on the way."""
        out, into = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                before()
                self.run(tests, failed, around, lambda word: os.write(into, f"{word}\n".encode()))
                after()
                code = 0
            os._exit(code)
        os.close(into)
        ran, is_running, buffer = 0, False, b""
        while select.select([out], [], [], None if around else self.options.idle)[0] and (text := os.read(out, 65536)):
            *words, buffer = (buffer + text).split(b"\n")
            for word in map(bytes.decode, words):
                is_running = word.isdigit()
                ran = int(word) if is_running else ran
                if word == "failed":
                    failed.append(tests[ran - 1])
        if is_running:  # it hangs, or is gone
            os.kill(child, signal.SIGKILL)
        os.close(out)
        _, code = os.waitpid(child, 0)
        assert ran or not code
        if code and tests[ran - 1] not in failed:  # or what comes after a test has failed
            failed.append(tests[ran - 1])
        return ran, bool(code)

    def run(self, tests: list[str], failed: list[str], around: Any, tell: Callable[[str], Any]) -> None:
        known, end = set(map(function_of, failed)), time.monotonic() + self.options.seconds
        for number, test in enumerate(tests, 1):
            is_late = time.monotonic() > end and "random_programs" not in test
            if not around and (is_late or len(known) >= self.options.failures or function_of(test) in known):
                continue
            tell(str(number))
            following = next((other for other in tests[number:] if function_of(other) not in known), "")
            item = self.items[test]
            filters = catch_warnings_for_item(item.config, item.ihook, "runtest", item)  # of its marks
            with around(test) if around else contextlib.nullcontext(), filters:
                reports = runtestprotocol(item, log=False, nextitem=self.items.get(following))
            if any(report.failed for report in reports):
                known.add(function_of(test))
                self.session._setupstate.teardown_exact(None)
            tell("failed" if function_of(test) in known else "passed")


def compare(before: Path, after: Path) -> None:
    """Prints how many mutants are killed, and those that are so no longer."""
    runs = [[json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()] for run in (before, after)]
    for run in runs:
        killed = [row["failed"] for row in run if row["failed"]]
        sys.stdout.write(
            f"{len(killed)} of {len(run)} killed, {sum(len(failed) == 1 for failed in killed)} by one test alone\n"
        )
    others = {row["mutant"]: row for row in runs[1]}
    for row in runs[0]:
        other = others.get(row["mutant"], {"failed": [], "found": False})
        if row["failed"] and not other["failed"]:
            sys.stdout.write(f"{'lost' if other['found'] else 'gone'} {row['mutant']} {row['failed']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--results", type=Path, help="a directory outside of the repository")
    parser.add_argument("--sample", type=Path, help="mutants of an earlier run, in its sample.json")
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=8, help="how many functions may fail before the tests of a mutant end")
    parser.add_argument("--seconds", type=float, default=60, help="for the tests of one mutant")
    parser.add_argument("--idle", type=float, default=120, help="seconds after which a single test has failed")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
    else:
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests", __file__], plugins=[Matrix(options)]))


if __name__ == "__main__":
    main()
