"""Templates of what keeps Python state: parts of modules that remember, loops whose functions close over their variables.

Templates are those of :class:`string.Template`. ``$x`` is the tensor at hand, ``$y`` one of its shape, ``$n`` its last size,
``$k`` a number, ``$m`` and ``$o`` modules, ``$w`` the value that a statement defines, and ``$a``, ``$b``, ``$l`` new names.
"""

from __future__ import annotations

import dataclasses

__all__ = [
    "AFTER_LOOPS",
    "CHANGES",
    "COUNTED",
    "COUNTING",
    "FUNCTIONS",
    "LOOPS",
    "METHODS",
    "PARTS",
    "REBINDING",
    "USES",
    "Part",
    "part",
]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a module's forward, with the state that it keeps.

    Attributes:
        init: Lines of ``__init__``.
        forward: Lines of ``forward``, which take ``x`` and leave another ``x`` of its shape.
        changes: Statements by which a caller changes the state of module ``$m``.
        uses: Expressions of ``$m`` that are tensors, once it has been called.
        rank: The least rank of ``x``.
    """

    init: str
    forward: str
    changes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    rank: int = 0


def part(init: str, forward: str, *changes: str, uses: tuple[str, ...] = (), rank: int = 0) -> Part:
    return Part(init.strip(), forward.strip(), changes, uses, rank)


_ATTRIBUTES = [
    part(
        "self.$a = 1.0",
        """
x = (x * self.$a).sin()
self.$a += 0.5
""",
        *("$m.$a = 0.25", "$m.$a *= 0.5", "$m.$a = torch.tensor(0.7)"),
    ),
    part(
        "self.$a = None",
        """
x = x.sin() if self.$a is None else (x * self.$a).tanh()
self.$a = x.detach().abs().mean()
""",
        *("$m.$a = None", "$m.$a = torch.tensor(0.3)", "$m.$a = 0.4"),
    ),
    part(
        "self.$a = 'sin'",
        """
x = getattr(torch, self.$a)(x)
self.$a = {'sin': 'cos', 'cos': 'tanh', 'tanh': 'sin'}[self.$a]
""",
        *("$m.$a = 'tanh'", "$m.$a = 'cos'"),
    ),
    part(
        "self.$a = False",
        """
x = x.cos() if self.$a else x.sigmoid()
self.$a = not self.$a
""",
        *("$m.$a = not $m.$a", "$m.$a = True"),
    ),
    part(  # with history
        "self.$a = None",
        """
if self.$a is not None and self.$a.shape == x.shape:
    x = (x + self.$a).tanh()
self.$a = x
""",
        *("$m.$a = None", "$m.$a = None if $m.$a is None else $m.$a.detach()"),
        uses=("$m.$a", "$m.$a.sin()"),
    ),
    part(
        "self.$a = None",
        """
x = x.cos()
self.$a = x.square().mean()
x = x.exp().tanh()
""",
        "$m.$a = None",
        uses=("$m.$a", "$m.$a + 1"),
    ),
    part(
        "self.$a = torch.ones(())",
        """
scale = self.$a
self.$a = self.$a * 0.9
x = (x * scale).sin() * self.$a
""",
        *("$m.$a = torch.zeros(())", "$m.$a = 0.5"),
    ),
    part(
        "self.$a = 0.5",
        """
if hasattr(self, '$a'):
    x = (x * self.$a).sin()
    del self.$a
else:
    x = x.tanh()
    self.$a = 0.7
""",
        "$m.$a = 0.9",
        "vars($m).pop('$a', None)",
    ),
    part(
        "",
        """
x = (x * getattr(self, '$a', 1.2)).tanh()
self.$a = x.detach().mean()
""",
        *("$m.$a = 0.1", "vars($m).pop('$a', None)"),
    ),
    part(
        "self.$a = 1.0",
        """
x = x.sin() * self.$a
self.$a = 0.5 * self.$a + 0.5 * x.detach().abs().mean()
""",
        *("$m.$a = 1.0", "$m.$a = 2"),
    ),
    part(  # what is kept is part of what is handed out
        "self.$a = self.$b = None",
        """
