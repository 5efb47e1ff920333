"""Making a failing program small: greedy edits, each kept if the program still fails in the same way."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

from .programs import Binding, Block, Definition, Ending, Line, Node, Program, Region, walk

__all__ = ["shrink"]

Edit = Callable[[Program], "bool | None"]  # changes a program; False if there is nothing to change


def shrink(program: Program, still_fails: Callable[[Program], bool]) -> Program:
    """Returns a smaller program that still fails, or the program itself.

    Args:
        program: One that fails.
        still_fails: Whether another one fails in the same way.
    """
    smaller = True
    while smaller:
        smaller = False
        for edits in (_deletions, _flattenings, _bypasses, _excisions, _simplifications):
            # From the end, where what a statement leads to stands. Places shift as edits succeed; the next round sees to it.
            for edit in reversed(list(edits(program))):
                candidate = copy.deepcopy(program)
                if edit(candidate) is False or _size(candidate) >= _size(program) or _undefined(candidate):
                    continue
                if still_fails(candidate):
                    program, smaller = candidate, True
    return program


def _size(program: Program) -> tuple[int, int]:
    weights = {Region: 20, Block: 10, Line: 2, Definition: 5}
    nodes = [*program.setup, *walk(program.body), *program.after, *program.changes, *program.ending.between]
    calls = sum(isinstance(node, Region) and node.called for node in nodes)
    return sum(weights[type(node)] for node in nodes) + calls, len(program.source())


def _undefined(program: Program) -> bool:
    """Whether a name is read that nothing defines, which a handler in the program might hide."""
    ending = program.ending
    read, defined = {*ending.outputs, *ending.differentiable, *ending.discarded}, set()
    for node in [*program.setup, *walk(program.body), *program.after, *program.changes, *ending.between]:
        defined.update(node.defines())
        read |= node.reads()
        if isinstance(node, Region):
            defined.update(binding.parameter for binding in node.bindings)
            read.update(inner for _, inner in node.results)
    return not read <= defined


def _bodies(program: Program) -> list[list[Node]]:
    """Returns every list of statements."""
    nested = [node.body for node in walk(program.body) if not isinstance(node, Line)]
    return [program.setup, program.body, program.after, program.changes, program.ending.between, *nested]


def _places(program: Program) -> Iterator[tuple[int, int]]:
    for number, body in enumerate(_bodies(program)):
        for position in range(len(body)):
            yield number, position


def _node(program: Program, place: tuple[int, int]) -> Node | None:
    bodies = _bodies(program)
    number, position = place
    return bodies[number][position] if number < len(bodies) and position < len(bodies[number]) else None


def _defined(node: Node) -> set[str]:
    return {name for inner in walk([node]) for name in inner.defines()}


def _forget(program: Program, names: set[str]) -> None:
    """Takes out whatever reads names that are gone, and what reads that in turn."""
    todo = set(names)
    while todo:
        gone, todo = todo, set()
        for body in _bodies(program):
            for node in list(body):
                if isinstance(node, Region):
                    node.bindings, lost = _split(node.bindings, lambda binding: binding.argument not in gone)
                    todo |= {binding.parameter for binding in lost}
                    node.results, lost = _split(node.results, lambda result: result[1] not in gone)
                    todo |= {outer for outer, _ in lost}
                    todo |= {node.name} if lost else set()
                elif node.reads() & gone:
                    body.remove(node)
                    todo |= _defined(node)
        ending = program.ending
        ending.outputs = [name for name in ending.outputs if name not in gone]
        ending.discarded = [name for name in ending.discarded if name not in gone]
        ending.differentiable = [name for name in ending.differentiable if name not in gone]


def _split(items, keep):
    return [item for item in items if keep(item)], [item for item in items if not keep(item)]


def _deletions(program: Program) -> Iterator[Edit]:
    """A statement goes, with all that depends on it or alone."""
    for place in _places(program):

        def delete(candidate, place=place, *, dependents):
            node = _node(candidate, place)
            if node is None:
                return False
            _bodies(candidate)[place[0]].remove(node)
            if dependents:
                _forget(candidate, _defined(node))
            return None

        yield lambda candidate, delete=delete: delete(candidate, dependents=True)
        yield lambda candidate, delete=delete: delete(candidate, dependents=False)


def _flattenings(program: Program) -> Iterator[Edit]:
    """A block or a region gives way to its body."""
    for place in _places(program):

        def flatten(candidate, place=place):
            node = _node(candidate, place)
            if not isinstance(node, Block | Region):
                return False
            body = _bodies(candidate)[place[0]]
            if isinstance(node, Region) and not node.called:
                return False
            if isinstance(node, Block) and "track_rng" in node.header:  # without which a runtime may differ
                return False
            if isinstance(node, Region):
                before = [Line(f"{binding.parameter} = {binding.argument}") for binding in node.bindings]
                after = [Line(f"{outer} = {inner}") for outer, inner in node.results]
                body[place[1] : place[1] + 1] = [*before, *node.body, *after]
            else:
                body[place[1] : place[1] + 1] = node.body
            return None

        yield flatten


def _rename(program: Program, old: str, new: str) -> None:
    pattern = re.compile(rf"\b{old}\b")
    for body in _bodies(program):
        for node in body:
            if isinstance(node, Line):
                node.text = pattern.sub(new, node.text)
            elif isinstance(node, Block):
                node.header = pattern.sub(new, node.header)
            else:
                node.bindings = [
                    Binding(binding.parameter, pattern.sub(new, binding.argument), binding.style) for binding in node.bindings
                ]
                node.results = [(outer, pattern.sub(new, inner)) for outer, inner in node.results]
    ending = program.ending
    ending.discarded = [name for name in ending.discarded if name != old]
    ending.outputs = list(dict.fromkeys(pattern.sub(new, name) for name in ending.outputs))
    ending.differentiable = list(dict.fromkeys(pattern.sub(new, name) for name in ending.differentiable))


def _bypasses(program: Program) -> Iterator[Edit]:
    """A statement goes, and what it computed from stands for what it computed."""
    for place in _places(program):
        node = _node(program, place)
        # A leaf that a region makes for itself must not give way to one from outside: its gradient is nobody else's business.
        if not isinstance(node, Line) or not node.defines() or "requires_grad_" in node.text:
            continue
        for source in sorted(name for name in node.reads() if name.startswith("v")):

            def bypass(candidate, place=place, source=source):
                node = _node(candidate, place)
                if not isinstance(node, Line) or source not in node.reads():
                    return False
                _bodies(candidate)[place[0]].remove(node)
                for name in node.defines():
                    _rename(candidate, name, source)
                return None

            yield bypass


def _excisions(program: Program) -> Iterator[Edit]:
    """A statement of several lines loses one of them, with or without what is under it, or the regions in it."""
    for place in _places(program):
        node = _node(program, place)
        if not isinstance(node, Line) or "\n" not in node.text:
            continue
        for number in range(len(node.text.split("\n"))):
            for keep in (False, True):

                def excise(candidate, place=place, number=number, keep=keep):
                    node = _node(candidate, place)
                    lines = node.text.split("\n") if isinstance(node, Line) else []
                    if number >= len(lines):
                        return False
                    end = number + 1
                    while end < len(lines) and _indent(lines[end]) > _indent(lines[number]):
                        end += 1
                    under = [line[4:] for line in lines[number + 1 : end]] if keep else []
                    if keep and not under:
                        return False
                    node.text = "\n".join([*lines[:number], *under, *lines[end:]])
                    return None

                yield excise

        def leave(candidate, place=place):
            node = _node(candidate, place)
            if not isinstance(node, Line) or "run(" not in node.text:
                return False
            node.text = re.sub(r"\brun\(((?:self\.)?\w+), ", r"\1(", node.text)
            return None

        yield leave


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lines(program: Program) -> list[Line]:
    return [node for node in walk(program.body) if isinstance(node, Line)]


def _without(arguments: str, index: int, name: str) -> list[str]:
    """Returns the function and the arguments of a call, from their text, less one of the arguments."""
    names = arguments.split(", ")[1:]
    return [name, *names[:index], *names[index + 1 :]]


def _simplifications(program: Program) -> Iterator[Edit]:
    """Calls, arguments and the ending take their plainest form."""

    def call_plainly(candidate, place):
        node = _node(candidate, place)
        if not isinstance(node, Region):
            return False
        node.packing, node.wrapper, node.change = "tuple", "{}", None
        for binding in node.bindings:
            binding.style = "positional"
        return None

    def drop_binding(candidate, place, index):
        node = _node(candidate, place)
        if not isinstance(node, Region) or index >= len(node.bindings):
            return False
        _rename(candidate, node.bindings[index].parameter, node.bindings.pop(index).argument)
        again = re.compile(rf"\brun\({node.name}((?:, \w+)*)\)")
        for line in _lines(candidate):
            line.text = again.sub(lambda call: f"run({', '.join(_without(call[1], index, node.name))})", line.text)
        return None

    def do_not_call(candidate, place):
        node = _node(candidate, place)
        if not isinstance(node, Region) or not node.called:
            return False
        node.called = False
        return None

    def drop_result(candidate, place, index):
        node = _node(candidate, place)
        if not isinstance(node, Region) or index >= len(node.results):
            return False
        _forget(candidate, {node.results.pop(index)[0]})
        return None

    for place in _places(program):
        node = _node(program, place)
        if isinstance(node, Region):
            yield lambda candidate, place=place: call_plainly(candidate, place)
            yield lambda candidate, place=place: do_not_call(candidate, place)
            for index in range(len(node.bindings)):
                yield lambda candidate, place=place, index=index: drop_binding(candidate, place, index)
            for index in range(len(node.results)):
                yield lambda candidate, place=place, index=index: drop_result(candidate, place, index)

    def end(candidate, **changes):
        candidate.ending = Ending(**{**vars(candidate.ending), **changes})

    def run_once(candidate):
        candidate.steps = 1

    def leave_out(candidate, name):
        setattr(candidate, name, type(program)(0, [], [], ending).__dict__[name])

    def take_off(candidate, header):
        candidate.around = [other for other in candidate.around if other != header]

    yield run_once
    for header in [header for header in program.around if "track_rng" not in header]:
        yield lambda candidate, header=header: take_off(candidate, header)
    yield lambda candidate: end(candidate, around="")
    ending = program.ending
    for name in ("failure", "optimizer"):
        yield lambda candidate, name=name: leave_out(candidate, name)
    for mode in ("once", "twice"):
        yield lambda candidate, mode=mode: end(candidate, mode=mode)
    yield lambda candidate: end(candidate, outputs=[])
    yield lambda candidate: end(candidate, discarded=[])
    yield lambda candidate: end(candidate, draws=[])
    for name in ending.outputs:
        yield lambda candidate, name=name: end(
            candidate, outputs=[other for other in candidate.ending.outputs if other != name]
        )
    for name in ending.differentiable:
        yield lambda candidate, name=name: end(
            candidate, differentiable=[other for other in candidate.ending.differentiable if other != name]
        )
