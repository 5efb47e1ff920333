"""Statements about Python state: modules that remember, functions that close over variables, and changes of both.

The class of a module has a few parts, each with names of its own. A statement that is not taken leaves the state as it was.
No statement writes to tensors that modules keep: a rerun may read them where plain autograd has no need of them any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Template
from typing import Any

import torch

from . import patches, places
from . import state_statements as tables
from .draft import Draft, is_float, storage_of
from .features import PATCHES
from .programs import Definition, Line, Node

__all__ = ["STATE", "Stateful"]

_OF_MODULES = ("module_attributes", "module_containers", "counters", "hidden_state", "submodules", "training_flags")
#: Features of the statements here, besides those that patch.
STATE = (*_OF_MODULES, "loop_closures", "places")
_MODULES = (*_OF_MODULES, *patches.PARTS)
_PARTS = tables.PARTS | patches.PARTS
_CHANGES = tables.CHANGES | patches.CHANGES
_CALLED = ("function_attributes", *patches.HOLDERS)


def _containers(value: Any) -> Iterator[Any]:
    """Yields the mutable containers in a value, outer ones first."""
    if isinstance(value, dict | list | set):
        yield value
    if isinstance(value, dict | list | tuple):
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _containers(inner)


def _restore(container: Any, contents: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(contents)


class Stateful(Draft):
    """A draft that knows modules with state."""

    def __init__(self, seed: int, features: frozenset[str]) -> None:
        super().__init__(seed, features)
        self.changes: dict[str, list[str]] = {}  # of a module's state, by its name, as templates
        self.uses: dict[str, list[str]] = {}  # tensors that it has
        self.holders: dict[
            str, str
        ] = {}  # further arguments of functions with state in a holder, by what their names begin with
        self.counting: list[str] = []  # functions that count, by what their names begin with
        self.patched: dict[str, list[str]] = {}  # statements that change what is patched, by the name of its definition
        self.holders_of_patched: dict[str, str] = {}  # further arguments of functions with what is patched, likewise
        self.hooks_for_all: dict[str, str] = {}  # statements that add them, likewise
        self.variables: dict[str, list[str]] = {}  # texts that are values of a variable that functions close over, by its name

    @property
    def has_state(self) -> bool:
        return any(map(self.has, STATE)) or self.has_patches

    @property
    def has_patches(self) -> bool:
        return not PATCHES.isdisjoint(self.features)

    def _state(self) -> list[tuple[Any, Any]]:
        """Returns the containers of all state with copies of them, the modules' own dicts among them."""
        parts = {id(part): part for name in self.changes if name in self.values for part in self.values[name].modules()}
        found = [container for part in parts.values() for container in _containers(vars(part))]
        return [(container, container.copy()) for container in found]

    def _patchable(self) -> list[tuple[Any, str, Any]]:
        """Returns classes of modules and storages of tensors, as objects, names of attributes and values."""
        if not self.has_patches:
            return []
        found = [(self.values[name], "data") for name in self.set_up_names("v") if name in self.values]
        found += [(part, "__class__") for name in self.set_up_names("m") for part in self.values[name].modules()]
        for _, contents in self._state():
            held = contents.values() if isinstance(contents, dict) else contents
            found += [(value, "data") for value in held if isinstance(value, torch.Tensor)]
        return [(owner, name, getattr(owner, name)) for owner, name in found]

    def careful(self, make: Any, text: str) -> list[Node] | None:
        """Returns the nodes that ``make`` makes of a statement; puts the state of modules back if it makes none."""
        before, patchable = self._state(), self._patchable()
        made = make(text)
        if made is None:
            for container, contents in before:
                _restore(container, contents)
            for owner, name, value in patchable:
                if getattr(owner, name) is not value:
                    setattr(owner, name, value)
        self.freeze_state()
        return made

    def freeze_state(self) -> None:
        """Keeps the program from writing to tensors that modules have."""
        for _, contents in self._state():
            for value in contents.values() if isinstance(contents, dict) else contents:
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
                        self.frozen.add(storage_of(tensor))
                        self.closed.add(storage_of(tensor))
                        self.held.append(tensor)

    def _names(self, x: str) -> dict[str, str]:
        """Returns what templates name that does not depend on the statement."""
        value = self.values[x]
        y = self.pick(lambda other: is_float(other) and other.shape == value.shape) or x
        n = str(value.shape[-1]) if value.dim() else "1"
        return {"x": x, "y": y, "n": n, "k": self.random.choice(["0.25", "0.8", "1.2", "-0.7"]), "dtype": str(value.dtype)}

    def stateful_module(self, x: str) -> str:
        """Returns the name of a new module that remembers."""
        name, rank = self.fresh("m"), self.values[x].dim()
        features = [feature for feature in (*_MODULES, "module_state") if self.has(feature)]
        given = self._names(x)
        inits, bodies, changes, uses = [], [], [], []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            feature = self.random.choice(features)
            if feature == "training_flags" and self.has("random") and self.chance(0.4):
                feature = "random"
            part = self.random.choice([part for part in _PARTS[feature] if part.rank <= rank])
            names = {"a": self.fresh(self.random.choice(["state", "_state"])), "b": self.fresh("more")}
            fill = lambda text, names=names: Template(text).safe_substitute({**given, **names})  # noqa: E731
            inits += fill(part.init).split("\n") if part.init else []
            bodies.append(fill(part.forward).split("\n"))
            changes += map(fill, part.changes)
            uses += map(fill, part.uses)
        known = [other for other in self.changes if other in self.values]
        if known and self.chance(0.3):
            child, held = self.random.choice(known), self.fresh("child")
            inits.append(f"self.{held} = {child}")
            bodies.insert(self.random.randint(0, len(bodies)), [f"x = self.{held}(x)"])
        lines = [f"class {name}_class(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in inits]
        rest = self.random.randint(0, len(bodies)) if self.chance(0.35) else len(bodies)
        methods = {"forward": bodies[:rest], "part": bodies[rest:]}
        if methods["part"]:
            ways = tables.METHODS + [tables.REBINDING] * self.has("loop_closures")
            handed = self.random.choice(ways if self.has("nesting") else ways[:1])
            methods["forward"].insert(self.random.randint(0, rest), [handed])
        for method, parts in methods.items():
            if parts:
                lines += [f"    def {method}(self, x):", *(f"        {line}" for part in parts for line in part)]
                lines.append("        return x")
        text = "\n".join([*lines, f"{name} = {name}_class().to({given['dtype']})"])
        self.set_up(Definition(text, name))
        self.changes[name], self.uses[name] = changes, uses
        return name

    def remember(self) -> list[Node] | None:
        """Returns a statement that runs a module with state, or changes it."""
        features = [feature for feature in _MODULES if self.has(feature)]
        x = self.pick()
        if x is None or not features:
            return self.change_state() if self.patched and self.chance(0.5) else None
        if self.chance(0.2):
            return self.change_state()
        known = [name for name in self.changes if name in self.values]
        if known and self.chance(0.25):
            uses = [Template(text).safe_substitute(m=name) for name in known for text in self.uses[name]]
            return self.careful(self.attempt, self.random.choice(uses)) if uses else None
        m = self.random.choice(known) if known and self.chance(0.6) else self.stateful_module(x)
        use = self.random.choice(tables.USES if self.may_nest() else tables.USES[:1])
        used = Template(use).safe_substitute({**self._names(x), "m": m, "o": self.random.choice([*known, m])})
        self.freeze(x, closed="lambda:" in use)
        made = self.careful(self.attempt, used)
        for new in made[0].defines() if made else []:
            self.freeze(new)
        if made is None and m not in known:
            del self.changes[m], self.uses[m]
        return made

    def change_texts(self) -> list[str]:
        """Returns statements that change the state of modules."""
        names = [name for name in self.set_up_names("m") if name in self.values]
        texts = [Template(text).safe_substitute(m=name) for name in names for text in self.changes.get(name, ())]
        for feature in _CHANGES:
            if self.has(feature):
                texts += [Template(text).safe_substitute(m=name) for name in names for text in _CHANGES[feature]]
        texts += [text for made in self.patched.values() for text in made]
        if self.has("storages"):
            texts += self.swapped_leaves()
        return texts

    def swaps(self) -> list[str]:
        """Returns statements that have two tensors of modules, or two sets of them, change storages, in any order."""
        found = [
            text
            for text in self.change_texts()
            if re.match(r"for name, each|(\S+)\.data, (\S+)\.data = \2\.data, \1\.data", text)
        ]
        self.random.shuffle(found)
        return found

    def swapped_leaves(self) -> list[str]:
        """Returns statements that give one leaf, which no region may write to, another storage."""
        leaves = [name for name in self.set_up_names("v") if self.values[name].requires_grad]
        if not leaves:
            return []
        name = self.random.choice(leaves)
        return [f"{name}.data = {name}.data * 0.9", f"{name}.data = {name}.data.clone()"]

    def change_state(self) -> list[Node] | None:
        texts = self.change_texts()
        return self.careful(self.execute, self.random.choice(texts)) if texts else None

    def late_changes(self, likely: float) -> list[Node]:
        """Returns changes for a place outside of all regions, where variables may be rebound too."""
        made: list[Node] = []
        while self.has_state and self.chance(0.5 if made else likely):
            variables = [text for texts in self.variables.values() for text in texts]
            if variables and self.chance(0.6):
                made.append(Line(self.random.choice(variables)))
            else:
                made += self.change_state() or []
        return made

    def count_calls(self, x: str, w: str) -> list[Node] | None:
        """Returns a statement that calls functions which count in a variable that they share."""
        if not self.counting or self.chance(0.4):
            self.counting.append(self.fresh("each"))
            self.set_up(Line(Template(tables.COUNTING.strip()).substitute(l=self.counting[-1])))
            self.setup, self.pending = self.setup + self.pending, []
        template = self.random.choice(tables.COUNTED.strip().split("\n"))
        self.freeze(x, closed=True)
        return self.execute(Template(template).substitute(l=self.random.choice(self.counting), x=x, w=w))

    def call_on_places(self, x: str, w: str) -> list[Node] | None:
        """Returns a statement that calls a function with state in containers and objects."""
        if not self.holders or self.chance(0.4):
            name = self.fresh("each")
            text, more, changes = places.definition(self.random, name)
            self.set_up(Line(text))
            self.setup, self.pending = self.setup + self.pending, []
            self.holders[name], self.variables[name] = more, changes
        name = self.random.choice(list(self.holders))
        self.freeze(x, closed=True)
        made = self.execute(places.statement(self.random, name, self.holders[name], x, w))
        if made is not None:
            self.freeze(w, closed=True)
        return made

    def call_patched(self, x: str, w: str) -> list[Node] | None:
        """Returns a statement that calls a function with what is patched in it."""
        features = [name for name in _CALLED if self.has(name)]
        if not self.holders_of_patched or self.chance(0.4):
            name, feature = self.fresh("each"), self.random.choice(features)
            if feature == "function_attributes":
                text, more, changes = patches.function_definition(self.random, name)
            else:
                text, more, changes = places.definition(self.random, name, patches.HOLDERS[feature])
            self.set_up(Line(text))
            self.setup, self.pending = self.setup + self.pending, []
            self.holders_of_patched[name], self.patched[name] = more, changes
        name = self.random.choice(list(self.holders_of_patched))
        self.freeze(x, closed=True)
        more = self.holders_of_patched[name]
        nested = self.may_nest()
        made = self.execute(places.statement(self.random, name, more, x, w) if nested else f"{w} = {name}_step({x}{more})")
        if made is not None:
            self.freeze(w, closed=True)
        return made

    def hook_for_all(self) -> list[Node] | None:
        """Returns a statement that adds a hook for all modules, or takes such hooks away."""
        if not self.hooks_for_all or self.chance(0.3):
            name = self.fresh("each")
            text, added = self.random.choice(patches.GLOBAL_HOOKS)
            self.set_up(Line(Template(text.strip()).substitute(l=name)))
            self.setup, self.pending = self.setup + self.pending, []
            self.hooks_for_all[name] = Template(added).substitute(l=name)
            self.patched[name] = [self.hooks_for_all[name], f"while {name}_handles: {name}_handles.pop().remove()"]
        return self.execute(self.random.choice([text for made in self.hooks_for_all for text in self.patched[made]]))

    def loop(self) -> list[Node] | None:
        """Returns a statement that runs functions which close over variables that are others afterwards."""
        x = self.pick()
        if x is None or not (self.may_nest() or any(map(self.has, _CALLED))):
            return None
        w, is_outside = self.fresh(), len(self.scopes) == 1
        if not self.may_nest():
            return self.call_patched(x, w)
        if any(map(self.has, _CALLED)) and (self.chance(0.5) or not (self.has("loop_closures") or self.has("places"))):
            return self.call_patched(x, w)
        if self.has("places") and (self.chance(0.3) or not self.has("loop_closures")):
            return self.call_on_places(x, w)
        kind = self.random.choice(["local"] * 4 + ["global"] * 2 * is_outside + ["cells", "counting", "counting"])
        if kind == "counting":
            return self.count_calls(x, w)
        template = self.random.choice(tables.LOOPS[kind])
        if not is_outside and "globals()" in template:
            return None
        l = self.fresh("global" if "globals()" in template else "each")  # noqa: E741
        function, values = self.random.choice(tables.FUNCTIONS)
        modules = [name for name in self.changes if name in self.values] or ["torch.relu"]
        given = self._names(x) | {"w": w, "l": l, "m": self.random.choice(modules), "o": self.random.choice(modules)}
        if "$m" in function + values and modules == ["torch.relu"]:
            return None
        fill = lambda text, **more: Template(text).safe_substitute({**given, **more})  # noqa: E731
        text = fill(template, function=fill(function), values=fill(values)).strip()
        if kind == "local" and "\n" in text:
            text = f"{text}\n{fill(self.random.choice(tables.AFTER_LOOPS))}".strip()
        for name in (given["x"], given["y"]):
            self.freeze(name, closed=True)
        made = self.careful(self.execute, text)
        if made is None:
            return None
        self.freeze(w, closed=True)
        if "global" in l:
            self.variables[l] = [f"globals()['{l}'] = {value}" for value in ("0.3", "torch.cos", "None", "[0.7, 0.2]")]
            self.variables[l].append(f"globals().pop('{l}', None)")
        elif is_outside and re.search(rf"^(for )?{l}\b", text, re.MULTILINE) and f"del {l}" not in text:
            self.variables[l] = [f"{l} = {value}" for value in ("0.3", "torch.cos", "None", "[0.7, 0.2]")]
        return made
