"""Templates of programs that patch what they run: hooks, forwards, classes, storages of tensors, attributes of functions.

Templates are those of :mod:`.state_statements`; what holds state is as in :mod:`.places`.
"""

from __future__ import annotations

import random
from string import Template

from .places import Kind
from .state_statements import Part, part

__all__ = ["CHANGES", "GLOBAL_HOOKS", "HOLDERS", "PARTS", "function_definition"]

_HOOKS = [
    part(  # a hook removes itself
        "self.$a, self.$b = torch.nn.Tanh(), 0",
        """
def ${a}_scale(module, args):
    self.$b += 1
    ${a}_handle.remove()
    return (args[0] * 0.7,)
${a}_handle = self.$a.register_forward_pre_hook(${a}_scale)
x = self.$a(x)
""",
        *("$m.$a.register_forward_pre_hook(halve_input)", "$m.$a.register_forward_hook(halve_output)", "$m.$b += 1"),
    ),
    part(  # one from before the first forward goes in it
        """
self.$a = torch.nn.Sigmoid()
self.$b = [self.$a.register_forward_hook(lambda module, args, output: output.sin() + 0.2)]
""",
        """
x = self.$a(x) * x
if self.$b:
    self.$b.pop().remove()
""",
        *("while $m.$b: $m.$b.pop().remove()", "$m.$b.append($m.$a.register_forward_hook(halve_output))"),
        "$m.$b.append($m.$a.register_forward_hook(halve_output, prepend=True))",
    ),
    part(  # forwards add hooks that stay
        "self.$a = torch.nn.Softsign()",
        """
x = self.$a(x).sin()
if len(self.$a._forward_hooks) < 3:
    self.$a.register_forward_hook(lambda module, args, output: output * 0.8 + 0.1)
""",
        *("$m.$a.register_forward_pre_hook(halve_input)", "$m.$a._forward_hooks.popitem() if $m.$a._forward_hooks else None"),
    ),
    part(
        """
self.$a, self.$b = Stretched(), [0]
def ${a}_shift(module, args, kwargs):
    self.$b[0] += 1
    return args, {**kwargs, 'factor': kwargs.get('factor', 1.0) + 0.25}
self.$a.register_forward_pre_hook(${a}_shift, with_kwargs=True)
""",
        "x = self.$a(x, factor=0.5 + self.$b[0] % 2)",
        "$m.$a.register_forward_pre_hook(lambda module, args, kwargs: (args, {'factor': 0.3}), with_kwargs=True, prepend=True)",
        "$m.$a.register_forward_hook(lambda module, args, kwargs, output: output * len(kwargs), with_kwargs=True)",
        *("$m.$b[0] += 1", "$m.$a._forward_pre_hooks.popitem() if $m.$a._forward_pre_hooks else None"),
    ),
    part(
        "self.$a, self.$b = Stretched(), []",
        """
self.$b.append(self.$a.register_forward_hook(
    lambda module, args, kwargs, output: output * kwargs['factor'], with_kwargs=True, prepend=len(self.$b) % 2 == 1))
x = self.$a(x, factor=0.9)
if len(self.$b) > 1:
    self.$b.pop(0).remove()
""",
        *("$m.$a.register_forward_hook(halve_output, prepend=True)", "[handle.remove() for handle in $m.$b]"),
    ),
    part(  # the order of two hooks changes
        """
self.$a, self.$b = torch.nn.Tanh(), 0
self.$a.register_forward_hook(lambda module, args, output: output + 0.5)
""",
        """
x = self.$a(x)
if self.$b < 2:
    self.$a.register_forward_hook(lambda module, args, output: output * 0.5, prepend=self.$b == 0)
self.$b += 1
""",
        *("$m.$b = 0", "$m.$a.register_forward_hook(halve_output, prepend=True)"),
        "$m.$a._forward_hooks.move_to_end(next(iter($m.$a._forward_hooks)))",
    ),
    part(  # hooks that keep what they see
        """
self.$a, self.$b = torch.nn.Tanh(), []
self.$a.register_forward_hook(lambda module, args, output: self.$b.append(output.detach().mean()))
""",
        """
x = self.$a(x).sin()
x = x + self.$b[-1] * len(self.$b)
""",
        *("$m.$b.clear()", "$m.$a.register_forward_hook(halve_output)"),
    ),
    part(
        """
self.$a, self.$b = torch.nn.Sigmoid(), None
def ${a}_note(module, args, output):
    self.$b = output
self.$a.register_forward_hook(${a}_note)
""",
        "x = self.$a(x).sin().exp().tanh()",
        *("$m.$b = None", "$m.$a.register_forward_hook(halve_output, always_call=True)"),
        uses=("$m.$b.sin()",),
    ),
    part(  # of the module itself
        """
self.$a = 0
def ${a}_first(module, args):
    module.$a += 1
    module.$b.remove()
    return (args[0] * 0.6,)
self.$b = self.register_forward_pre_hook(${a}_first)
""",
        "x = x.sin() * (1 + self.$a)",
        *("$m.register_forward_hook(halve_output)", "$m.$b.remove()", "$m.$a = 0"),
    ),
    part(
        "self.$a = self.register_forward_hook(lambda module, args, output: output * 0.7)",
        """
x = x.sin()
self.$a.remove()
self.$a = self.register_forward_hook(lambda module, args, output: output.cos())
""",
        "$m.$a.remove()",
    ),
    part(  # hooks of parts, for the length of a forward
        "self.$a, self.$b = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Softplus()), 0",
        """
${a}_handles = [each.register_forward_hook(halve_output) for each in self.$a]
x = self.$a(x)
self.$b += len(${a}_handles)
for each in ${a}_handles:
    each.remove()
x = self.$a(x)
""",
        *("$m.$a[0].register_forward_hook(halve_output)", "$m.$a.register_forward_pre_hook(halve_input)"),
    ),
    part(  # hooks that register hooks
        """
self.$a, self.$b = torch.nn.Tanh(), torch.nn.Sigmoid()
self.$a.register_forward_hook(lambda module, args, output: (
    None if self.$b._forward_hooks else self.$b.register_forward_hook(halve_output)) and None)
""",
        "x = self.$b(self.$a(x))",
        *("$m.$b._forward_hooks.clear()", "$m.$a._forward_hooks.clear()", "$m.$b.register_forward_pre_hook(halve_input)"),
    ),
]