x = x.sin()
self.$b, self.$a = self.$a, x.detach()
if self.$b is not None and self.$b.shape == x.shape:
    x = x * self.$b
""",
        *("$m.$a = None", "$m.$a, $m.$b = $m.$b, $m.$a"),
    ),
    part(
        "self.$a = torch.nn.Parameter(torch.tensor(0.5))\nself.$b = None",
        """
self.$b = self.$a * 2 if self.$b is None else self.$b.detach() * 0.5 + self.$a
x = (x * self.$b).sin()
""",
        "$m.$b = None",
    ),
    part(  # what a hook makes for forward
        """
self.$a, self.$b = 1.0, torch.nn.Parameter(torch.tensor(0.5))
self.register_forward_pre_hook(lambda module, args: setattr(module, '$a', module.$b * 2))
""",
        "x = (x * self.$a).sin()",
        *("$m.$a = 0.5", "$m.$a = torch.tensor(0.2)"),
    ),
    part(
        "self.$a = torch.tensor(0.5, requires_grad=True)",
        "x = (x * self.$a).sin()",
        *("$m.$a = 0.5", "$m.$a = $m.$a.detach()", "$m.$a = torch.ones(())"),
    ),
    part(
        "self.$a = (0.5, 'sin', None)\nself.$b = 'cos'",
        """
factor, self.$b, last = (*self.$a[:1], self.$b, self.$a)
x = getattr(torch, self.$a[1])(x * factor) if last[2] is None else x.cos()
self.$a = (factor + 0.1, self.$b, None if self.$a[2] else 'last')
""",
        *("$m.$b = 'tanh'", "$m.$a = (1.5, 'cos', None)"),
    ),
]

_CONTAINERS = [
    part(
        "self.$a = {'ema': None, 'calls': 0}",
        """
ema = self.$a.get('ema')
x = x.sin() if ema is None else (x - ema).cos()
self.$a['ema'] = x.detach().mean() if ema is None else 0.9 * ema + 0.1 * x.detach().mean()
self.$a['calls'] = self.$a.get('calls', 0) + 1
""",
        *("$m.$a['ema'] = None", "$m.$a.clear()", "$m.$a['ema'] = torch.tensor(0.2)", "$m.$a = {}", "$m.$a.update(ema=0.3)"),
    ),
    part(
        "self.$a = []",
        """
x = (x + sum(self.$a, 0.0)).sin()
self.$a.append(x.detach().mean())
""",
        *("$m.$a.clear()", "$m.$a.append(0.5)", "$m.$a[:] = [0.1]", "$m.$a = []", "$m.$a.insert(0, -0.3)"),
    ),
    part(
        "self.$a = []",
        """
if len(self.$a) > 2:
    self.$a.pop(0)
self.$a.append(x.detach().abs().amax())
x = x * torch.stack([torch.as_tensor(value) for value in self.$a]).mean() * 0.2
""",
        *("$m.$a.clear()", "$m.$a.reverse()", "$m.$a.append(0.4)"),
    ),
    part(
        "self.$a = [0.5, 1.0, -0.7]",
        """
factor = self.$a.pop(0)
x = (x * factor).tanh()
self.$a.append(factor)
""",
        *("$m.$a.reverse()", "$m.$a[0] = 1.4", "$m.$a.sort()", "$m.$a.append(0.3)", "$m.$a = [0.9, 0.1]"),
    ),
    part(
        "self.$a = set()",
        """
x = x.cos() * x if tuple(x.shape) in self.$a else x.sin()
self.$a.add(tuple(x.shape))
""",
        *("$m.$a.clear()", "$m.$a = {(7,)}"),
    ),
    part(
        "self.$a = {0, 1}",
        """
x = (x * (1 + len(self.$a)) * 0.3).sin()
self.$a.discard(min(self.$a, default=None)) if len(self.$a) > 3 else self.$a.add(max(self.$a, default=0) + 1)
""",
        *("$m.$a.clear()", "$m.$a.add(9)", "$m.$a |= {'name', None}"),
    ),
    part(
        "self.$a = (0.5, None)",
        """
