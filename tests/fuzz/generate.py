"""Making programs: kinds of statements, drawn by weight, each of which the draft tries before it is part of the program."""

from __future__ import annotations

import contextlib
import random
import re
import warnings

import torch

from . import ops, statements
from .draft import Scope, is_float, is_usable, storage_of
from .features import CORE, PATCHES
from .patches import HOLDERS
from .programs import CONTAINERS, MODES, Binding, Block, Ending, Line, Node, Program, Region, names_in, walk
from .slots import Slots
from .stateful import STATE, Stateful

__all__ = ["generate"]

_DEEPEST = 4  # regions in regions
_DRAWS = {"python_random": "random.random()", "numpy_random": "np.random.rand()"}
_WEIGHTS = {
    "operators": 4,
    "in_place": 5,
    "ambient": 3,
    "buffers": 3,
    "kernels": 4,
    "module_state": 3,
    "generators": 2,
    "backward_hooks": 3,
    "failures": 2,
    "wrappers": 2,
    "python_random": 2,
    "numpy_random": 2,
}


def generate(seed: int, features: frozenset[str] = CORE) -> Program:
    """Returns the program of a seed and a set of features."""
    for_all = torch.nn.modules.module
    tables = [for_all._global_forward_hooks, for_all._global_forward_pre_hooks]
    before = [(table, dict(table)) for table in tables]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _Generator(seed, features).program()
        finally:
            for table, contents in before:
                table.clear()
                table.update(contents)