_FORWARDS = [
    part(
        "self.$a = torch.nn.Tanh()",
        """
x = self.$a(x).sin()
if 'forward' in vars(self.$a):
    del self.$a.forward
else:
    self.$a.forward = torch.cos
""",
        *("$m.$a.forward = torch.sigmoid", "vars($m.$a).pop('forward', None)"),
        "$m.$a.forward = types.MethodType(lambda self, x: x.sin() * 0.5, $m.$a)",
    ),
    part(
        "self.$a, self.$b = torch.nn.Sigmoid(), torch.nn.Tanh()\nself.$a.forward = self.$b.forward",
        "x = (self.$a(x) * x).sin()",
        *("vars($m.$a).pop('forward', None)", "$m.$a.forward, $m.$b.forward = $m.$b.forward, $m.$a.forward"),
        *("$m.$a.forward = scaled($m.$a.forward)", "$m.$a.forward = functools.partial(torch.clamp, min=0.1)"),
    ),
    part(  # set for the length of a call
        "self.$a = torch.nn.Tanh()",
        """
${a}_former = self.$a.forward
self.$a.forward = lambda v: ${a}_former(v) * 0.5
x = self.$a(x)
self.$a.forward = ${a}_former
x = self.$a(x).cos()
""",
        *("$m.$a.forward = torch.sin", "vars($m.$a).pop('forward', None)"),
    ),
    part(
        "self.$a = torch.nn.Tanh()",
        """
self.$a.forward = scaled(self.$a.forward)
x = self.$a(x)
del self.$a.forward
x = self.$a(x).sin()
""",
        *("$m.$a.forward = torch.cos", "vars($m.$a).pop('forward', None)"),
    ),
    part(  # one more wrapper with each call
        "self.$a, self.$b = torch.nn.Softsign(), 0",
        """
x = self.$a(x) + self.$b
self.$b += 1
self.$a.forward = scaled(self.$a.forward)
""",
        *("vars($m.$a).pop('forward', None)", "$m.$b = 0"),
    ),
    part(  # the module's own, from the first call on
        "self.$a = 0",
        """
x = x.sin() * x
def ${a}_later(v):
    self.$a += 1
    return (v * self.$a).cos()
self.forward = ${a}_later
""",
        *("vars($m).pop('forward', None)", "$m.$a += 1"),
    ),
    part(
        "self.$a = lambda x: (x * 0.5).tanh()",
        """
x = x.sin().cos()
self.forward, self.$a = self.$a, self.forward
""",
        *("$m.forward = $m.$a", "vars($m).pop('forward', None)"),
    ),
    part(
        "self.$a = torch.nn.Tanh()\nself.$a.forward = types.MethodType(lambda self, x: x.sin() + 0.1, self.$a)",
        "x = self.$a(x) * x",
        *("del $m.$a.forward", "$m.$a.forward = type($m.$a).forward.__get__($m.$a)", "$m.$a.forward = torch.sin"),
    ),
]