factor, last = self.$a
x = (x * factor).sin() if last is None else (x * factor + last).cos()
self.$a = (factor * 0.9, x.detach().mean())
""",
        *("$m.$a = (1.5, None)", "$m.$a = (*$m.$a[:1], torch.tensor(0.2))"),
    ),
    part(
        "self.$a = {'parts': [{'calls': 0, 'mean': None}], 'names': ('sin', 'cos')}",
        """
entry = self.$a['parts'][0]
x = getattr(torch, self.$a['names'][entry['calls'] % 2])(x)
entry['calls'] += 1
x = x if entry['mean'] is None else x - entry['mean']
entry['mean'] = x.detach().mean()
""",
        *("$m.$a['parts'][0]['calls'] += 1", "$m.$a['parts'][0]['mean'] = None", "$m.$a['names'] = ('cos', 'tanh')"),
        "$m.$a['parts'].insert(0, {'calls': 1, 'mean': 0.5})",
    ),
    part(
        "self.$a = ([0], {})",
        """
self.$a[0][0] += 1
x = x.sin() * self.$a[0][0] ** -0.5
x = x + self.$a[1].get('last', 0)
self.$a[1]['last'] = x.detach().amin()
""",
        *("$m.$a[0][0] = 5", "$m.$a[1].clear()", "$m.$a = ([1], {'last': 0.5})"),
    ),
    part(  # of what has a history
        "self.$a = []",
        """
x = x.cos()
self.$a.append(x.square().mean())
x = x.exp().tanh()
""",
        "$m.$a.clear()",
        uses=("sum($m.$a)", "$m.$a[-1]", "torch.stack($m.$a)"),
    ),
    part(
        "self.$a = {}",
        """
if 'out' in self.$a and self.$a['out'].shape == x.shape:
    x = x + self.$a['out'].detach()
x = x.sin()
self.$a['out'] = x
""",
        *("$m.$a.clear()", "$m.$a.pop('out', None)"),
        uses=("$m.$a['out']",),
    ),
    part(  # one list of two names
        "self.$a = [1.0]\nself.$b = self.$a",
        """
x = (x * self.$b[0]).sin()
self.$a[0] *= 0.9
""",
        *("$m.$b[0] = 0.5", "$m.$b = [0.5]"),
    ),
    part(
        "self.$a = {'calls': 0}",
        """
x = x.sin() if self.$a['calls'] % 2 else x.sigmoid()
self.$a = {**self.$a, 'calls': self.$a['calls'] + 1}
""",
        *("$m.$a['calls'] += 1", "$m.$a = {'calls': 3}"),
    ),
    part(
        "self.$a = []",
        """
if self.$a:
    x = (x * self.$a.pop()).cos()
else:
    self.$a.extend([0.5, 0.8])
    x = x.tanh()
""",
        *("$m.$a.clear()", "$m.$a.append(1.1)"),
    ),
]

_COUNTERS = [
    part(
        "self.$a = 0",
        """
x = x.sin() if self.$a % 2 else x.cos() * x
self.$a += 1
""",
        *("$m.$a += 1", "$m.$a = 0"),
    ),
    part(
        "self.$a = 0",
        """
self.$a += 1
x = (x * min(1.0, self.$a / 3)).sin()
""",
        *("$m.$a += 1", "$m.$a = -1"),
    ),
    part(
        "self.$a = None",
        """
if self.$a is None or self.$a.shape != x.shape[-1:]:
    self.$a = torch.linspace(0.5, 1, x.shape[-1])
    x = x.tanh()
x = (x * self.$a).sin()
""",
        *("$m.$a = None", "$m.$a = torch.ones($n)"),
        rank=1,
    ),
    part(
        "self.$a = 0",
        """
x = [torch.sin, torch.cos, torch.tanh][self.$a % 3](x)
self.$a = self.$a + 1
""",
        *("$m.$a += 1", "$m.$a = 7"),
    ),
    part(
        "self.$a = 2",
        """
self.$a -= 1
if self.$a <= 0:
    x = (x * x).sigmoid()
    self.$a = 3
x = x.sin()
""",
        *("$m.$a = 1", "$m.$a -= 1"),
    ),
    part(
        "self.$a = 0",
        """
