"""Programs as data: a small tree of statements, and its rendering as source.

Names say what they are: ``v`` a value, ``m`` a module, ``f`` a region's function, ``g`` a random generator. Each is bound
once in a program, so that the shrinker may move statements between scopes, and reads a statement's names off its text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

__all__ = ["CONTAINERS", "Binding", "Block", "Definition", "Ending", "Line", "Node", "Program", "Region", "names_in", "walk"]

_NAME = re.compile(r"\b[vmfg]\d+\b")
_VARIABLE = re.compile(r"\b((?:each|global)\d+)")  # that functions close over
_TARGETS = re.compile(r"^((?:[vmfg]\d+, ?)*[vmfg]\d+),? = ")


def names_in(text: str) -> set[str]:
    """Returns the names of a program's own that a text mentions."""
    return set(_NAME.findall(text))


def listed(names: list[str]) -> str:
    """Returns names as the target or the value of a tuple assignment."""
    return names[0] if len(names) == 1 else ", ".join(names)


@dataclasses.dataclass
class Line:
    """A simple statement."""

    text: str

    def defines(self) -> list[str]:
        found = _TARGETS.match(self.text)
        return _NAME.findall(found.group(1)) if found else []

    def reads(self) -> set[str]:
        found = _TARGETS.match(self.text)
        return names_in(self.text[found.end() :] if found else self.text)

    def render(self) -> list[str]:
        return self.text.split("\n")


@dataclasses.dataclass
class Definition(Line):
    """The class of a module, and the module."""

    name: str

    def defines(self) -> list[str]:
        return [self.name]

    def reads(self) -> set[str]:
        return names_in(self.text) - {self.name}


@dataclasses.dataclass
class Block:
    """Statements under a header such as ``with torch.no_grad():``, and what must follow them, such as a handler."""

    header: str
    body: list[Node]
    footer: list[str] = dataclasses.field(default_factory=list)

    def defines(self) -> list[str]:
        return []

    def reads(self) -> set[str]:
        return names_in(" ".join([self.header, *self.footer]))

    def render(self) -> list[str]:
        return [self.header, *indented(self.body), *self.footer]


@dataclasses.dataclass(frozen=True)
class Container:
    """A kind of container that holds arguments, as pieces of source.

    Attributes:
        item: One of the things in it.
        whole: The container.
        read: What follows its name to read a thing in it.
        changes: What follows its name to change it.
    """

    item: str
    whole: str
    read: str
    changes: tuple[str, ...]

    def make(self, names: list[str]) -> str:
        return self.whole.format(items=", ".join(self.item.format(name=name, index=i) for i, name in enumerate(names)))


CONTAINERS = {
    "list": Container("{name}", "[{items}]", "[{index}]", (".clear()", ".pop()", ".append(None)", "[0] = None")),
    "dict": Container(
        "'key {index}': {name}",
        "{{{items}}}",
        "['key {index}']",
        (".clear()", ".popitem()", "['another'] = None", "['key 0'] = None"),
    ),
    "dataclass": Container("{name}", "Held({items})", ".field_{index}", (".field_0 = None",)),
    "deep": Container(
        "{name}", "{{'deep': ([{items}],)}}", "['deep'][0][{index}]", (".clear()", "['deep'][0].pop()", "['deep'][0][0] = None")
    ),
}


@dataclasses.dataclass
class Binding:
    """One argument of a region.

    Attributes:
        parameter: Its name in the function.
        argument: Its name around it.
        style: How it is handed over: ``"positional"``, ``"keyword"``, ``"partial"``, ``"partial keyword"`` or a key of
            :data:`CONTAINERS`; those of one region that are in a list are in the same one.
    """

    parameter: str
    argument: str
    style: str = "positional"