_CLASSES = [
    part(
        "self.$a = torch.nn.Tanh()",
        """
x = self.$a(x).sin()
self.$a.__class__ = torch.nn.Sigmoid if type(self.$a) is torch.nn.Tanh else torch.nn.Tanh
""",
        *("$m.$a.__class__ = torch.nn.Softsign", "$m.$a.__class__ = torch.nn.Tanh"),
    ),
    part(  # another one for the length of a call
        "self.$a = torch.nn.Tanh()",
        """
${a}_former, self.$a.__class__ = type(self.$a), torch.nn.Softsign
x = self.$a(x)
self.$a.__class__ = ${a}_former
x = self.$a(x) * x
""",
        *("$m.$a.__class__ = torch.nn.Sigmoid", "$m.$a.__class__ = torch.nn.Tanh"),
    ),
    part(
        "self.$a, self.$b = torch.nn.Tanh(), 0",
        """
self.$b += 1
if self.$b == 2:
    self.$a.__class__ = halving(type(self.$a))
x = self.$a(x) + self.$b
""",
        *("$m.$a.__class__ = torch.nn.Tanh", "$m.$b = 0", "$m.$a.__class__ = halving(type($m.$a))"),
    ),
    part(  # the module's own
        "self.$a = type(self)",
        """
x = x.sin() * x
self.__class__ = halving(self.$a) if type(self) is self.$a else self.$a
""",
        *("$m.__class__ = $m.$a", "$m.__class__ = halving($m.$a)"),
    ),
    part(  # of what is no module
        "self.$a = Rises()\nself.$b = self.$a.log",
        """
x = self.$a.bend(x)
if len(self.$b) % 2:
    self.$a.__class__ = Falls
""",
        *("$m.$a.__class__ = Falls", "$m.$a.__class__ = Rises"),
    ),
    part(
        "self.$a = [torch.nn.Tanh(), torch.nn.Sigmoid()]",
        """
for each in self.$a:
    x = each(x) * x
first, last = self.$a
first.__class__, last.__class__ = type(last), type(first)
""",
        *("$m.$a[0].__class__ = torch.nn.Softplus", "$m.$a.reverse()"),
    ),
]