if self.$a < 2:
    self.$a += 1
    x = x.exp().tanh()
else:
    x = x.sin()
""",
        *("$m.$a = 0", "$m.$a = 2"),
    ),
    part(
        "self.$a = True",
        """
if self.$a:
    self.$a = False
    x = x.sigmoid() * x
x = x.cos()
""",
        *("$m.$a = True", "$m.$a = False"),
    ),
    part(
        "self.$a = 0",
        """
if self.training:
    self.$a += 1
x = (x * 0.9 ** self.$a).sin()
""",
        "$m.$a += 1",
    ),
    part(
        "self.$a = 0\nself.$b = []",
        """
for number in range(1 + self.$a % 2):
    x = x.sin()
    self.$b.append(number)
self.$a = len(self.$b)
""",
        *("$m.$a += 1", "$m.$b.clear()"),
    ),
    part(
        "self.$a = 0",
        """
self.$a += int(torch.is_grad_enabled())
x = x.sin().cos() if self.$a % 2 else x.tanh()
""",
        "$m.$a += 1",
    ),
]

_HIDDEN = [
    part(
        "self.$a = None",
        """
h = None if self.$a is None else self.$a.detach()
x = x.tanh() if h is None or h.shape != x.shape else (x + 0.5 * h).tanh()
self.$a = x
""",
        *("$m.$a = None", "$m.$a = None if $m.$a is None else $m.$a.detach()", "$m.$a = $m.$a * 0"),
        uses=("$m.$a",),
    ),
    part(
        "self.$a = None\nself.$b = torch.nn.GRUCell($n, $n)",
        """
flat = x.reshape(-1, $n)
h = None if self.$a is None or self.$a.shape != flat.shape else self.$a.detach()
self.$a = self.$b(flat, h)
x = self.$a.reshape(x.shape)
""",
        *("$m.$a = None", "$m.$a = $m.$a.detach()"),
        uses=("$m.$a",),
        rank=1,
    ),
    part(
        "self.$a = None\nself.$b = torch.nn.LSTMCell($n, $n)",
        """
flat = x.reshape(-1, $n)
known = self.$a is not None and self.$a[0].shape == flat.shape
self.$a = self.$b(flat, tuple(h.detach() for h in self.$a) if known else None)
x = self.$a[0].reshape(x.shape) * x
""",
        *("$m.$a = None", "$m.$a = tuple(h.detach() for h in $m.$a)"),
        uses=("$m.$a[1]",),
        rank=1,
    ),
    part(
        "self.$a = torch.zeros(())",
        """
self.$a = 0.9 * self.$a + 0.1 * x.detach().mean()
x = (x / (1 + self.$a.abs())).sin()
""",
        *("$m.$a = torch.zeros(())", "$m.$a = $m.$a + 1"),
    ),
    part(
        "self.$a = torch.zeros(())",
        """
x = (x - self.$a).sin()
with torch.no_grad():
    self.$a = torch.lerp(self.$a, x.detach().float().mean(), 0.3)
""",
        "$m.$a = torch.ones(())",
    ),
    part(
        "self.$a = {}",
        """
if x.shape[-1] not in self.$a:
    self.$a[x.shape[-1]] = torch.linspace(0.5, 1, x.shape[-1])
    x = x.cos()
x = (x * self.$a[x.shape[-1]]).sin()
""",
        *("$m.$a.clear()", "$m.$a[$n] = torch.ones($n)", "$m.$a.pop($n, None)", "$m.$a = {}"),
        rank=1,
    ),
    part(
        "self.$a = {}\nself.$b = 0",
        """
x = (x + self.$a.get(self.$b - 1, 0)).sin()
self.$a[self.$b] = x.detach().mean()
self.$a.pop(self.$b - 3, None)
self.$b += 1
""",
        *("$m.$a.clear()", "$m.$b = 0", "$m.$a[$m.$b] = torch.tensor(0.3)"),
    ),
    part(
        "self.$a = None",
        """
