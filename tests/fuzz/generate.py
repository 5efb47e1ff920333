"""Making programs: kinds of statements, drawn by weight, each of which the draft tries before it is part of the program."""

from __future__ import annotations

import contextlib
import warnings

import torch

from . import ops, statements
from .draft import Draft, Scope, is_float, is_usable, storage_of
from .features import CORE
from .programs import MODES, Binding, Block, Ending, Line, Node, Program, Region, names_in, walk
from .slots import Slots

__all__ = ["generate"]

_DEEPEST = 4  # regions in regions
_WEIGHTS = {"operators": 4, "in_place": 5}


def generate(seed: int, features: frozenset[str] = CORE) -> Program:
    """Returns the program of a seed and a set of features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Generator(seed, features).program()


class _Generator(Draft):
    """Draws statements; each method that makes some may fail, and returns None then."""

    def program(self) -> Program:
        torch.manual_seed(self.seed)
        for _ in range(self.random.randint(1, 3)):
            shape = [self.random.randint(1, 4) for _ in range(self.random.choice([1, 2, 2, 2, 3, 3]))]
            self.leaf(shape, self.dtype, needs_grad=True)
        if self.chance(0.3):
            self.leaf([3, 3], self.dtype, needs_grad=False)
        if self.has("side_effects"):
            self.setup.append(Line("log = []"))
        around = self.random.choice(statements.BLOCKS["autocast"])[0] if self.has("autocast") and self.chance(0.1) else ""
        with eval(around[5:-1], self.values) if around else contextlib.nullcontext():
            body = self.statements(self.random.choice([4, 6, 8, 12, 16]))
            while not any(isinstance(node, Region) for node in walk(body)):
                body += self.region() or []
        if self.has("step_in_backward"):
            leaves = [name for node in self.setup if "requires_grad" in node.text for name in node.defines()]
            self.setup.append(Line(f"step_in_backward([{', '.join(leaves)}])"))
        steps = 2 if self.has("endings") and self.chance(0.15) else 1
        return Program(self.seed, self.setup, body, self.ending(body), around, steps)

    def statements(self, number: int) -> list[Node]:
        """Returns about that many statements."""
        body: list[Node] = []
        kinds = {
            self.expression: 10,
            self.write: 3 if self.has("in_place") else 0,
            self.region: 3,
            self.again: 1,
            self.block: 1.5,
            self.module: 1,
            self.inner_backward: 0.7 if self.has("inner_backward") else 0,
            self.side_effect: 0.7,
        }
        while len(body) < number:
            (make,) = self.random.choices(list(kinds), list(kinds.values()))
            for _ in range(6):
                made = make()
                if made:
                    body += made
                    break
            else:
                number -= 1
        return body

    def template(self, tables, only: tuple[str, ...] = ()) -> tuple[int, str] | None:
        """Returns the least rank and the text of a template of the features that are on."""
        features = [feature for feature in tables if self.has(feature) and (not only or feature in only)]
        if not features:
            return None
        ranks = tables[self.random.choices(features, [_WEIGHTS.get(feature, 1) for feature in features])[0]]
        (rank,) = self.random.choices(list(ranks), [len(templates) for templates in ranks.values()])
        return rank, self.random.choice(ranks[rank])

    def of_rank(self, rank: int) -> str | None:
        return self.pick(lambda value: is_float(value) and value.dim() >= rank)

    def expression(self, only: tuple[str, ...] = ()) -> list[Node] | None:
        found = self.template(ops.EXPRESSIONS, only)
        x = self.of_rank(found[0]) if found else None
        return None if x is None else self.attempt(found[1].format_map(Slots(self, x)))

    def write(self) -> list[Node] | None:
        found = self.template(statements.IN_PLACE)
        if found is None:
            return None
        rank, template = found
        here = [name for name in self.scopes[-1].names if self.writable(self.values[name]) and self.values[name].dim() >= rank]
        saved = [name for name in here if storage_of(self.values[name]) in self.saved]
        self.stale = bool(saved) and self.chance(0.3)
        here = saved if self.stale else [name for name in here if name not in saved]
        first: list[Node] = []
        if here and self.chance(0.7):
            x = self.random.choice(here)
        else:
            source = self.of_rank(rank)
            if source is None:
                return None
            made = self.attempt(self.random.choice(["{}.clone()", "{} * 1", "{} + 0", "torch.zeros_like({})"]).format(source))
            if made is None:
                return None
            x, first = self.scopes[-1].names[-1], made
        made = self.execute(template.format_map(Slots(self, x)))
        self.stale = False
        return first + (made or []) or None

    def writable(self, value: object) -> bool:
        if not is_float(value) or (value.is_leaf and value.requires_grad):
            return False
        storage = storage_of(value)
        if storage in self.hooked:
            return False
        if storage in self.frozen and not (self.has("input_mutation") and self.chance(0.5)):
            return False
        return storage not in self.saved or self.has("stale_saves")

    def block(self) -> list[Node] | None:
        chosen = [
            block
            for feature in statements.BLOCKS
            if self.has(feature)
            for block in self.random.sample(statements.BLOCKS[feature], 1)
        ]
        x = self.pick()
        if not chosen or x is None:
            return None
        header, footer = self.random.choice(chosen)
        header = header.format_map(Slots(self, x))
        if header.startswith("with ") and "suppress" not in header:
            context = eval(f"_nested({header[5:-1]})", {**self.values, "_nested": _nested})
        else:
            context = contextlib.nullcontext()
        self.copying += "hooks" in header or "save_on_cpu" in header
        with context:
            body = self.statements(self.random.randint(1, 5))
        self.copying -= "hooks" in header or "save_on_cpu" in header
        return [Block(header, body, footer)] if body else None

    def module(self) -> list[Node] | None:
        features = [feature for feature in statements.MODULES if self.has(feature)]
        if not features:
            return None
        rank, constructor, use = self.random.choice(statements.MODULES[self.random.choice(features)])
        x = self.of_rank(rank)
        if x is None:
            return None
        slots = Slots(self, x)
        present = [name for node in self.setup for name in node.defines() if name.startswith("m")]
        if present and self.chance(0.2):
            name = self.random.choice(present)
        else:
            name = self.fresh("m")
            self.set_up(Line(f"{name} = {constructor.format_map(slots)}.to({self.values[x].dtype})"))
        if "({x})" in use and self.chance(0.4):
            use = "run({f}, {x})" + use.split("({x})")[1]
            self.freeze(x)
        slots["f"] = name
        return self.attempt(use.format_map(slots))

    def inner_backward(self) -> list[Node] | None:
        x = self.pick(lambda value: is_float(value) and value.requires_grad)
        if x is None or not torch.is_grad_enabled():
            return None
        v, u, w = self.fresh(), self.fresh(), self.fresh()
        slots = Slots(self, x, v=v, u=u, w=w)
        unary = [text for text in ops.EXPRESSIONS["operators"][0][:40] if set("dbyzP").isdisjoint(text.split("{")[1:])]
        slots["unary_v"] = self.random.choice(unary).replace("{x}", v)
        slots["unary_x"] = self.random.choice(unary).replace("{x}", x)
        return self.execute(*(text.format_map(slots) for text in self.random.choice(statements.INNER_BACKWARD)))

    def side_effect(self) -> list[Node] | None:
        features = [feature for feature in statements.SIDE_EFFECTS if self.has(feature)]
        x = self.of_rank(1)
        if not features or x is None:
            return None
        template = self.random.choice(statements.SIDE_EFFECTS[self.random.choice(features)])
        return self.execute(template.format_map(Slots(self, x, d="0")))

    def region(self) -> list[Node] | None:
        depth = self.scopes[-1].depth
        if depth >= (_DEEPEST if self.has("nesting") else 1):
            return None
        candidates = [name for name in self.visible if is_usable(self.values[name])]
        picked = [self.pick(), *self.random.sample(candidates, min(len(candidates), self.random.randint(0, 2)))]
        name, scope = self.fresh("f"), Scope(depth + 1)
        bindings = []
        for argument in dict.fromkeys(argument for argument in picked if argument):
            if self.chance(0.1) and len(picked) > 1:  # a closure only
                continue
            parameter = self.fresh()
            self.values[parameter] = self.values[argument]
            self.freeze(argument)
            scope.names.append(parameter)
            styles = ["positional"] * 5 + ["keyword", "list", "dict", "partial", "partial keyword"]
            style = self.random.choice(styles) if self.has("containers") else "positional"
            bindings.append(Binding(parameter, argument, style))
        parameters = list(scope.names)
        self.scopes.append(scope)
        body = self.statements(self.random.randint(1, max(2, 8 - depth)))
        inner = [name for name in scope.names if name not in parameters]
        self.scopes.pop()
        if not inner:
            return None
        differentiable = [name for name in inner if self.values[name].requires_grad]
        results = [(differentiable or inner)[-1]]
        if self.chance(0.5):
            results += self.random.sample(inner, min(len(inner), self.random.randint(1, 2)))
        if parameters and self.chance(0.1):
            results.append(self.random.choice(parameters))
        pairs = [(self.fresh(), result) for result in dict.fromkeys(results)]
        for outer, result in pairs:
            self.values[outer] = self.values[result]
        self.scopes[-1].names += [outer for outer, _ in pairs]
        region = Region(name, bindings, body, pairs)
        if self.has("containers"):
            region.packing = self.random.choice(["tuple", "tuple", "tuple", "list", "dict", "nested"])
            region.forgets = self.chance(0.2)
        if self.has("modules") and self.chance(0.1):
            region.wrapper = "Wrapped({})"
        if region.plain():
            self.scopes[-1].functions.append(region)
        return self.take(region)

    def again(self) -> list[Node] | None:
        """Calls the function of an earlier region once more, with other arguments of the same shapes."""
        functions = [region for scope in self.scopes for region in scope.functions]
        if not functions or self.scopes[-1].depth >= _DEEPEST:
            return None
        region = self.random.choice(functions)
        arguments = []
        for binding in region.bindings:
            old = self.values[binding.argument]
            alike = [name for name in self.visible if _alike(self.values[name], old)]
            arguments.append(self.random.choice(alike) if alike else binding.argument)
        exec("\n".join(region.definition()), self.values)
        made = self.attempt(f"run({', '.join([region.name, *arguments])})")
        # What it hands out, it may have handed to regions of its own as well.
        for name in [*arguments, *made[0].defines()] if made else []:
            self.freeze(name)
        return made

    def ending(self, body: list[Node]) -> Ending:
        names = self.scopes[0].names
        kept = [name for name in names if is_float(self.values[name]) and self.values[name].grad_fn is not None]
        if not kept:
            return Ending("once", [], [])
        chosen = self.random.sample(kept, min(len(kept), self.random.randint(1, 4)))
        if kept[-1] not in chosen:
            chosen.append(kept[-1])
        ending = Ending("once", list(dict.fromkeys([*chosen, *(name for name in names if self.chance(0.2))])), chosen)
        if self.has("endings"):
            ending.draws = self.chance(0.3)
            if self.chance(0.6):
                # Leaves that change in a backward are not there for another one.
                single = ["once", "part", "thread", "no_grad"]
                ending.mode = self.random.choice(single if self.has("step_in_backward") else list(MODES))
            if self.chance(0.4):
                # A function that is called again in backward needs what it closes over.
                regions = [node for node in walk(body) if isinstance(node, Region)]
                needed = {name for region in regions for line in region.definition() for name in names_in(line)}
                leaves = {name for node in self.setup for name in node.defines()}
                ending.discarded = [name for name in names if name not in needed | leaves | set(ending.outputs)]
        return ending


def _alike(one: object, other: object) -> bool:
    if not is_usable(one) or not is_usable(other):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


@contextlib.contextmanager
def _nested(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