_STORAGES = [
    part(
        "self.register_buffer('$a', torch.tensor(0.5))",
        """
x = (x + self.$a).sin()
self.$a.data = 0.9 * self.$a + 0.1 * x.detach().mean().to(self.$a.dtype)
""",
        *("$m.$a.data = torch.full_like($m.$a, 0.3)", "$m.$a.data = $m.$a.data.clone()"),
    ),
    part(
        "self.register_buffer('$a', torch.linspace(0.5, 1, $n))",
        """
self.$a.data = self.$a.data.roll(1)
x = (x * self.$a.clone()).sin()
self.$a.data = 0.9 * self.$a.data
x = x + self.$a
""",
        *("$m.$a.data = torch.ones_like($m.$a)", "$m.$a.data = $m.$a.data.flip(0)"),
        rank=1,
    ),
    part(  # autograd saves the buffer itself, and reads in backward what it is by then
        "self.register_buffer('$a', torch.tensor(0.5))",
        "x = (x * self.$a).sin()",
        *("$m.$a.data = torch.full_like($m.$a, 0.3)", "$m.$a.data = $m.$a.data.clone()"),
    ),
    part(
        "self.$a = torch.nn.Parameter(torch.tensor(0.7), requires_grad=False)",
        """
self.$a.data = self.$a.data * 0.9
x = (x + self.$a).tanh()
""",
        *("$m.$a.data = torch.full_like($m.$a, -0.4)", "$m.$a.data = $m.$a.data.clone()"),
    ),
    part(  # an average that stands in for what is trained
        "self.$a = torch.nn.Parameter(torch.tensor(0.8))\nself.register_buffer('$b', torch.tensor(0.6))",
        "x = (x + self.$a).sin()",
        *["$m.$a.data, $m.$b.data = $m.$b.data, $m.$a.data"] * 3,
        "$m.$b.data = 0.9 * $m.$b + 0.1 * $m.$a.data",
    ),
    part(
        "self.$a = torch.nn.Linear($n, $n, dtype=$dtype)\n"
        "self.$b = {name: each.detach() * 0.5 for name, each in self.$a.named_parameters()}",
        "x = self.$a(x).sin()",
        *["for name, each in $m.$a.named_parameters(): each.data, $m.$b[name] = $m.$b[name], each.data"] * 2,
        rank=1,
    ),
    part(
        "self.$a = torch.nn.Parameter(torch.tensor(0.8))\nself.register_buffer('$b', torch.tensor(0.6))",
        """
${a}_former = self.$a.data
self.$a.data = self.$b.data
x = (x + self.$a).sin()
self.$a.data = ${a}_former
x = x.cos() + self.$a
""",
        *("$m.$b.data = torch.zeros_like($m.$b)", "$m.$a.data, $m.$b.data = $m.$b.data, $m.$a.data"),
    ),
    part(
        "self.$a = [torch.tensor(0.5), torch.tensor(-0.3)]",
        """
x = (x + self.$a[0] - self.$a[1]).sin()
self.$a[0].data = 0.9 * self.$a[0].data
""",
        *("$m.$a[0].data = torch.tensor(0.2)", "$m.$a[0].data, $m.$a[1].data = $m.$a[1].data, $m.$a[0].data"),
    ),
    part(
        "self.$a = (torch.tensor(0.5), {'t': torch.tensor(0.1)})",
        """
x = (x + self.$a[0]).sin() + self.$a[1]['t']
self.$a[1]['t'].data = x.detach().mean().float()
""",
        *("$m.$a[0].data = torch.tensor(0.2)", "$m.$a[1]['t'].data = $m.$a[0].data"),
    ),
    part(
        "self.$a = types.SimpleNamespace(t=torch.tensor(0.5))\nself.$b = self.$a.t",
        """
x = (x + self.$a.t).sin()
self.$b.data = x.detach().mean().float()
""",
        *("$m.$a.t.data = torch.tensor(0.2)", "$m.$b.data = $m.$b.data.clone()"),
    ),
]

_SWAPS = [
    part(
        "self.register_buffer('$a', torch.tensor(0.5))\nself.register_buffer('$b', torch.tensor(-0.2))",
        """
x = (x + self.$a).sin()
torch.utils.swap_tensors(self.$a, self.$b)
x = x.cos() + self.$a
""",
        "torch.utils.swap_tensors($m.$a, $m.$b)",
    ),
    part(
        "self.register_buffer('$a', torch.tensor(0.5))\nself.register_buffer('$b', torch.tensor(-0.2))",
        "x = (x + self.$a).sin() - self.$b",
        "torch.utils.swap_tensors($m.$a, $m.$b)",
    ),
    part(
        "self.$a = (torch.tensor(0.5), {'t': torch.tensor(-0.1)})",
        """
x = (x + self.$a[0]).sin() + self.$a[1]['t']
torch.utils.swap_tensors(self.$a[0], self.$a[1]['t'])
""",
        "torch.utils.swap_tensors($m.$a[0], $m.$a[1]['t'])",
    ),
    part(
        "self.$a = [torch.tensor(0.5), torch.tensor(-0.3)]",
        "x = (x + self.$a[0] - self.$a[1]).sin()",
        "torch.utils.swap_tensors($m.$a[0], $m.$a[1])",
    ),
]

#: Parts of modules by feature.
PARTS: dict[str, list[Part]] = {
    "module_hooks": _HOOKS,
    "forwards": _FORWARDS,
    "classes": _CLASSES,
    "storages": _STORAGES,
    "swaps": _SWAPS,
}

#: Statements that change any module.
CHANGES = {
    "module_hooks": [
        "$m.register_forward_hook(halve_output)",
        "$m.register_forward_pre_hook(halve_input, prepend=True)",
        "vars($m).setdefault('handles', []).append($m.register_forward_hook(halve_output))",
        "[each.remove() for each in vars($m).pop('handles', [])]",
        "$m.handles = [each.register_forward_pre_hook(halve_input) for each in $m.modules()]",
    ],
    "forwards": [
        "$m.forward = scaled($m.forward)",
        "vars($m).pop('forward', None)",
        "$m.forward = types.MethodType(type($m).forward, $m)",
        "for part in $m.modules(): vars(part).pop('forward', None)",
    ],
    "classes": [
        "$m.__class__ = halving(type($m))",
        "$m.__class__ = type($m).__base__ if type($m).__name__ == 'Halving' else type($m)",
    ],
    "storages": [
        "for part in $m.parameters(): part.data = part.data * 0.9",
        "for part in $m.parameters(): part.data = part.data.clone()",
        "for part in $m.buffers(): part.data = part.data.flip(-1) if part.dim() else part.data.clone()",
        "for part in $m.buffers(): part.data = part.data.clone()",
    ],
}