rows = x.detach().reshape(-1, x.shape[-1])
fits = self.$a is not None and self.$a.shape[-1] == x.shape[-1]
self.$a = torch.cat([self.$a.to(rows.dtype), rows])[-5:] if fits else rows
x = (x + self.$a.mean(0)).tanh()
""",
        *("$m.$a = None", "$m.$a = $m.$a[:1]"),
        rank=1,
    ),
    part(
        "self.$a = [None, None]",
        """
for place, h in enumerate(self.$a):
    if h is not None and h.shape == x.shape:
        x = x + 0.5 * h
    x = x.tanh()
    self.$a[place] = x.detach()
""",
        *("$m.$a = [None, None]", "$m.$a[0] = None", "$m.$a.reverse()"),
    ),
]

_MASK = """
if x.shape not in self.$a:
    self.$a[x.shape] = torch.rand(x.shape) > 0.3
x = (x * self.$a[x.shape]).sin()
"""

_FLAGS = [
    part("", "x = x.sin() if self.training else x.cos() * x"),
    part(
        "self.$a = True",
        """
if self.$a:
    x = x.tanh() * x
x = x.sin()
""",
        *("$m.$a = False", "$m.$a = not $m.$a"),
    ),
    part(
        "self.$a = torch.nn.BatchNorm1d($n)",
        "x = self.$a(x.reshape(-1, $n)).reshape(x.shape).sin()",
        *("$m.$a.eval()", "$m.$a.train()", "$m.$a.momentum = 0.5", "$m.$a.track_running_stats = False"),
        rank=2,
    ),
    part(
        "self.$a = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.BatchNorm1d($n))",
        "x = self.$a(x.reshape(-1, $n)).reshape(x.shape)",
        *("$m.$a.eval()", "$m.$a[1].train()", "$m.$a[1].eval()"),
        rank=2,
    ),
    part(  # part of a forward is in another mode
        "self.$a = torch.nn.BatchNorm1d($n)",
        """
self.$a.eval()
x = self.$a(x.reshape(-1, $n)).reshape(x.shape)
self.$a.train(self.training)
""",
        "$m.$a.train()",
        rank=2,
    ),
    part(
        "",
        """
x = x.cos() if self.training else x.tanh()
self.train(not self.training)
""",
    ),
    part(
        "self.$a = torch.nn.ELU(0.5)",
        """
x = self.$a(x)
self.$a.alpha *= 1.5
""",
        *("$m.$a.alpha = 0.1", "$m.$a.inplace = False"),
    ),
]

_DROPOUTS = [
    part("", "x = torch.nn.functional.dropout(x, 0.3, self.training).sin()"),
    part(
        "self.$a = torch.nn.Dropout(0.3)",
        "x = self.$a(x).cos()",
        *("$m.$a.eval()", "$m.$a.train()", "$m.$a.p = 0.8"),
    ),
    part(
        "self.$a = torch.nn.Dropout(0.2)",
        """
x = self.$a(x)
self.$a.p = 0.9 - self.$a.p
""",
        *("$m.$a.p = 0.5", "$m.$a.eval()"),
    ),
    part("self.$a = {}", _MASK, *("$m.$a.clear()",)),
    part(
        "self.$a = 0",
        """
x = torch.nn.functional.dropout(x, 0.2 * (self.$a % 3), self.training)
self.$a += 1
""",
        "$m.$a = 2",
    ),
]

_WRITTEN = [  # to, in place
    part(
        "self.$a = torch.zeros(())",
        """
x = (x - self.$a.clone()).sin()
self.$a.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
""",
        "$m.$a = torch.ones(())",
    ),
    part(
        "self.$a = {'ema': torch.zeros(()), 'calls': torch.tensor(0)}",
        """
self.$a['calls'].add_(1)
self.$a['ema'].lerp_(x.detach().float().mean(), 0.3)
x = (x + self.$a['ema'].clone()).sin() if self.$a['calls'] % 2 else x.cos()
""",
    ),
    part(
        "self.$a = [torch.zeros(3), 0]",
        """