@dataclasses.dataclass
class Region:
    """The definition of a function and its call as a region.

    Attributes:
        name: Of the function.
        bindings: Its arguments.
        body: Its statements.
        results: Pairs of a result's name around the function and in it.
        packing: How results come back: ``"tuple"``, ``"list"``, ``"dict"`` or ``"nested"``.
        wrapper: What the function is wrapped in before it is run, ``"{}"`` for nothing.
        change: Which change the caller makes right after the call to the containers it handed over, or None.
        called: Whether it is called where it stands, or by later statements alone.
    """

    name: str
    bindings: list[Binding]
    body: list[Node]
    results: list[tuple[str, str]]
    packing: str = "tuple"
    wrapper: str = "{}"
    change: int | None = None
    called: bool = True

    def defines(self) -> list[str]:
        return [self.name, *(outer for outer, _ in self.results if self.called)]

    def reads(self) -> set[str]:
        """Returns what the call reads; what the body reads is up to its statements."""
        return {binding.argument for binding in self.bindings if self.called}

    def plain(self) -> bool:
        """Whether another call may be written as ``f(v1, v2)``."""
        styles = {binding.style for binding in self.bindings}
        return styles <= {"positional"} and self.packing == "tuple"

    def _bound(self, style: str) -> list[Binding]:
        return [binding for binding in self.bindings if binding.style == style]

    def definition(self) -> list[str]:
        """Returns the source of the function."""
        parameters = [binding.parameter for binding in self._bound("partial") + self._bound("positional")]
        first = []
        for style, container in CONTAINERS.items():
            bound = self._bound(style)
            if bound:
                holder = f"{self.name}_{style}"
                parameters.append(holder)
                first += [f"{b.parameter} = {holder}{container.read.format(index=i)}" for i, b in enumerate(bound)]
        keywords = [binding.parameter for binding in self._bound("keyword") + self._bound("partial keyword")]
        signature = ", ".join([*parameters, *(["*", *keywords] if keywords else [])])
        body = [f"    {line}" for line in first] + (indented(self.body) if self.body else [])
        inner = [name for _, name in self.results]
        if not inner:
            return [f"def {self.name}({signature}):", *(body or ["    pass"])]
        if self.packing == "list":
            value = f"[{', '.join(inner)}]"
        elif self.packing == "dict":
            value = "{" + ", ".join(f"{name!r}: {name}" for name in inner) + "}"
        elif self.packing == "nested":
            value = f"[{inner[0]}, ({', '.join(inner[1:])}{',' if len(inner) > 1 else ''})]"
        else:
            value = listed(inner)
        return [f"def {self.name}({signature}):", *body, f"    return {value}"]

    def call(self) -> list[str]:
        """Returns the source of the call, from making its containers to taking its results apart."""
        before, after = [], []
        arguments = [binding.argument for binding in self._bound("positional")]
        for style, container in CONTAINERS.items():
            bound = self._bound(style)
            if bound:
                holder = f"{self.name}_{style}"
                arguments.append(holder)
                before.append(f"{holder} = {container.make([binding.argument for binding in bound])}")
                if self.change is not None:
                    after.append(f"{holder}{container.changes[self.change % len(container.changes)]}")
        arguments += [f"{binding.parameter}={binding.argument}" for binding in self._bound("keyword")]
        function = self.wrapper.format(self.name)
        held = [binding.argument for binding in self._bound("partial")]
        held += [f"{binding.parameter}={binding.argument}" for binding in self._bound("partial keyword")]
        if held:
            function = f"functools.partial({function}, {', '.join(held)})"
        called = f"run({', '.join([function, *arguments])})"
        outer = [name for name, _ in self.results]
        if not outer:
            lines = [called]
        elif self.packing == "dict":
            lines = [f"{self.name}_results = {called}"]
            lines += [f"{name} = {self.name}_results[{inner!r}]" for name, inner in self.results]
        elif self.packing == "nested":
            lines = [f"{outer[0]}, ({', '.join(outer[1:])}{',' if len(outer) == 2 else ''}) = {called}"]
        elif self.packing == "list" and len(outer) == 1:
            lines = [f"[{outer[0]}] = {called}"]
        else:
            lines = [f"{listed(outer)} = {called}"]
        return [*before, *lines, *after]

    def render(self) -> list[str]:
        return [*self.definition(), *(self.call() if self.called else [])]