_NOTE = """
${l}_calls, ${l}_handles = [0], []
def ${l}_look():
    return ${l}_calls, len(${l}_handles)
"""
_REGISTER = "torch.nn.modules.module.register_module_forward"

#: Definitions of hooks for all modules, with statements that add and remove them.
GLOBAL_HOOKS = [
    (
        _NOTE
        + f"""
def ${{l}}_hook({parameters}):
    ${{l}}_calls[0] += 1
    {effect}
""".rstrip(),
        f"${{l}}_handles.append({_REGISTER}_{kind}hook(${{l}}_hook{options}))",
    )
    for parameters, effect, kind, options in [
        ("module, args, output", "return output * 0.9 if isinstance(output, torch.Tensor) else None", "", ""),
        ("module, args, output", "${l}_calls.append(output.detach().mean()) if torch.is_tensor(output) else None", "", ""),
        ("module, args", "return tuple(each + 0.1 if torch.is_tensor(each) else each for each in args)", "pre_", ""),
        ("module, args", "while ${l}_handles: ${l}_handles.pop().remove()", "pre_", ""),
        ("module, args, output", "return halve_output(module, args, output) if ${l}_calls[0] % 2 else None", "", ""),
        (
            "module, args, kwargs, output",
            "return output * (1 + len(kwargs)) * 0.7 if torch.is_tensor(output) else None",
            "",
            ", with_kwargs=True",
        ),
        ("module, args, output", "return halve_output(module, args, output)", "", ", always_call=True"),
    ]
]

#: Holders of what is patched, what functions do there, and how callers change it.
HOLDERS = {
    "classes": Kind(
        [
            ("Rises()", "h.{}"),
            ("Falls()", "h.{}"),
        ],
        [
            "u = $O.bend(u)\n$O.__class__ = Falls if type($O) is Rises else Rises",
            "u = $O.bend(u)",
            "former = type($O)\n$O.__class__ = Falls\nu = $O.bend(u)\n$O.__class__ = former\nu = $O.bend(u)",
            "$N += 1\nu = $O.bend(u)\nif $N % 2: $O.__class__ = Falls",
        ],
        ["$O.__class__ = Falls", "$O.__class__ = Rises", "$N += 1"],
        "type($O).__name__, $N, $L",
    ),
    "storages": Kind(
        None,
        [
            "if $T is None:\n    $T = torch.tensor(0.5)\n$T.data = 0.9 * $T.data\nu = (u + $T).sin()",
            "if $T is None:\n    $T = torch.tensor(0.5)\nu = (u + $T).sin()\n$T.data = u.detach().mean().float()",
            "if $T is not None: u = u + $T\nelse: $T = u.detach().mean().float()\nu = u.cos()",
            "if $T is None:\n    $T = torch.tensor(0.5)\nu = (u + $T).sin()",
            "if $T is None:\n    $T = torch.tensor(0.5)\nformer = $T.data\n$T.data = torch.tensor(0.1)\n"
            "u = (u + $T).sin()\n$T.data = former",
            "while len($L) < 2: $L.append(torch.tensor(0.3 * len($L)))\n"
            "u = (u + $L[0]).tanh() - $L[1]\n$L[1].data = $L[0].data + 0.1",
            "first, last = (($B).setdefault(key, torch.tensor(0.2)) for key in ('first', 'last'))\n"
            "u = (u + first).cos() + last\nfirst.data, last.data = last.data, first.data + 0.1",
        ],
        [
            "if $T is not None: $T.data = torch.tensor(0.3)",
            "if $T is not None: $T.data = $T.data.clone()",
            "if len($L) > 1: $L[0].data, $L[1].data = $L[1].data, $L[0].data",
            "if 'first' in $B: $B['first'].data = torch.tensor(0.9)",
        ],
    ),
    "swaps": Kind(
        None,
        [
            "while len($L) < 2: $L.append(torch.tensor(0.3 * len($L)))\nu = (u + $L[0]).sin() - $L[1]\n"
            "torch.utils.swap_tensors($L[0], $L[1])",
            "first, last = (($B).setdefault(key, torch.tensor(0.2)) for key in ('first', 'last'))\n"
            "u = (u + first).cos() + last",
            "if $T is None:\n    $T = torch.tensor(0.5)\nu = (u + $T).sin()\n"
            "torch.utils.swap_tensors($T, u.detach().mean().float())",
        ],
        [
            "if len($L) > 1: torch.utils.swap_tensors($L[0], $L[1])",
            "if 'first' in $B: torch.utils.swap_tensors($B['first'], $B['last'])",
            "if $T is not None: torch.utils.swap_tensors($T, torch.tensor(0.3))",
        ],
    ),
}