self.$a[1] = (self.$a[1] + 1) % 3
self.$a[0][self.$a[1]] = x.detach().mean()
x = (x + self.$a[0].sum()).sin()
""",
    ),
]

_SUBMODULES = [
    part(
        "self.$a = torch.nn.Tanh()",
        "x = self.$a(x).sin()",
        *("$m.$a = torch.nn.Sigmoid()", "$m.$a = torch.nn.Identity()", "$m._modules['$a'] = torch.nn.SiLU()"),
    ),
    part(
        "self.$a = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear($n, $n))",
        "x = self.$a(x)",
        *("$m.$a[0] = torch.nn.SiLU()", "$m.$a[-1] = torch.nn.Linear($n, $n).to($dtype)", "$m.$a[0] = $m.$a[-1]"),
        *("$m.$a.append(torch.nn.Softsign())", "$m.$a.insert(1, torch.nn.BatchNorm1d(1).eval())", "del $m.$a[-1]"),
        rank=1,
    ),
    part(
        "self.$a = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.ELU(), torch.nn.Softplus()])",
        """
for each in self.$a:
    x = each(x) * x
""",
        *("$m.$a[0], $m.$a[-1] = $m.$a[-1], $m.$a[0]", "del $m.$a[0]", "$m.$a.insert(0, torch.nn.Sigmoid())"),
        *("$m.$a = torch.nn.ModuleList([torch.nn.GELU()])", "$m.$a.extend([torch.nn.Tanh()])"),
    ),
    part(
        "self.$a = torch.nn.ModuleDict({'one': torch.nn.Tanh(), 'other': torch.nn.Dropout(0.3)})",
        """
for each in self.$a.values():
    x = each(x).cos()
""",
        *("$m.$a['one'] = torch.nn.SiLU()", "$m.$a.pop('other', None)", "$m.$a['more'] = torch.nn.Tanh()", "$m.$a.clear()"),
    ),
    part(
        "self.$a = torch.nn.Tanh()",
        """
x = self.$a(x).sin()
self.$a = torch.nn.SiLU() if type(self.$a) is torch.nn.Tanh else torch.nn.Tanh()
""",
        "$m.$a = torch.nn.GELU()",
    ),
    part(
        "self.$a = torch.nn.Tanh()",
        """
