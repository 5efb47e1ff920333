"""Programs about memory, for :mod:`tests.fuzz.aliasing`: few operators, many views and writes, regions that share tensors.

A statement is executed while the program is being made, and is taken if it neither raises, nor writes to what plain autograd
has saved, nor to what a region that was left could not learn of. One that is not taken may have changed values, which does no
harm: they are there to say whether statements are valid, not what they compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import aliasing_statements as statements
from .draft import is_usable
from .scripts import base_namespace

__all__ = ["Node", "Program", "generate"]


@dataclasses.dataclass
class Node:
    """A statement; a block where it has a body; a region where it has results too, which are (inside, outside) by name."""

    text: str
    body: list[Node] = dataclasses.field(default_factory=list)
    results: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    rerunnable: bool = True

    def render(self, indent: str = "    ") -> Iterator[str]:
        yield indent + self.text
        for node in self.body or ([Node("pass")] if self.text.endswith(":") else []):
            yield from node.render(indent + "    ")
        if self.results:
            inner, outer = ("".join(f"{pair[side]}, " for pair in self.results) for side in (0, 1))
            yield f"{indent}    return {inner.strip()}"
            yield f"{indent}{outer.strip()} = {'run' if self.rerunnable else 'record'}({self.text[4:-3]})"

    def unwrapped(self) -> list[Node]:
        return [*self.body, *(Node(f"{outer} = {inner}") for inner, outer in self.results)]


@dataclasses.dataclass
class Program:
    """A program, with what it does that versions alone tell of.

    Attributes:
        seed: What it was made of.
        nodes: Its statements.
        is_late: Whether what a region read or made is written to when the outermost one around has been left, or before that
            but so that plain autograd does not notice.
        is_quiet: Whether something is written to through tensors with versions of their own.
    """

    seed: int
    nodes: list[Node]
    is_late: bool = False
    is_quiet: bool = False

    def source(self) -> str:
        head = ["def program(run, see):", f"    torch.manual_seed({self.seed % 2**32})", "    record = recorded(run)"]
        return "\n".join([*head, *(line for node in self.nodes for line in node.render())]) + "\n"


@dataclasses.dataclass
class _Fill:
    """What is left to fill of a tensor, where its names belong, and whether no operator has written to it."""

    parts: list[str]
    scope: list[str]
    is_untouched: bool = True


class _Open:
    """A region in the making: the storages that there were before, those that it read or made, and whether it may run again."""

    def __init__(self, node: Node, before: set[int], depth: int) -> None:
        self.node, self.before, self.depth, self.touched = node, before, depth, set()


class _Watch(TorchDispatchMode):
    """Notes which storages operators are given, and which of them they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.touched, self.written, self.uncounted, self.held = set(), set(), set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else [given]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                if "running" in argument.name and args[5]:  # statistics in training: written to, and no version tells
                    self.written.add(_storage(tensor))
                    self.uncounted.add(_storage(tensor))
                    continue
                self.touched.add(_storage(tensor))
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.written.add(_storage(tensor))
        out = func(*args, **kwargs)
        for tensor in args[0] if "_foreach_" in func._schema.name else []:  # which torch counts where there is no mode
            torch.autograd.graph.increment_version(tensor)
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.touched.add(_storage(tensor))
                self.held.append(tensor)
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Placeholders(dict):
    """What stands for a placeholder is drawn when it is met."""

    def __init__(self, draw: Callable[[str], str], **given: str) -> None:
        super().__init__(given)
        self._draw = draw

    def __missing__(self, key: str) -> str:
        found = self[key] = self._draw(key)
        return found