class _Generator(Stateful):
    """Draws statements; each method that makes some may fail, and returns None then."""

    def program(self) -> Program:
        self.seed_all()
        if self.has("input_mutation") and self.has("handlers"):  # a handler hides the error that a rerun is at liberty to raise
            self.features -= {self.random.choice(["input_mutation", "handlers"])}
        if self.has("backward_hooks") and self.has("inner_backward"):  # which in a recompute would meet hooks that came later
            self.features -= {self.random.choice(["backward_hooks", "inner_backward"])}
        if self.has("endings") and self.chance(0.5):  # most of them want the leaves as they were
            self.features -= {"step_in_backward"}
        for _ in range(self.random.randint(1, 3)):
            shape = [self.random.randint(1, 4) for _ in range(self.random.choice([1, 2, 2, 2, 3, 3]))]
            self.leaf(shape, self.dtype, needs_grad=True)
        if self.chance(0.3):
            self.leaf([3, 3], self.dtype, needs_grad=False)
        if self.has("side_effects"):
            self.setup.append(Line("log = []"))
        around, tracking = self.surroundings(0.1), []
        for source in self.sources():
            (tracking if self.chance(0.3) else around).append(f"with ckpt_hooks.track_rng({source}):")
        with self.inside(around + tracking):
            body = self.statements(self.random.choice([4, 6, 8, 12, 16]))
            while not any(isinstance(node, Region) for node in walk(body)):
                body += self.region() or []
        for header in tracking:
            body = [Block(header, body)]
        after = self.aftermath()
        if self.has("step_in_backward"):
            leaves = [name for node in self.setup if "requires_grad" in node.text for name in node.defines()]
            leaves = [name for name in leaves if name[0] == "v"]
            self.setup.append(Line(f"step_in_backward([{', '.join(leaves)}])"))
        steps = 2 if self.has("endings") and self.chance(0.3 if self.has_state else 0.15) else 1
        if self.has_patches and self.chance(0.3):
            steps = self.random.choice([2, 3])
        failure, optimizer = None, ""
        if self.has("optimizers") and self.chance(0.3):
            steps, optimizer = max(steps, self.random.choice([2, 3, 4])), self.random.choice(statements.OPTIMIZERS)
        if self.has("failures") and self.chance(0.5):
            # A backward inside of forward runs in a recompute as well.
            has_backward = any(re.search(r"autograd\.grad|backward\(", line) for node in body for line in node.render())
            where = "forward" if has_backward else self.random.choice(["forward", "recompute", "recompute", "backward"])
            steps, failure = max(steps, 2), (where, self.random.randint(1, 4))
        changes = self.late_changes(0.6)
        if self.has_patches and steps > 1:  # from a later step on alone
            changes = [Line(f"if step: {node.text}") if self.is_simple(node) and self.chance(0.4) else node for node in changes]
        if self.has("storages") and self.chance(0.4):  # around forward and back, or once a step
            for text in self.swaps()[:1]:
                body.insert(0, Line(text))
                changes[:0] = [Line(text)] * self.chance(0.8)
        return Program(self.seed, self.setup, body, self.ending(body), after, changes, around, steps, failure, optimizer)

    def seed_all(self) -> None:
        """Seeds the global generators, since what statements draw says whether they do."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        if "np" in self.values:
            self.values["np"].random.seed(self.seed % 2**32)

    def sources(self) -> list[str]:
        """Returns the random sources that are to be tracked."""
        sources = ['"python"'] if self.has("python_random") else []
        sources += ['"numpy"'] if self.has("numpy_random") and "np" in self.values else []
        if self.has("tracked_sources"):
            for _ in range(self.random.randint(1, 2)):
                name, made = self.fresh("g"), self.random.choice(statements.SOURCES)
                if "np" in self.values or "np." not in made:
                    self.set_up(Line(f"{name} = {made.format(seed=self.random.randrange(100))}"))
                    self.tracked.append(name)
        self.take()
        return sources + self.tracked

    def surroundings(self, probability: float) -> list[str]:
        """Returns headers of blocks around a whole part of the program."""
        headers = []
        for feature in ("autocast", "ambient"):
            if self.has(feature) and self.chance(probability):
                more = statements.SURROUNDINGS if feature == "ambient" else []
                header, _ = self.random.choice(self.blocks(feature) + more)
                headers.append(header.format(k=self.random.choice([0.5, 1.5])))
        return headers

    def inside(self, headers: list[str]) -> contextlib.ExitStack:
        """Enters blocks."""
        stack = contextlib.ExitStack()
        for header in headers:
            stack.enter_context(eval(f"_nested({header[5:-1]})", {**self.values, "_nested": _nested}))
        return stack

    def statements(self, number: int) -> list[Node]:
        """Returns about that many statements."""
        body: list[Node] = []
        kinds = {
            self.expression: 10,
            self.write: 3 if self.has("in_place") else 0,
            self.region: 3,
            self.again: 1,
            self.block: 3 if self.has("ambient") else 1.5,
            self.module: 1,
            self.remember: 4.5 if self.has_state else 0,
            self.loop: 2.5 if any(map(self.has, ("loop_closures", "places", "function_attributes", *HOLDERS))) else 0,
            self.inner_backward: 0.7 if self.has("inner_backward") else 0,
            self.side_effect: 0.7 + self.has("backward_hooks") + 0.5 * self.has("failures"),
            self.call: 0.5 + self.has("generators") + self.has("chunks") + self.has("loops") + self.has("threads")
            if any(map(self.has, statements.CALLS))
            else 0,
            self.hook_for_all: 0.7 if self.has("module_hooks") else 0,
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

    def feature(self, tables, only: tuple[str, ...] = ()) -> str | None:
        """Returns one of the features that are on and in a table, by weight."""
        features = [feature for feature in tables if self.has(feature) and (not only or feature in only)]
        weights = [_WEIGHTS.get(feature, 1) for feature in features]
        return self.random.choices(features, weights)[0] if features else None

    def template(self, tables, only: tuple[str, ...] = ()) -> tuple[int, str] | None:
        """Returns the least rank and the text of a template of the features that are on."""
        feature = self.feature(tables, only)
        if feature is None:
            return None
        ranks = tables[feature]
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
        self.stale = bool(saved) and self.chance(0.1)
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
        if storage in self.closed or (storage in self.frozen and not (self.has("input_mutation") and self.chance(0.5))):
            return False
        return storage not in self.saved or self.has("stale_saves")

    def blocks(self, feature: str) -> list[tuple[str, list[str]]]:
        """Returns the blocks of a feature."""
        return [block for block in statements.BLOCKS[feature] if self.has("inference") or "inference_mode" not in block[0]]

    def block(self) -> list[Node] | None:
        feature, x = self.feature(statements.BLOCKS), self.pick()
        if feature is None or x is None:
            return None
        header, footer = self.random.choice(self.blocks(feature))
        header = header.format_map(Slots(self, x))
        self.copying += "hooks" in header or "save_on_cpu" in header
        with self.inside([header] if header.startswith("with ") and "suppress" not in header else []):
            body = self.statements(self.random.randint(1, 5))
        self.copying -= "hooks" in header or "save_on_cpu" in header
        return [Block(header, body, footer)] if body else None

    def module(self) -> list[Node] | None:
        feature = self.feature(statements.MODULES)
        if feature is None:
            return None
        rank, constructor, use = self.random.choice(statements.MODULES[feature])
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
        slots["f"] = name
        given, rest = re.fullmatch(r"{f}\(((?:[^()]|\([^()]*\))*)\)(.*)", use).groups()
        if self.may_nest() and self.chance(0.5):
            slots["input"] = given.format_map(slots)
            ways = statements.WAYS_TO_A_MODULE if given.count("{x}") == 1 else statements.WAYS_TO_A_MODULE[:4]
            use = self.random.choice(ways) + rest
            for name in names_in(slots["input"]):
                self.freeze(name, closed="lambda:" in use)
        return self.attempt(use.format_map(slots))

    def inner_backward(self) -> list[Node] | None:
        x = self.pick(lambda value: is_float(value) and value.requires_grad)
        if x is None or not torch.is_grad_enabled():
            return None
        v, u, w = self.fresh(), self.fresh(), self.fresh()
        slots = Slots(self, x, v=v, u=u, w=w)
        slots["unary_v"] = self.random.choice(ops.UNARY).replace("{x}", v)
        slots["unary_x"] = self.random.choice(ops.UNARY).replace("{x}", x)
        before = frozenset(self.saved)
        made = self.execute(*(text.format_map(slots) for text in self.random.choice(statements.INNER_BACKWARD)))
        self.passing |= self.saved - before
        return made

    def side_effect(self) -> list[Node] | None:
        feature, x = self.feature(statements.SIDE_EFFECTS), self.of_rank(1)
        if feature is None or x is None:
            return None
        template = self.random.choice(statements.SIDE_EFFECTS[feature])
        return self.execute(template.format_map(Slots(self, x, d="0")))

    def may_nest(self) -> bool:
        """Whether there may be a region here."""
        return self.scopes[-1].depth < (_DEEPEST if self.has("nesting") else 1)

    def call(self) -> list[Node] | None:
        """A region that is a function of the prelude or several functions."""
        feature = self.feature(statements.CALLS)
        x = self.of_rank(1) if feature == "chunks" else self.pick()
        if x is None or feature is None or not self.may_nest():
            return None
        for region in self.functions:
            exec("\n".join(region.definition()), self.values)
        self.freeze(x)
        text = self.random.choice(statements.CALLS[feature]).format_map(Slots(self, x))
        for name in names_in(text) - {x}:
            if name.startswith("v"):  # functions of loops close over it
                self.freeze(name, closed=True)
        made = self.attempt(text)
        for name in made[0].defines() if made else []:  # which functions in it may have given to regions of theirs
            self.freeze(name)
        return made

    def aftermath(self) -> list[Node]:
        """Writes after forward: to what regions were given, if nothing else needs it, and to what backward needs."""
        made: list[Node] = []
        values = [(name, self.values[name]) for name in self.scopes[0].names if is_float(self.values[name])]
        values = [(name, storage_of(value)) for name, value in values if storage_of(value) not in self.hooked]
        choices = []
        for feature, storages in (
            ("input_mutation", self.frozen - self.saved - self.closed),
            ("closure_mutation", self.closed - self.saved),
            ("stale_saves", self.saved - self.passing),
        ):
            if self.has(feature) and self.chance(0.15 if feature == "stale_saves" else 0.5):
                choices.append(("v", [name for name, storage in values if storage in storages]))
        if self.has("stale_saves") and self.chance(0.1):
            choices.append(("m", self.set_up_names("m")))
        self.stale = True
        for letter, names in choices:
            if names:
                template = self.random.choice(statements.AFTERMATH[letter])
                made += self.execute(template.format(x=self.random.choice(names), k=self.random.choice([0.5, 1.5]))) or []
        return made

    def region(self) -> list[Node] | None:
        depth = self.scopes[-1].depth
        if not self.may_nest():
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
            bindings.append(Binding(parameter, argument, self.style()))
        if self.has("generators") and self.chance(0.3):
            argument, parameter = self.generator(), self.fresh("g")
            self.setup, self.pending = self.setup + self.pending, []
            self.values[parameter] = self.values[argument]
            scope.generators.append(parameter)
            bindings.append(Binding(parameter, argument, self.style()))
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
            region.change = self.random.randrange(12) if self.chance(0.3) else None
        if self.has("modules") and self.chance(0.1) and not self.is_hiding(region):
            region.wrapper = "Wrapped({})"
        if region.plain():
            self.scopes[-1].functions.append(region)
        return self.take(region)

    def is_simple(self, node: Node) -> bool:
        """Whether a statement may stand behind a colon, and defines nothing."""
        text = node.text if isinstance(node, Line) else "\n"
        return not node.defines() and not re.search(r"\n|^(if|for|while) ", text)

    def is_hiding(self, region: Region) -> bool:
        """Whether there is something to find in a function that nobody finds in a module with the function."""
        text = " ".join(region.definition())
        found = {name[0] for name in names_in(text) - set(region.defines())}
        telling = map(self.has, ("buffers", "generators", "module_state", *STATE, *PATCHES))
        return (not found.isdisjoint("mgf") and any(telling)) or bool(re.search(r"\b(each|global)\d", text))

    def style(self) -> str:
        styles = ["positional"] * 5 + ["keyword", "partial", "partial keyword", *CONTAINERS]
        return self.random.choice(styles) if self.has("containers") else "positional"

    def again(self) -> list[Node] | None:
        """Calls the function of an earlier region once more, with other arguments of the same shapes."""
        if not self.functions or not self.may_nest():
            return None
        region = self.random.choice(self.functions)
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
            if self.chance(0.3):
                ending.draws = ["torch.rand(3)", *(text for name, text in _DRAWS.items() if self.has(name))]
            if self.chance(0.6):
                # Leaves that change in a backward are not there for another one.
                single = ["once", "part", "thread", "no_grad"]
                ending.mode = self.random.choice(single if self.has("step_in_backward") else list(MODES))
            if self.chance(0.4):
                # A function that is called again in backward needs what it closes over.
                regions = [node for node in walk(body) if isinstance(node, Region)]
                lines = [line for region in regions for line in region.definition()]
                lines += [node.text for node in walk(body) if isinstance(node, Line) and re.search(r"lambda|def ", node.text)]
                needed = {name for line in lines for name in names_in(line)}
                if self.has("loop_closures") and self.chance(0.5):
                    # A variable that is gone comes back without the graph behind it, which a backward inside of a region needs.
                    needed = {name for line in lines if "autograd.grad(" in line for name in names_in(line)}
                leaves = {name for node in self.setup for name in node.defines()}
                ending.discarded = [name for name in names if name not in needed | leaves | set(ending.outputs)]
        if self.has_state and not self.has("failures") and "{between}" in MODES[ending.mode]:
            ending.between = self.late_changes(0.6)
        ending.around = next(iter(self.surroundings(0.3)[-1:]), "") if self.has("ambient") else ""
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
