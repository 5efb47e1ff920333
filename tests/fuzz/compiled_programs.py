"""Programs for :mod:`tests.fuzz.compiled`: functions of two tensors, a number and a flag, with regions in them.

All tensors have eight columns. Names are unique, so that functions close over any name before them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

__all__ = ["Node", "Program", "generate"]

UNARY = [
    "{a}.sin()",
    "{a}.tanh().exp()",
    "F.gelu({a})",
    "F.silu({a})",
    "torch.softmax({a}, -1)",
    "F.layer_norm({a}, (8,))",
    "{a} @ w0",
    "{a} @ w1",
    "F.linear({a}, w0, w1[0])",
    "lin({a})",
    "{a} * k",
    "{a} * {a}.shape[0]",
    "Square.apply({a})",
    "{a}.sort(-1).values",
    "{a} / (1 + {a}.abs().amax(-1, keepdim=True))",
    "bn({a})",
]
VIEWS = [
    "{a}.t().reshape({a}.shape)",
    "torch.cat([{a}[:, 3:], {b}[:, :3]], 1)",
    "{a}.unflatten(1, (2, 4)).transpose(1, 2).flatten(1)",
    "torch.cat({a}.chunk(2, 1)[::-1], 1)",
    "{a}.flip(0)",
    "{a}[:1].expand({b}.shape) + {b}",
    "{a}.view(-1).view({b}.shape)",
]
BINARY = [
    "{a} * {b}",
    "{a} + 0.5 * {b}",
    "torch.where({a} > {b}, {a}, {b})",
    "({a} @ {b}.t()).tanh() @ {b}",
    "{a} - {b}.mean(0)",
]
WRITES = [
    "{v} = {a} * 1.5\n{v}.add_({b})",
    "{v} = torch.zeros_like({a})\n{v}[:, :3] = {b}[:, :3]\n{v}[:, 3:] += {a}[:, 3:]",
    "{v} = {a} + {b}\n{v}.view(-1)[:4].mul_(0.5)",
    "{v} = {a}.clone()\n{v}.t()[2:].sigmoid_()",
    "{v} = torch.empty_like({a}).copy_({b}).add_({a})",
    "{v} = F.relu({a} * 2, inplace=True)",
]
RANDOM = [
    "F.dropout({a}, 0.3)",
    "{a} * torch.rand_like({a})",
    "{a} + torch.randn_like({a})",
    "F.dropout(lin({a}), 0.5)",
]
PYTHON = [
    "{v} = {a}.sin() if flag else {a}.cos()",
    "{v} = {a}\nfor _ in range(k):\n    {v} = {v}.tanh() + {b}",
    "box = {{'one': {a}, 'two': [{b}]}}\nbox['two'].append(box['one'] * 2)\n{v} = sum(box['two'])",
    "{v} = {a} * (2 if {a}.shape[0] > 5 else 3)",
]
UNTRACKED = ["{v} = {a}.detach() * {b}", "with torch.no_grad():\n    {v}n = {a} @ w0\n{v} = {b} + {v}n"]
BREAKS = ["torch._dynamo.graph_break()\n{v} = {a} + {b}", "{v} = {a} * 2 if {a}.detach().sum() > 0 else {a} * 3"]

#: Policies of all regions, and those of names.
POLICIES = [
    "policies.dots_saveable",
    "policies.everything_saveable",
    "policies.nothing_saveable",
    "[aten.mm.default, aten.addmm.default]",
    "policies.save_ops(aten.mm.default, aten.sin.default)",
    "policies.save_from_both_policies(policies.dots_saveable, policies.save_ops(aten.tanh.default))",
    "policies.save_every(aten.mm.default, 2)",
    "policies.offload_dot_with_no_batch_dims",
    "made",
    "keep_products",
    "keep_by_name",
]
OF_NAMES = ["policies.save_only_these_names('n0', 'n1')", "policies.save_any_names_but_these('n0')"]

CALLED = [
    "checkpoint({f}, {args})",
    "checkpoint({f}, {args}, use_reentrant=False, determinism_check='none')",
    "checkpoint(lambda *given: {f}(*given), {args})",
    "checkpoint(name='inside')({f})({args})",
    "checkpoint(policy={policy})({f})({args})",
    "checkpoint({f}, {args}, context_fn=functools.partial(create_selective_checkpoint_contexts, {policy}))",
    "checkpoint(early_stop=False, policy={policy})({f})({args})",
]
DECORATORS = ["@checkpoint()", "@checkpoint(policy={policy})", "@checkpoint_region()", "@checkpoint_region(policy={policy})"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A statement, or a region.

    Attributes:
        text: With regions.
        plain: Without; in both a line ``BODY`` stands for the nodes inside, indented as the line is.
        body: The nodes inside.
    """

    text: str
    plain: str
    body: tuple[Node, ...] = ()

    def lines(self, with_regions: bool) -> Iterator[str]:
        for line in (self.text if with_regions else self.plain).split("\n"):
            if line.strip() != "BODY":
                yield line
                continue
            indent = line[: line.index("BODY")]
            inner = [indent + one for node in self.body for one in node.lines(with_regions)]
            yield from inner or [f"{indent}pass"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        seed: Where it comes from.
        body: Its statements.
        is_random: Whether it draws random numbers.
        results: The names it returns.
    """

    seed: int
    body: tuple[Node, ...]
    is_random: bool
    results: tuple[str, ...]

    def source(self, with_regions: bool) -> str:
        lines = [line for node in self.body for line in node.lines(with_regions)]
        return "\n    ".join(["def program(x, y, k, flag):", *lines, f"return [{', '.join(self.results)}]"]) + "\n"

    def smaller(self) -> Iterator[Program]:
        """Yields programs with one node less, or with one region less; not all of them run."""

        def without(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
            for place, node in reversed(list(enumerate(nodes))):
                before, after = nodes[:place], nodes[place + 1 :]
                yield before + after
                if node.text != node.plain:
                    yield (*before, dataclasses.replace(node, text=node.plain), *after)
                for body in without(node.body):
                    yield (*before, dataclasses.replace(node, body=body), *after)

        for drop in range(len(self.results) if len(self.results) > 1 else 0):
            yield dataclasses.replace(self, results=self.results[:drop] + self.results[drop + 1 :])
        for body in without(self.body):
            yield dataclasses.replace(self, body=body)


class _Draft:
    """A program being written."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.is_random = self.draw.random() < 0.3
        self.has_breaks = self.draw.random() < 0.35
        self.number = 0

    def name(self) -> str:
        self.number += 1
        return f"t{self.number}"

    def policy(self, names: bool = False) -> str:
        return self.draw.choice(POLICIES + (OF_NAMES * 3 if names else []))

    def statement(self, known: list[str], own: list[str]) -> Node:
        """A statement; ``own`` are those of the names made in the same function, which it may write to."""
        draw, v = self.draw, self.name()
        a, b = (draw.choice(known[-4:]) if draw.random() < 0.7 else draw.choice(known) for _ in range(2))
        kinds = [UNARY] * 6 + [VIEWS] * 2 + [BINARY] * 3 + [WRITES] * 3 + [PYTHON]
        kinds += [RANDOM] * 4 if self.is_random else [UNTRACKED]
        kinds += [BREAKS] * 1 if self.has_breaks else []
        kind = draw.choice(kinds)
        text = draw.choice(kind)
        if kind in (UNARY, VIEWS, BINARY, RANDOM):
            text = "{v} = " + text
        text = text.format(v=v, a=a, b=b)
        if own and draw.random() < 0.06:  # a write to a tensor of before, which autograd may complain of
            text = f"{draw.choice(own)}.mul_(0.9)\n{text}"
        plain = text
        if draw.random() < 0.15:
            plain, text = f"{text}\n{v}c = {v}", f"{text}\n{v}c = checkpoint_name({v}, 'n{draw.randrange(3)}')"
            v = f"{v}c"
        known.append(v)
        own.append(v)
        return Node(text, plain)

    def body(self, known: list[str], own: list[str], depth: int, length: int) -> list[Node]:
        nodes = []
        for _ in range(length):
            if depth < 3 and self.draw.random() < (0.55 if depth == 0 else 0.25):
                nodes.append(self.region(known, own, depth))
            else:
                nodes.append(self.statement(known, own))
        return nodes

    def region(self, known: list[str], own: list[str], depth: int) -> Node:
        draw = self.draw
        kind = draw.choice(["block"] * 5 + ["call"] * 5 + ["decorated"] * 2 + ["module"] * 2 + ["sequential"])
        length = draw.randint(1, 4)
        if kind == "block":
            inside = self.body(known, own, depth + 1, length)
            policy = draw.choice(["", f"policy={self.policy(names=True)}", f"policy={self.policy(names=True)}"])
            return Node(f"with checkpoint_region({policy}):\n    BODY", "if True:\n    BODY", tuple(inside))
        v, a = self.name(), draw.choice(known[-4:])
        if kind in ("module", "sequential"):
            known.append(v)
            own.append(v)
            if kind == "module":
                call = f"{v} = {draw.choice(['m0', 'm1', 'm2'])}({a})"
                return Node(call, call)
            return Node(f"{v} = checkpoint_sequential(seq, {draw.choice([1, 2, 3])}, {a})", f"{v} = seq({a})")
        f, arguments = f"f{v}", [a, draw.choice(known)][: draw.randint(1, 2)]
        given = [f"{f}_{place}" for place in range(len(arguments))]
        inner, inner_own = [*known, *given] if draw.random() < 0.5 else given[:], []
        inside = self.body(inner, inner_own, depth + 1, length)
        results = [inner[-1], *draw.sample(inner_own, min(len(inner_own), draw.randint(0, 1)))]
        names = [f"{v}r{place}" for place in range(len(results))]
        known.extend(names)
        own.extend(names)
        inside.append(Node(returned := f"return {', '.join(results)}", returned))
        define, args, to = f"def {f}({', '.join(given)}):\n    BODY", ", ".join(arguments), ", ".join(names)
        plain = f"{define}\n{to} = {f}({args})"
        if kind == "decorated":
            text = f"{draw.choice(DECORATORS).format(policy=self.policy())}\n{plain}"
        else:
            text = f"{define}\n{to} = " + draw.choice(CALLED).format(f=f, args=args, policy=self.policy())
        return Node(text, plain, tuple(inside))


def generate(seed: int) -> Program:
    """Returns the program of a seed."""
    draft = _Draft(seed)
    known, own = ["x", "y"], []
    body = draft.body(known, own, 0, draft.draw.randint(3, 6))
    results = tuple(dict.fromkeys([known[-1], *draft.draw.sample(known, 1)]))
    return Program(seed, tuple(body), draft.is_random, results)