former, self.$a = self.$a, torch.nn.Softplus()
x = self.$a(x)
self.$a = former
x = self.$a(x) * x
""",
        "$m.$a = torch.nn.GELU()",
    ),
]

#: Parts of modules by feature.
PARTS = {
    "submodules": _SUBMODULES,
    "module_attributes": _ATTRIBUTES,
    "module_containers": _CONTAINERS,
    "counters": _COUNTERS,
    "hidden_state": _HIDDEN,
    "training_flags": _FLAGS,
    "random": _DROPOUTS,
    "module_state": _WRITTEN,
}

#: How ``forward`` hands over to the rest of it, which is a method ``part``.
METHODS = [
    "x = self.part(x)",
    "x = run(self.part, x)",
    "x = run(lambda v: self.part(v), x)",
    "x = run(functools.partial(self.part), x)",
]
#: One that closes over a variable, which is another one afterwards.
REBINDING = "x = run(lambda: self.part(x))"

#: Expressions that call modules which keep the shape of what they are given.
USES = [
    "$m($x)",
    "run($m, $x)",
    "run($m, $x)",
    "run($m.forward, $x)",
    "run(functools.partial($m), $x)",
    "run(functools.partial($m.forward, $x))",
    "run(lambda v: $m(v), $x)",
    "run(lambda: $m($x))",
    "run(lambda v, m=$m: m(v), $x)",
    "run(lambda m, v: m(v), $m, $x)",
    "run(lambda v, *, m: m(v), $x, m=$m)",
    "run(lambda held, v: held[0](v), [$m], $x)",
    "run(lambda held, v: held['key'](v), {'key': $m}, $x)",
    "run(Wrapped($m), $x)",
    "run(lambda v: $m($m(v)), $x)",
    "run(lambda v: $m($o(v)), $x)",
    "run(lambda v: $m(run($o, v)), $x)",
    "run(lambda v: run($m, run($m, v)), $x)",
    "run($o, run($m, $x))",
    "run(torch.nn.Sequential($m, torch.nn.Tanh(), $o), $x)",
    "run((lambda inner: lambda v: inner(v))($m), $x)",
    "in_segments(run, [$m, $o, lambda v: v.tanh()], 2, $x)",
    "in_segments(run, [$m, $m], 2, $x)",
    "in_segments(run, [lambda v: $m(v), torch.nn.Tanh(), $o], 1, $x)",
]

#: Statements that change any module.
CHANGES = {
    "training_flags": [
        "$m.train()",
        "$m.eval()",
        "$m.train(not $m.training)",
        "$m.training = not $m.training",
        "for part in $m.modules(): part.training = not part.training",
        "for part in list($m.modules())[1:]: part.eval()",
        "for part in list($m.modules())[1:]: part.train()",
    ],
}

_RUNS = """
(lambda u: (u * $l).sin()) : 0.5, 1.5, -0.7
(lambda u: u * $l + $l) : $y, $x
(lambda u: u.sin() * $l) : $y.detach(), 0.5, $x
(lambda u: u * $l.sin()) : $y * 0.5, $x.detach(), $y
(lambda u: $l(u).tanh()) : torch.sin, torch.cos, lambda t: t * $k
(lambda u: $l(u)) : F.relu, lambda t: t.cos() * t, torch.nn.Tanh()
(lambda u: $l(u)) : $m, torch.sin, $o
(lambda u: $l(u) + u) : $m, $o, $m
(lambda u: $l(u.sin())) : torch.nn.Linear($n, $n, dtype=$dtype), torch.nn.LayerNorm($n, dtype=$dtype)
(lambda u: (u * $l[0] + $l[1]).sin()) : [0.5, $y], [1.5, 0.3]
(lambda u: (u * $l['k']).sin() + $l['v']) : {'k': 0.5, 'v': $y}, {'k': $k, 'v': $x}
(lambda u: getattr(torch, $l)(u)) : 'sin', 'cos', 'tanh'
(lambda u: u.sin() if $l is None else (u * $l).cos()) : None, 0.5
(lambda u: u.sin() if $l else u.cos()) : True, False
(lambda u: (lambda t: t * $l)(u).sin()) : 0.5, 1.5
(lambda u: sum(u.sin() * $l for _ in range(2))) : 0.5, 0.25
(lambda u: (u * $l[0]()).sin()) : (lambda: 0.5,), (lambda: $k,)
(lambda u: $l.forward(u)) : $m, torch.nn.Tanh(), $o
(lambda u: [t * $l for t in (u.sin(), u.cos())][1]) : 0.5, $y
"""

_LOOPS = [
    """
$w = $x
for $l in ($values):
    $w = run($function, $w)
""",
    """
$w = $x
for $l in ($values):
    $w = $w + run($function, $x)
""",
    """
$w = $x
for $l in ($values):
    $w = run(lambda u: run($function, u).sin(), $w)
""",
    """
$w = $x
for $l in ($values):
    def ${l}_inner(u):
        return ($function)(u).tanh()
    $w = run(${l}_inner, $w)
""",
    """
$w = $x
for $l in ($values):
    ${l}_inner = $function
    $w = run(lambda u: ${l}_inner(u).sin(), $w)
""",
    """
$w = $x
for $l in ($values):
    ${l}_inner = $function
    ${l}_outer = lambda u: ${l}_inner(u).tanh()
    $w = run(lambda u: run(${l}_outer, u), $w)
""",
    """
$w = $x
for $l in ($values):
    $w = run(functools.partial($function), $w)
""",
    """
$w = $x
for $l in ($values):
    $w = in_segments(run, [$function, torch.nn.Tanh(), $function], 2, $w)
""",
    """
${l}_values = [$values]
$w = $x
for $l in range(len(${l}_values)):
    $w = run(lambda u: (lambda $l: ($function)(u))(${l}_values[$l]), $w)
""",
    "$w = sum(run($function, $x) for $l in ($values))",
    "$w = sum([run($function, $x) for $l in ($values)])",
    """
$w = $x
for $l in ($values):
    $w = run(lambda: ($function)($w))
""",
    """
