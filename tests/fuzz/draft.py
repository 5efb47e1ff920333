"""A program in the making: each statement is tried before it is taken.

The draft keeps the values that the program's variables have so far, executes every statement on them, and takes it if it runs
and its results are small and bounded. So programs are valid by construction, and the vocabulary needs no rules of shapes. What
plain autograd would complain of in backward alone, a write to a value that was saved, it finds by watching what is saved.
"""

from __future__ import annotations

import contextlib
import random

import torch

from .features import ABSENT
from .programs import Line, Node, Region, listed, names_in
from .scripts import base_namespace

__all__ = ["Draft", "Scope", "is_float", "is_usable", "storage_of"]

_LARGEST = 160  # elements of a value
_BOUND = 30.0


def is_usable(value: object) -> bool:
    """Whether a value is a tensor, and not a view that nobody may use any more since its base was written to."""
    try:
        return isinstance(value, torch.Tensor) and (value.grad_fn is None or True)
    except RuntimeError:
        return False


def is_float(value: object) -> bool:
    return is_usable(value) and value.dtype.is_floating_point


def storage_of(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


class Scope:
    """The names of one function, and how deep in regions it stands."""

    def __init__(self, depth: int) -> None:
        self.names: list[str] = []
        self.functions: list[Region] = []
        self.generators: list[str] = []
        self.depth = depth


class Draft:
    """The state of a program in the making, and how statements come to be part of it."""

    def __init__(self, seed: int, features: frozenset[str]) -> None:
        self.seed = seed
        self.features = features - ABSENT
        self.random = random.Random(seed)
        self.values = base_namespace()
        self.values["run"] = lambda function, *args, **kwargs: function(*args, **kwargs)
        self.values["log"], self.values["see"] = [], lambda kind, name, value: None
        self.setup: list[Line] = []
        self.pending: list[Line] = []
        self.scopes = [Scope(0)]
        self.count = 0
        self.dtype = self.random.choice(["torch.float64", "torch.float32"])
        self.frozen: set[int] = set()  # storages that regions read from outside: not to be written to
        self.closed: set[int] = set()  # those of them that regions close over
        self.hooked: set[int] = set()  # storages of tensors with hooks: not to be written to either
        self.saved: set[int] = set()  # storages that autograd saved
        self.passing: set[int] = set()  # those of them that a backward inside forward alone had saved
        self.held: list[torch.Tensor] = []  # keeps those storages, so that no other gets the same address
        self.tracked: list[str] = []  # random sources that the package is told of
        self.stale = False
        self.copying = 0  # how many blocks there are around whose hooks copy what is saved

    def has(self, feature: str) -> bool:
        return feature in self.features

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    @property
    def visible(self) -> list[str]:
        return [name for scope in self.scopes for name in scope.names]

    @property
    def functions(self) -> list[Region]:
        """Those of earlier regions that another call may be written of."""
        return [region for scope in self.scopes for region in scope.functions]

    def pick(self, suits=is_float) -> str | None:
        """Returns a name to read whose value suits, the later ones rather, or None."""
        here = [name for name in self.scopes[-1].names if suits(self.values[name])]
        outside = []
        if self.has("closures") and len(self.scopes) > 1 and (not here or self.chance(0.2)):
            outside = [name for scope in self.scopes[:-1] for name in scope.names if suits(self.values[name])]
        found = outside or here
        if not found:
            return None
        name = found[-1 - min(int(self.random.expovariate(0.4)), len(found) - 1)]
        if not outside and not self.values[name].requires_grad:  # another chance for what has a gradient
            name = self.random.choice(found)
        if outside:
            self.freeze(name)
        return name

    def own(self) -> str | None:
        """Returns a tensor with a history that was made in this function and that no region knows yet, or None.

        Nothing was or will be written to it: torch 2.13 crashes on a hook on a view whose base has had one and was written to.
        """
        here = [(name, self.values[name]) for name in self.scopes[-1].names if is_float(self.values[name])]
        unknown = [name for name, value in here if value.grad_fn is not None and storage_of(value) not in self.frozen]
        name = unknown[-1] if unknown else None
        if name is None or self.values[name].is_inference() or self.values[name]._version:
            return None
        self.hooked.add(storage_of(self.values[name]))
        return name

    def freeze(self, name: str, *, closed: bool = False) -> None:
        if isinstance(self.values[name], torch.Tensor):
            self.frozen.add(storage_of(self.values[name]))
            if closed or (len(self.scopes) > 1 and name not in self.scopes[-1].names):
                self.closed.add(storage_of(self.values[name]))

    def leaf(self, shape, dtype: str, *, needs_grad: bool) -> str:
        name = self.fresh()
        size = ", ".join(map(str, shape)) or "()"
        suffix = ", requires_grad=True" if needs_grad else ""
        self.set_up(Line(f"{name} = torch.randn({size}, dtype={dtype}{suffix})"))
        self.setup += self.pending
        self.scopes[0].names += [name for line in self.pending for name in line.defines()]
        self.pending = []
        return name

    def set_up(self, line: Line) -> None:
        """Executes a line of the setup, which is outside of all blocks, and keeps it if the next statement is taken."""
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng():
            exec(line.text, self.values)
        self.pending.append(line)
        for name in line.defines():
            if name.startswith("v"):
                self.freeze(name)

    def parameter(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Returns a leaf of a shape: one there is, or a new one, which stands in the setup if its statement is taken."""
        leaves = self.set_up_names("v")
        fitting = [name for name in leaves if self.values[name].shape == shape and self.values[name].dtype == dtype]
        if fitting and self.chance(0.6):
            name = self.random.choice(fitting)
            self.freeze(name)
            return name
        name = self.fresh()
        size = ", ".join(map(str, shape))
        suffix = "" if self.chance(0.15) else ", requires_grad=True"
        self.set_up(Line(f"{name} = torch.randn({size}, dtype={dtype}{suffix})"))
        return name

    def set_up_names(self, letter: str) -> list[str]:
        return [name for node in self.setup for name in node.defines() if name.startswith(letter)]

    def generator(self) -> str:
        given = self.scopes[-1].generators
        if given and self.chance(0.5):
            return self.random.choice(given)
        present = [name for name in self.set_up_names("g") if isinstance(self.values[name], torch.Generator)]
        if present and self.chance(0.7):
            return self.random.choice(present)
        name = self.fresh("g")
        self.set_up(Line(f"{name} = torch.Generator().manual_seed({self.random.randrange(100)})"))
        return name

    @contextlib.contextmanager
    def watching(self):
        """Notes what autograd saves, which must not be written to afterwards.

        Raises:
            ValueError: If the statement itself writes to what it saves, as ``x.mul_(x)`` does.
        """

        def pack(tensor):
            saved.append((tensor.detach(), -1 if tensor.is_inference() else tensor._version))
            return saved[-1][0]

        saved: list[tuple[torch.Tensor, int]] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        if not self.stale and any(version not in (-1, tensor._version) for tensor, version in saved):
            raise ValueError("writes to what it saves")
        self.held += (tensor for tensor, _ in saved)
        new = {storage_of(tensor) for tensor, _ in saved}
        self.saved |= new
        self.passing -= new

    def attempt(self, text: str) -> list[Node] | None:
        """Executes an expression; returns the statement that gives its value names, or None if it will not do."""
        try:
            self.refuse(text)
            with self.watching():
                result = eval(text, self.values)
            several = isinstance(result, tuple | list)
            results = list(result) if several else [result]
            if not results or not all(map(self.fits, results)):
                return self.drop()
        except Exception:
            return self.drop()
        names = [self.fresh() for _ in results]
        self.values.update(zip(names, results, strict=True))
        self.scopes[-1].names += names
        comma = "," if several and len(names) == 1 else ""
        return self.take(Line(f"{listed(names)}{comma} = {text}"))

    def fits(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_complex() or value.numel() == 0 or value.numel() > _LARGEST:
            return False
        return value.dim() <= 4 and (not is_float(value) or bool((value.detach().abs() <= _BOUND).all()))

    def execute(self, *texts: str) -> list[Node] | None:
        """Executes statements; returns them, or None if one of them raises or the last defines what will not do."""
        lines = [Line(text) for text in texts]
        names = lines[-1].defines()
        try:
            self.refuse(*texts)
            for line in lines:
                with self.watching():
                    exec(line.text, self.values)
        except Exception:
            return self.drop()
        if not all(self.fits(self.values[name]) for name in names):
            return self.drop()
        self.scopes[-1].names += names
        return self.take(*lines)

    def refuse(self, *texts: str) -> None:
        """Raises if statements would not do the same in two plain runs: rrelu saves noise that it has yet to fill."""
        if self.copying:
            for text in texts:
                mentioned = [str(self.values[name]) for name in names_in(text) if name.startswith("m")]
                regions = [line for scope in self.scopes for f in scope.functions if f.name in text for line in f.definition()]
                if any("rrelu" in part.lower() for part in (text, *mentioned, *regions)):
                    raise ValueError(text)

    def take(self, *nodes: Node) -> list[Node]:
        self.setup += self.pending
        self.scopes[0].names += [name for line in self.pending for name in line.defines() if name.startswith("v")]
        self.pending = []
        return list(nodes)

    def drop(self) -> None:
        self.pending = []