#: Functions with attributes: their definition, what the function is called that has them, and lines that follow.
_FUNCTIONS = [
    ("def ${l}_step(u):\n$body\n        return u", "${l}_step"),
    (
        "def ${l}_gate(u):\n$body\n        return u\ndef ${l}_step(u):\n        return ${l}_gate(u.sin()).tanh()",
        "${l}_gate",
    ),
    (
        "def ${l}_gate(u):\n        return u.sin() * (1 + ${l}_gate.n % 3)\n"
        "def ${l}_step(u):\n        u = ${l}_gate(u)\n$body\n        return u",
        "${l}_gate",
    ),
    (
        "globals()['${l}_global'] = lambda u: u.cos()\ndef ${l}_step(u):\n        u = ${l}_global(u)\n$body\n        return u",
        "${l}_global",
    ),
    (
        "class ${l}_class:\n    def step(self, u):\n$body\n        return u\n${l}_step = ${l}_class().step",
        "${l}_class.step",
    ),
    (
        "class ${l}_class(torch.nn.Module):\n    def forward(self, u):\n$body\n        return u\n${l}_step = ${l}_class()",
        "${l}_class.forward",
    ),
    ("def ${l}_gate(u):\n$body\n        return u\n${l}_step = functools.partial(${l}_gate)", "${l}_step"),
    (
        "def ${l}_counted(function):\n    @functools.wraps(function)\n    def wrapper(u):\n        u = function(u)\n$body\n"
        "        return u\n    return wrapper\n@${l}_counted\ndef ${l}_step(u):\n        return u.sin()",
        "${l}_step",
    ),
]
_COUNTS = [
    "$N += 1\nu = u.sin() if $N % 2 else (u * $N).cos()",
    "$N = $N + 1\nu = (u * $N).tanh()",
    "u = u.sin() if $T is None else (u * $T).tanh()\n$T = u.detach().mean()",
    "u = u.sin() if $T is None else (u + $T).tanh()\n$T = u.sigmoid().mean()",
    "$L.append(u.detach().mean())\nu = (u * sum($L[-2:])).cos()",
    "$L = [*$L, $N]\nu = (u * len($L)).cos()\n$N = len($L)",
    "$B['stash'] = u.cos()\nu = u.sin().exp()\nu = (u * $B.pop('stash')).tanh()",
    "$B[$N] = u.detach().mean()\n$N += 1\nu = (u * sum($B.values())).sin()",
]
_CALLERS = ["$N = 5", "$N += 1", "$T = torch.tensor(0.3)", "$T = None", "$L.append(0.25)", "$L = [0.5]", "$B.clear()"]


def function_definition(chosen: random.Random, name: str) -> tuple[str, str, list[str]]:
    """Returns what :func:`.places.definition` returns, of a function whose state is attributes of functions."""
    text, owner = chosen.choice(_FUNCTIONS)
    owner = Template(owner).substitute(l=name)
    places = {"N": f"{owner}.n", "T": f"{owner}.t", "L": f"{owner}.log", "B": f"{owner}.by"}
    steps = "\n".join(chosen.choice(_COUNTS) for _ in range(chosen.choice([1, 1, 2])))
    body = "\n".join(f"        {line}" for line in Template(steps).substitute(places).split("\n"))
    more = "\n$N, $T, $L, $B = 0, None, [], {}\ndef ${l}_look():\n    return $N, $T, $L, $B"
    text = Template(text + more).substitute(places, l=name, body=body)
    # Regions find attributes of a class's methods where they find the methods, not by way of the class.
    callers = [] if "_class" in owner else _CALLERS
    return text, "", [Template(one).substitute(places) for one in callers]
