"""Templates of state in containers and objects: what holds it, how a function reaches the holder, and what it does there.

Templates are those of :mod:`.state_statements`. ``$N``, ``$T``, ``$L`` and ``$B`` are the four places of a holder: a number, a
tensor or None, a list, and a dict.
"""

from __future__ import annotations

import dataclasses
import random
from string import Template

__all__ = ["Kind", "definition", "statement"]

_NAMES = {"N": "n", "T": "t", "L": "log", "B": "by"}
_CONTENT = "n=0, t=None, log=[], by={}"

#: Expressions that make a holder, and how its places are written.
_HOLDERS = [
    ("HeldInAttributes()", "h.{}"),
    ("HeldInSlots()", "h.{}"),
    ("HeldInDataclass()", "h.{}"),
    ("HeldBehindProperties()", "h.{}"),
    (f"types.SimpleNamespace({_CONTENT})", "h.{}"),
    ("types.SimpleNamespace(inner=[HeldInAttributes()])", "h.inner[0].{}"),
    (f"dict({_CONTENT})", "h['{}']"),
    (f"collections.OrderedDict({_CONTENT})", "h['{}']"),
    (f"collections.UserDict({_CONTENT})", "h['{}']"),
    (f"collections.defaultdict(list, {_CONTENT})", "h['{}']"),
    ("{'inner': HeldInSlots()}", "h['inner'].{}"),
    ("[0, None, [], {}]", "h[{}]"),
    ("collections.deque([0, None, [], {}])", "h[{}]"),
    ("collections.UserList([0, None, [], {}])", "h[{}]"),
    ("(HeldInAttributes(), 1)", "h[0].{}"),
]

#: What a function does: lines that take ``u`` and leave another ``u`` of its shape.
_STEPS = [
    "$N += 1\nu = u.sin() if $N % 2 else (u * $N).cos()",
    "u = u.sin() if $T is None else (u * $T).tanh()\n$T = u.detach().mean()",
    "u = u.sin() if $T is None else (u + $T).tanh()\n$T = u.sigmoid().mean()",
    "$L.append(float(u.detach().sum()))\nu = (u * (1 + len($L) % 3)).tanh()",
    "$L.append(u.detach().mean())\nu = (u * sum($L[-2:])).cos()",
    "$B[$N] = u.detach().mean()\n$B.pop($N - 2, None)\n$N += 1\nu = (u * sum($B.values())).sin()",
    "$B['stash'] = u.cos()\nu = u.sin().exp()\nu = (u * $B.pop('stash')).tanh()",
    "$L = [*$L, $N]\nu = (u * len($L)).cos()\n$N = len($L)",
    "u = (u * (1 + $N)).sin()",
    "u = u.cos() if $T is None else u * $T",
]

_REACHES = {
    "closure": """
def ${l}_make():
    h = $make
    def step(u):
$body
        return u
    return h, step
${l}_h, ${l}_step = ${l}_make()
""",
    "argument": """
${l}_h = $make
def ${l}_step(u, h):
$body
        return u
""",
    "module": """
class ${l}_class(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.held = $make
    def forward(self, u):
        h = self.held
$body
        return u
${l}_step = ${l}_class()
${l}_h = ${l}_step.held
""",
    "method": """
class ${l}_class:
    def __init__(self):
        self.held = $make
    def step(self, u):
        h = self.held
$body
        return u
${l}_step = ${l}_class().step
${l}_h = ${l}_step.__self__.held
""",
    "global": """
globals()['${l}_global'] = ${l}_h = $make
def ${l}_step(u):
        h = ${l}_global
$body
        return u
""",
}
_LOOK = """
def ${l}_look():
    h = ${l}_h
    return $look
"""

_CHANGES = [
    "$N = 5",
    "$T = torch.tensor(0.3)",
    "$T = None",
    "$L.append(0.25)",
    "$L = [0.5]",
    "$B['caller'] = 1",
    "$B.clear()",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of state.

    Attributes:
        holders: Expressions that make a holder, and how its places are written; None for those of places.
        steps: What a function does, where ``$O`` is the object that has the places, if one has.
        changes: What a caller does.
        look: What is looked at.
    """

    holders: list[tuple[str, str]] | None = None
    steps: list[str] = dataclasses.field(default_factory=lambda: _STEPS)
    changes: list[str] = dataclasses.field(default_factory=lambda: _CHANGES)
    look: str = "$N, $T, $L, $B"


_STATEMENTS = """
$w = run(${l}_step, $x$h)
$w = run(${l}_step, run(${l}_step, $x$h)$h)
$w = run(lambda u: ${l}_step(${l}_step(u$h)$h), $x)
$w = run(lambda u: run(${l}_step, ${l}_step(u$h)$h), $x)
$w = run(lambda u: ${l}_step(run(${l}_step, u$h)$h), $x)
$w = run(lambda f, u, *more: f(u, *more), ${l}_step, run(${l}_step, $x$h)$h)
$w = run(functools.partial(lambda f, u: f(u$h).sin(), ${l}_step), $x)
$w = sum(run(${l}_step, $x$h) for _ in range(3))
$w = ${l}_step($x$h)
"""


def definition(chosen: random.Random, name: str, kind: Kind | None = None) -> tuple[str, str, list[str]]:
    """Returns a definition, the further arguments of what it defines, and statements by which a caller changes the state."""
    kind = kind or Kind()
    make, place = chosen.choice(kind.holders or _HOLDERS)
    reach = chosen.choice(list(_REACHES))
    numbers = {key: str(number) for number, key in enumerate(_NAMES)}
    places = {key: place.format(numbers[key] if "[{}]" in place else word) for key, word in _NAMES.items()}
    places["O"] = place.removesuffix(".{}")
    steps = "\n".join(chosen.choice(kind.steps) for _ in range(chosen.choice([1, 1, 2])))
    body = "\n".join(f"        {line}" for line in Template(steps).substitute(places).split("\n"))
    look = Template(kind.look).substitute(places)
    text = Template(_REACHES[reach].strip() + _LOOK.rstrip()).substitute(places, l=name, make=make, body=body, look=look)
    outside = {key: one.replace("h", f"{name}_h", 1) for key, one in places.items()}
    return text, f", {name}_h" if reach == "argument" else "", [Template(one).substitute(outside) for one in kind.changes]


def statement(chosen: random.Random, name: str, more: str, x: str, w: str) -> str:
    """Returns a statement that calls what :func:`definition` defined.

    Args:
        chosen: Makes the choice.
        name: The name of the definition.
        more: Further arguments.
        x: The argument.
        w: The name of the result.
    """
    return Template(chosen.choice(_STATEMENTS.strip().split("\n"))).substitute(l=name, h=more, x=x, w=w)