class _Generator:
    """Draws statements, and tries each of them before it takes it."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        torch.manual_seed(seed)
        self.values = base_namespace()
        self.scopes: list[list[str]] = [[]]
        self.modules: dict[str, list[str]] = {}
        self.fills: dict[tuple[str, str], _Fill] = {}
        self.saved: list[tuple[torch.Tensor, int]] = []
        self.held: list[torch.Tensor] = []
        self.open: list[_Open] = []
        self.closed: list[_Open] = []
        self.quiet: set[int] = set()
        self.late_share = self.random.choice([0.0, 0.0, 0.0, 0.3])
        self.stale_share = self.random.choice([0.0] * 9 + [0.3])
        self.count = 0
        self.dtype = self.random.choice(["torch.float64", "torch.float32"])
        self.made = Program(seed, [])

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def names(self, suits: Callable[[torch.Tensor], bool]) -> list[str]:
        return [name for scope in self.scopes for name in scope if is_usable(self.values[name]) and suits(self.values[name])]

    def pick(self, suits: Callable[[torch.Tensor], bool], latest: float, with_grad: float = 0.3) -> str:
        found = self.names(suits)
        if self.random.random() < with_grad:
            found = [name for name in found if self.values[name].requires_grad] or found
        if self.random.random() < latest:
            return found[-1 - min(int(self.random.expovariate(0.5)), len(found) - 1)]
        return self.random.choice(found)

    def fill_in(self, template: str, **given: str) -> str:
        """Returns a template with names and numbers in it; raises IndexError where there is no such tensor."""
        first: list[torch.Size] = [self.values[given["e"].split("[")[0].split(".")[0]].shape] if "e" in given else []

        chances = {"x": (0.6, 0.8), "y": (0.6, 0.3), "z": (0.6, 0.3), "w": (0.5, 0), "t": (0.4, 0.3), "u": (0.4, 0.3)}

        def draw(key: str) -> str:
            if key in ("b", "j", "c"):
                kinds = {"b": torch.bool, "j": torch.int64, "c": None}
                return self.pick(lambda v: v.is_complex() if key == "c" else v.dtype is kinds[key], 0.5)
            if key == "leaf":
                return self.pick(lambda v: v.requires_grad and v.is_leaf, 0.3)
            if key in chances:
                fitting: Callable[[torch.Tensor], bool] = torch.Tensor.is_floating_point
                if key == "w":
                    fitting = lambda v: v.is_floating_point() and not v.requires_grad  # noqa: E731
                if first and self.random.random() < 0.7 and self.names(lambda v: fitting(v) and v.shape == first[0]):
                    name = self.pick(lambda v: fitting(v) and v.shape == first[0], *chances[key])
                else:
                    name = self.pick(fitting, *chances[key])
                first.append(self.values[name].shape)
                return name
            return {
                "k": self.random.choice(["0.5", "-0.7", "1.2", "2.0"]),
                "d": self.random.choice(["0", "-1", "1"]),
                "i": self.random.choice(["0", "1", "-1"]),
                "n": self.random.choice(["2", "3", "1"]),
            }[key]

        return template.format_map(_Placeholders(draw, **given))

    def attempt(self, text: str, defines: bool = False) -> Node | None:
        """Executes a statement, or an expression of which the results get names; returns it if it is to be taken."""
        watch, saved = _Watch(), []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append((tensor.detach(), tensor._version))
            return saved[-1][0]

        try:
            with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = eval(text, self.values) if defines else exec(text, self.values)
        except Exception:
            return None
        results = list(result) if isinstance(result, (list, tuple)) else [result] if defines else []
        self.held += [*watch.held, *filter(torch.is_tensor, results)]
        looked_at = self.saved + (saved if "rrelu" not in text else [])  # which saves noise that it has yet to fill
        stale = any(tensor._version != version for tensor, version in looked_at)
        self.saved = [(tensor, tensor._version) for tensor, _ in self.saved + saved]
        if not all(map(self.fits, results)):
            return None
        if ".numpy()" in text:  # which writes unseen
            watch.written.add(_storage(self.values[re.match(r"\w+", text)[0]]))
        if any(part in text for part in statements.SPLIT_VERSIONS):
            self.quiet |= watch.touched | set(map(_storage, results))
        self.quiet |= watch.uncounted
        if not all(self.fits(self.values[name]) for name in self.names(lambda v: _storage(v) in watch.written)):
            return None
        if (stale and self.random.random() >= self.stale_share) or not self.may_write(watch.written):
            return None
        self.note(watch, text)
        if not defines:
            return Node(text)
        names = [self.fresh() for _ in results]
        self.values.update(zip(names, results, strict=True))
        self.scopes[-1] += names
        return Node(f"{', '.join(names)}{',' if isinstance(result, (list, tuple)) and len(names) == 1 else ''} = {text}")

    def fits(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= 48 or value.dim() > 4:
            return False
        return value.dtype in (torch.bool, torch.int64) or bool((value.detach().abs() < 50).all())

    def may_write(self, written: set[int]) -> bool:
        """Whether writes are such that regions which have been left have a chance to learn of them."""
        left = [region for region in self.closed if not region.depth]
        late = {storage for region in left for storage in region.touched & written}
        read = {storage for region in left for storage in region.touched & region.before & written}
        if late & self.quiet or (read and self.random.random() >= self.late_share):
            return False
        unseen = any(region.touched & written & self.quiet for region in self.closed)  # by plain autograd: ``.data`` before it
        self.made.is_late |= bool(late) or unseen
        self.made.is_quiet |= bool(written & self.quiet)
        return True

    def note(self, watch: _Watch, text: str) -> None:
        """Finds out which regions could not run again."""
        has_module = any(name in text for name in self.modules)
        for region in self.open:
            region.touched |= watch.touched
            region.node.rerunnable &= not has_module and not watch.written & (region.before | self.quiet)
        for region in self.closed:
            region.node.rerunnable &= not (watch.written & (region.before | self.quiet) & region.touched)

    def drawn(self, templates: Sequence[str], defines: bool = False, **given: str) -> list[Node]:
        """Returns a statement of some templates, in a list, after as many attempts as it takes, up to a number."""
        for _ in range(12):
            with contextlib.suppress(IndexError):
                node = self.attempt(self.fill_in(self.random.choice(templates), **given), defines)
                if node is not None:
                    return [node]
        return []

    def blank(self) -> list[Node]:
        """Returns what makes a tensor without contents and a view of it, to be filled by statements later on."""
        name, view = self.fresh("e"), self.fresh("e")
        with contextlib.suppress(IndexError, RuntimeError):
            shape, template = self.random.choice(statements.SHAPES), self.random.choice(statements.BLANKS)
            text = self.fill_in(template, shape=repr(shape), dtype=self.dtype)
            made = eval(text, self.values)
            aspect = self.random.choice(statements.ASPECTS).format(e=name)
            self.values[name] = made
            self.values[view] = eval(aspect, self.values)
            self.held.append(made)
            self.quiet |= {_storage(made)} if ".data" in aspect else set()
            for region in self.open:
                region.touched.add(_storage(made))
            if made.is_floating_point() and self.fits(torch.zeros_like(made)):
                whole = self.random.choice([name, view])
                parts = [part.format(e=whole) for part in self.random.choice(statements.PARTS)]
                self.fills[name, view] = _Fill(parts, self.scopes[-1])
                return [Node(f"{name} = {text}"), Node(f"{view} = {aspect}")]
        return []

    def fill(self) -> list[Node]:
        """Returns what fills a part of such a tensor; those that are full are tensors like others."""
        names = self.random.choice(list(self.fills))
        fill = self.fills[names]
        by_numpy = statements.HAS_NUMPY and fill.is_untouched and self.random.random() < 0.2
        nodes = self.drawn(statements.NUMPY_FILLS if by_numpy else statements.FILLS, e=fill.parts[0])
        fill.is_untouched &= by_numpy
        if nodes:
            fill.parts.pop(0)
        if not fill.parts:
            del self.fills[names]
            fill.scope += names
        return nodes

    def block(self) -> list[Node]:
        header = self.random.choice(statements.BLOCKS)
        with eval(header[5:-1], self.values):
            return [Node(header, self.statements(self.random.randint(1, 4)))]

    def region(self) -> list[Node]:
        if len(self.scopes) > 4:
            return []
        node = Node(f"def {self.fresh('r')}():")
        before = {_storage(value) for value in (*self.held, *filter(torch.is_tensor, self.values.values()))}
        self.open.append(_Open(node, before, len(self.open)))
        self.scopes.append([])
        node.body = self.statements(self.random.choice([2, 4, 6, 9]))
        inner = self.scopes.pop()
        self.fills = {names: fill for names, fill in self.fills.items() if fill.scope is not inner}
        self.closed.append(self.open.pop())
        if inner:
            chosen = self.random.sample(inner, min(len(inner), self.random.randint(1, 3)))
            with_grad = [name for name in inner if is_usable(self.values[name]) and self.values[name].requires_grad]
            chosen += [name for name in with_grad if name not in chosen and self.random.random() < 0.6]
            chosen += [self.random.choice(self.scopes[-1])] if self.scopes[-1] and self.random.random() < 0.1 else []
            node.results = [(name, self.fresh()) for name in chosen]
        else:
            node.results = [(self.names(torch.is_tensor)[0], self.fresh())]
        self.values.update({outer: self.values[name] for name, outer in node.results})
        self.scopes[-1] += [outer for _, outer in node.results]
        return [node]

    def statements(self, number: int) -> list[Node]:
        """Returns about that many statements."""
        nodes: list[Node] = []
        for _ in range(number):
            kinds: dict[Callable[[], list[Node]], float] = {
                lambda: self.drawn(statements.READS, True): 5,
                lambda: self.drawn(statements.VIEWS, True): 5,
                lambda: self.drawn(statements.WRITES): 7,
                self.region: 1.5 if self.open else 3.5,
                self.block: 0.7,
                self.blank: 1,
                self.fill: 3 if self.fills else 0,
                lambda: self.drawn([t for calls in self.modules.values() for t in calls], True): len(self.modules),
            }
            nodes += self.random.choices(list(kinds), list(kinds.values()))[0]()
        return nodes

    def program(self) -> Program:
        nodes = self.setup()
        nodes += self.statements(self.random.choice([5, 8, 12]))
        while not self.closed:
            nodes += self.region()
        with_grad = self.names(lambda v: v.is_floating_point() and v.requires_grad)
        last = with_grad[-1:] + self.random.sample(with_grad, min(len(with_grad), 12))
        for kind in ("part", "loss"):
            nodes.append(Node(f"{kind} = {last[0]}.sum() * 0.5"))
            for name in last[1 : 3 if kind == "part" else None]:
                nodes.append(Node(f"{kind} = {kind} + {self.fill_in(self.random.choice(statements.TERMS), x=name)}"))
        nodes += [Node(f"see('output', {name!r}, {name})") for name in self.scopes[0]]
        if self.random.random() < 0.3 and self.late_share:
            nodes += self.drawn(statements.WRITES)
        nodes += [Node("see('stream', 'torch', torch.get_rng_state())")]
        ending = [Node(text) for text in statements.ENDINGS[self.random.choice(list(statements.ENDINGS))]]
        nodes += [*ending, Node("see_gradients('last', leaves, see)")]
        nodes += [Node(f"see('value', {name!r}, {name})") for name in self.scopes[0]]
        nodes += [Node(f"see_module({name!r}, {name}, see)") for name in self.modules]
        self.made.nodes = nodes
        return self.made

    def setup(self) -> list[Node]:
        """Returns what makes leaves, buffers, masks, indices and modules."""
        shapes = self.random.sample(statements.SHAPES, 2)
        made = [(self.random.choice(shapes), True) for _ in range(self.random.randint(1, 2))]
        made += [(self.random.choice(shapes), False) for _ in range(self.random.randint(1, 2))]
        texts = [f"torch.randn({shape}, dtype={self.dtype}{', requires_grad=True' * needs})" for shape, needs in made]
        texts += [f"torch.zeros({shapes[0]}, dtype={self.dtype})", f"torch.rand({shapes[1]}) > 0.4", "torch.tensor([0, 1])"]
        nodes = [node for text in texts if (node := self.attempt(text, True)) is not None]
        nodes.append(Node(f"leaves = [{', '.join(self.names(lambda v: v.requires_grad))}]"))
        if self.random.random() < 0.3:
            name, (made, calls) = self.fresh("m"), self.random.choice(list(statements.MODULES.items()))
            nodes.append(Node(f"{name} = {made.format(last=shapes[0][-1], dtype=self.dtype)}"))
            exec(nodes[-1].text, self.values)
            self.modules[name] = [call.replace("{m}", name) for call in calls]
            self.held += [*self.values[name].parameters(), *self.values[name].buffers()]
        return nodes


def generate(seed: int) -> Program:
    """Returns the program of a seed."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        return _Generator(seed).program()