Node = Line | Block | Region


def indented(body: list[Node]) -> list[str]:
    """Returns the source of a body, one level in; ``pass`` for an empty one."""
    return [f"    {line}" for node in body for line in node.render()] or ["    pass"]


def under(headers: list[str], lines: list[str]) -> list[str]:
    """Returns lines of source in blocks, outermost first."""
    for header in reversed(headers):
        lines = [header, *(f"    {line}" for line in lines)]
    return lines


def walk(body: list[Node]) -> Iterator[Node]:
    """Goes through all statements, outer ones first."""
    for node in body:
        yield node
        if not isinstance(node, Line):
            yield from walk(node.body)


@dataclasses.dataclass
class Ending:
    """How a program ends: its backward, and what is looked at.

    Attributes:
        mode: A key of :data:`MODES`.
        outputs: Names to look at after forward.
        differentiable: Those of them that make up the loss.
        discarded: Names to delete before backward, so that parts of the graph are gone.
        draws: Statements that draw random numbers between forward and backward.
        around: Header of a block around the backward, or nothing.
        between: Statements between two backwards, if there are two.
    """

    mode: str
    outputs: list[str]
    differentiable: list[str]
    discarded: list[str] = dataclasses.field(default_factory=list)
    draws: list[str] = dataclasses.field(default_factory=list)
    around: str = ""
    between: list[Node] = dataclasses.field(default_factory=list)

    def render(self, leaves: list[str], modules: list[str]) -> list[str]:
        """Returns the source.

        Args:
            leaves: The leaves that require grad.
            modules: Those whose state is looked at before backward and after it.
        """
        lines = [f"see('output', {name!r}, {name})" for name in self.outputs]
        lines.append("see('stream', 'torch after forward', torch.get_rng_state())")
        lines += [f"del {listed(self.discarded)}"] if self.discarded else []
        lines += self.draws
        if self.differentiable:
            terms = [f"({name} * {name}).sum()" for name in self.differentiable]
            inputs = f"[{', '.join(leaves)}]"
            lines += [f"loss = {' + '.join(terms)}"] if "{one}" not in MODES[self.mode] else []
            half = max(1, len(terms) // 2)
            one, other = " + ".join(terms[:half]), " + ".join(terms[half:]) or f"{self.differentiable[0]}.sum()"
            between = "\n".join(line for node in self.between for line in node.render()) or "pass"
            parts = {"inputs": inputs, "one": one, "other": other, "first": self.differentiable[0], "between": between}
            backward = [line for line in MODES[self.mode].format(**parts).strip("\n").split("\n") if line != "pass"]
            backward = under([self.around] if self.around else [], backward)
            if modules and not self.between:
                held = f"[{', '.join(modules)}]"
                backward = [f"before = held_by({held})", *backward, f"see_identities(before, held_by({held}), see)"]
            lines += backward
        return lines


# Each mode is lines of source. ``loss`` is what they differentiate; those that want two losses make them from its parts.
MODES = {
    "once": "loss.backward()",
    "twice": """
loss.backward(retain_graph=True)
see_gradients('first', {inputs}, see)
{between}
loss.backward()""",
    "three times": """
for again in range(3):
    for value in torch.autograd.grad(loss, {inputs}, retain_graph=True, allow_unused=True):
        see('gradient', f'number {{again}}', value)""",
    "partial": """
one, other = {one}, {other}
one.backward(retain_graph=True)
see_gradients('first', {inputs}, see)
{between}
other.backward()""",
    "part": """
one = {one}
one.backward()""",
    "by leaf": """
for leaf in {inputs}:
    see('gradient', 'alone', torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0])
loss.backward()""",
    "double": """
gradients = torch.autograd.grad(loss, {inputs}, create_graph=True, allow_unused=True)
for value in gradients:
    see('gradient', 'first', value)
second = sum((value * value).sum() for value in gradients if value is not None and value.requires_grad)
if isinstance(second, torch.Tensor):
    second.backward()""",
    "double, later": """
gradients = torch.autograd.grad(loss, {inputs}, create_graph=True, allow_unused=True)
loss.backward(retain_graph=True)
{between}
second = sum((value * value).sum() for value in gradients if value is not None and value.requires_grad)
if isinstance(second, torch.Tensor):
    second.backward()""",
    "batched": """
directions = torch.stack([torch.ones_like({first}), torch.full_like({first}, -0.5)])
for value in torch.autograd.grad({first}, {inputs}, directions, retain_graph=True, allow_unused=True, is_grads_batched=True):
    see('gradient', 'batched', value)
loss.backward()""",
    "thread": "in_thread(lambda: loss.backward())",
    "no_grad": """
with torch.no_grad():
    loss.backward()""",
    "autocast": """
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss.backward()""",
    "saved fields": """
see_saved_fields({first}, see)
loss.backward()""",
}


@dataclasses.dataclass
class Program:
    """A program: ``program(run, see)`` in its source runs functions as regions by ``run`` and shows values to ``see``.

    Attributes:
        seed: What it was made from.
        setup: Leaves, modules and generators.
        body: The forward.
        ending: The backward.
        after: Writes between the two.
        changes: Changes of Python state between the two.
        around: Headers of blocks around both of them.
        steps: How many times the two run.
        failure: Where the first step raises, and at which place that may, or None.
        optimizer: A constructor for what steps once a step, of parameters and a rate, or nothing.
    """

    seed: int
    setup: list[Line]
    body: list[Node]
    ending: Ending
    after: list[Node] = dataclasses.field(default_factory=list)
    changes: list[Node] = dataclasses.field(default_factory=list)
    around: list[str] = dataclasses.field(default_factory=list)
    steps: int = 1
    failure: tuple[str, int] | None = None
    optimizer: str = ""

    def source(self) -> str:
        setup = [line for node in self.setup for line in node.render()]
        bound = [name for node in self.setup for name in node.defines()]
        leaves = [name for node in self.setup if "requires_grad" in node.text for name in node.defines() if name[0] == "v"]
        looks = []
        for name in bound:
            if name.startswith("v"):
                looks.append(f"see('gradient', {name!r}, {name}.grad)")
                looks.append(f"see('parameter', {name!r}, {name})")
            elif name.startswith("m"):
                looks.append(f"see_module({name!r}, {name}, see)")
            elif name.startswith("g"):
                looks.append(f"see('stream', {name!r}, state_of({name}))")
        if "log = []" in setup:
            looks.append("see('state', 'log', log)")
        modules = [node.name for node in self.setup if isinstance(node, Definition)]
        body = [line for node in [*self.body, *self.after] for line in node.render()]
        looks += [f"see_variable({name!r}, locals(), see)" for name in dict.fromkeys(_VARIABLE.findall("\n".join(body)))]
        body += [line for node in self.changes for line in node.render()] + self.ending.render(leaves, modules)
        parameters = f"[{', '.join([*leaves, *(f'*{name}.parameters()' for name in bound if name.startswith('m'))])}]"
        if self.failure is not None:
            setup.append("shown = see")
            held = f"*held_by([{', '.join(name for name in bound if name.startswith('m'))}]).values()"
            failing = f"Failing({self.failure[0]!r}, {self.failure[1]}, lambda: [*{parameters}, {held}])"
            failing = f"with contextlib.nullcontext() if step else {failing}:"
            body = ["see = shown if step else unseen", "torch.manual_seed(step)", *under([failing], body)]
        if self.optimizer and leaves:
            setup.append(f"optimizer = {self.optimizer.format(parameters)}")
            body += ["optimizer.step()", "optimizer.zero_grad()"]
        if self.steps > 1:
            body = under([f"for step in range({self.steps}):"], body)
        body = under(self.around, body)
        lines = [f"torch.default_generator.manual_seed({self.seed % 2**32})", *setup, *body, *looks]
        return "\n".join(under(["def program(run, see):"], lines)) + "\n"