$l = ($values)[0]
$w = run($function, $x)
$l = ($values)[1]
$w = $w + run($function, $x)
""",
    """
$l = ($values)[0]
$w = run($function, run($function, $x))
""",
]

_GLOBALS = [
    """
$w = $x
for value in ($values):
    globals()['$l'] = value
    $w = run($function, $w)
""",
    """
globals()['$l'] = ($values)[0]
$w = run($function, $x)
globals()['$l'] = ($values)[1]
""",
    """
globals()['$l'] = ($values)[0]
$w = run(lambda u: run($function, u).sin(), $x)
globals()['$l'] = ($values)[1]
""",
    """
globals()['$l'] = ($values)[0]
$w = run($function, $x)
""",
]

#: Functions that share a variable and write to it, and statements that call them.
COUNTING = """
def ${l}_make():
    count = 0
    def step(u):
        nonlocal count
        count += 1
        return u.sin() if count % 2 else (u * count).cos()
    def scale(u):
        return (u * (1 + count)).tanh()
    def look():
        return count
    return step, scale, look
${l}_step, ${l}_scale, ${l}_look = ${l}_make()
"""
COUNTED = """
$w = run(${l}_step, $x)
$w = run(${l}_step, run(${l}_step, $x))
$w = run(${l}_scale, run(${l}_step, $x))
$w = run(lambda u: ${l}_scale(${l}_step(u)), $x)
$w = run(lambda u: ${l}_scale(${l}_step(u)), $x)
$w = run(lambda u: run(${l}_scale, ${l}_step(u)), $x)
$w = run(lambda u: ${l}_step(run(${l}_step, u)), $x)
$w = run(lambda u: run(${l}_step, run(${l}_scale, ${l}_step(u))), $x)
$w = sum(run(${l}_step, $x) for _ in range(3))
$w = run(lambda f, u: f(u), ${l}_step, run(${l}_step, $x))
$w = run(lambda fs, u: fs[1](fs[0](u)), [${l}_step, ${l}_scale], $x)
$w = run(functools.partial(lambda f, u: ${l}_scale(f(u)), ${l}_step), $x)
$w = in_segments(run, [${l}_step, ${l}_scale, ${l}_step], 2, $x)
$w = ${l}_step($x)
$w = ${l}_scale($x)
"""

_CELLS = [
    """
def ${l}_make():
    last = $x.detach().mean()
    def step(u):
        nonlocal last
        u = (u - last).sin()
        last = u.detach().mean()
        return u
    def look():
        return last
    return step, look
${l}_step, ${l}_look = ${l}_make()
$w = run(${l}_step, run(${l}_step, $x))
""",
    """
def ${l}_make():
    state = $y
    def step(u):
        nonlocal state
        state = (u + state).tanh()
        return state * u
    def look():
        return state
    return step, look
${l}_step, ${l}_look = ${l}_make()
$w = run(${l}_step, run(${l}_step, $x))
""",
    """
def ${l}_again(u, times=2):
    return u * $k if times == 0 else run(${l}_again, u.sin(), times - 1)
$w = run(${l}_again, $x)
""",
    """
$l = 0.5
def ${l}_again(u, times=2):
    return u * $l if times == 0 else ${l}_again(u.sin(), times - 1)
$w = run(${l}_again, $x)
$l = 1.5
""",
    """
globals()['$l'] = 0
def ${l}_step(u):
    global $l
    $l += 1
    return u.sin() if $l % 2 else (u * $l).cos()
$w = run(${l}_step, run(${l}_step, $x))
""",
]


def _functions() -> list[tuple[str, str]]:
    """Returns functions that read ``$l``, each with values for it."""
    return [tuple(line.rsplit(" : ", 1)) for line in _RUNS.strip().split("\n")]


#: What follows a loop: its variable is another one, or gone.
AFTER_LOOPS = ["", "", "$l = None", "$l = 1.1", "del $l"]

#: Statements with functions that close over variables, as (template, functions): those with ``$l`` as a local, a global, and
#: those that stand for themselves.
LOOPS = {"local": _LOOPS, "global": _GLOBALS, "cells": _CELLS}
FUNCTIONS = _functions()
