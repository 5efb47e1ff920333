"""Templates of what is more than an expression: writes, backward inside forward, modules, blocks, side effects.

The fields are those of :mod:`tests.fuzz.ops`.
"""

from __future__ import annotations

from .ops import by_rank

__all__ = [
    "AFTERMATH",
    "BLOCKS",
    "CALLS",
    "INNER_BACKWARD",
    "IN_PLACE",
    "MODULES",
    "OPTIMIZERS",
    "SIDE_EFFECTS",
    "SOURCES",
    "SURROUNDINGS",
    "WAYS_TO_A_MODULE",
]

_WRITES_0 = """
{x}.mul_({k})
{x}.mul_({b})
{x}.add_({k})
{x}.add_({b}, alpha={k})
{x}.sub_({y})
{x}.div_(2)
{x}.neg_()
{x}.relu_()
{x}.tanh_()
{x}.sigmoid_()
{x}.sin_()
{x}.abs_()
{x}.square_().clamp_(max=4)
{x}.clamp_(-0.5, 0.5)
{x}.clamp_(max=1).exp_()
{x}.zero_()
{x}.fill_({k})
{x}.copy_({y})
{x}.copy_({b})
{x}.addcmul_({y}, {b}, value={k})
{x}.lerp_({y}, {k})
{x}.masked_fill_({y} > 0, {k})
{x}[{y} > 0] = {k}
{x} += {b}
{x} *= {k}
{x}.unsqueeze_(-1)
{x}.squeeze_()
{x}.detach_()
{x}.view(-1).mul_({k})
{x}.detach().mul_({k})
F.relu({x}, inplace=True)
F.elu({x}, inplace=True)
F.leaky_relu({x}, 0.2, inplace=True)
F.hardtanh({x}, inplace=True)
F.silu({x}, inplace=True)
torch.add({b}, {k}, out={x}.detach())
torch._foreach_mul_([{x}], {k})
"""

_CUSTOM_WRITES = """
Halve.apply({x})
HalveApart.apply({x})
Exponential.apply({x}.clamp_(max=2))
Absorbs.apply({x}, {y})
Absorbs.apply({x}, {y}.detach())
"""

_WRITES_1 = """
{x}[{i_first}] = {k}
{x}[{i_first}] = {y}[{i_first}]
{x}[..., {i_last}] = 0
{x}[..., {i_last}] *= {k}
{x}[..., :{part_last}].mul_({k})
{x}[..., :{part_last}] = {y}[..., :{part_last}] * 2
{x}[::2].add_({k})
{x}.select({d}, {i}).mul_({k})
{x}.select({d}, {i}).copy_({y}.select({d}, {i}))
{x}.narrow({d}, 0, {part}).tanh_()
{x}.narrow({d}, 0, {part}).copy_({y}.narrow({d}, 0, {part}))
{x}.unfold({d}, 1, 1).mul_({k})
{x}.flip({d}).mul_({k})
{x}.index_add_({d}, {index}, {y}.index_select({d}, {index}))
{x}.index_fill_({d}, {index}, {k})
{x}.index_copy_({d}, torch.tensor([{i}]), {y}.narrow({d}, 0, 1))
{x}.index_put_((torch.tensor([0]),), torch.full((), {k}, dtype={x}.dtype), accumulate=True)
{x}.scatter_({d}, {y}.argsort({d}), {y})
{x}.scatter_add_({d}, {y}.argsort({d}), {y})
{x}[torch.tensor([0])] = {k}
{x}.cumsum_({d})
{x}.as_strided((2,), (1,)).mul_({k})
"""

_WRITES_2 = """
{x}.t().mul_({k})
{x}.t_()
{x}.mT.add_({y}.mT)
{x}.transpose_({d}, -1)
{x}.diagonal(dim1=-2, dim2=-1).fill_({k})
{x}.diagonal(dim1=-2, dim2=-1).mul_({k})
{x}.triu_()
{x}.permute(*range({x}.dim() - 1, -1, -1))[0].mul_({k})
"""

_RANDOM_WRITES = """
{x}.uniform_(-1, 1)
{x}.normal_()
{x}.bernoulli_(0.5)
{x}.exponential_().clamp_(max=2)
F.dropout({x}, 0.4, inplace=True)
F.alpha_dropout({x}, 0.3, training=True, inplace=True)
F.rrelu({x}, 0.1, 0.5, training=True, inplace=True)
"""

#: Statements that write to ``{x}``, by feature, then by least rank.
IN_PLACE = {
    "in_place": by_rank(rank_0=_WRITES_0, rank_1=_WRITES_1, rank_2=_WRITES_2),
    "random": by_rank(rank_0=_RANDOM_WRITES),
    "custom_functions": by_rank(rank_0=_CUSTOM_WRITES),
}

#: Lines that run backward inside forward; ``{v}``, ``{w}``, ``{u}`` are new names, of which ``{w}`` goes on.
INNER_BACKWARD = [
    ["{v} = {x}.detach().requires_grad_()", "{u} = {unary_v}", "{w} = torch.autograd.grad({u}.sum(), {v})[0]"],
    ["{v} = {x}.detach().requires_grad_()", "{u} = {unary_v}", "{u}.sum().backward()", "{w} = {v}.grad * {y}"],
    ["{v} = {x} * {k}", "{u} = {unary_v}", "{w} = torch.autograd.grad({u}.sum(), {v}, create_graph=True)[0]"],
    ["{v} = {x} * {k}", "{u} = {unary_v}", "{w} = {u} + torch.autograd.grad({u}.sum(), {v}, retain_graph=True)[0]"],
    ["{v} = {unary_x}", "{w} = {v} * torch.autograd.grad({v}.sum(), {x}, create_graph=True)[0]"],
    ["{v} = {unary_x}", "{w} = {v} * torch.autograd.grad({v}.sum(), {x}, retain_graph=True)[0]"],
    ["{w} = torch.autograd.grad({z}.square().sum(), {x}, create_graph=True)[0]"],
    ["{w} = torch.autograd.grad({z}.square().sum(), {x}, retain_graph=True)[0]"],
]

#: Constructors of modules by feature, each with the least rank of what it is called on and how.
MODULES = {
    "modules": [
        (1, "torch.nn.Linear({n}, 3)", "{f}({x})"),
        (1, "torch.nn.Sequential(torch.nn.Linear({n}, 3), torch.nn.GELU(), torch.nn.Linear(3, {n}))", "{f}({x})"),
        (1, "torch.nn.Sequential(torch.nn.Linear({n}, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2))", "{f}({x})"),
        (1, "torch.nn.LayerNorm({n})", "{f}({x})"),
        (1, "torch.nn.PReLU()", "{f}({x})"),
        (1, "torch.nn.LSTMCell({n}, 3)", "{f}({x}.reshape(-1, {n}))"),
        (1, "torch.nn.GRUCell({n}, 3)", "{f}({x}.reshape(-1, {n}))"),
        (1, "torch.nn.RNNCell({n}, 3)", "{f}({x}.reshape(-1, {n}))"),
        (2, "torch.nn.GRU({n}, 3)", "{f}({x})[0]"),
        (2, "torch.nn.LSTM({n}, 2, bidirectional=True)", "{f}({x})[0]"),
        (2, "torch.nn.MultiheadAttention({n}, 1)", "{f}({x}, {x}, {x})[0]"),
        (2, "torch.nn.Conv1d({m}, 2, 1)", "{f}({x})"),
        (2, "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear({n}, 2))", "{f}({x})"),
    ],
    "random": [
        (0, "torch.nn.Dropout(0.3)", "{f}({x}) * 1"),  # in evaluation it hands on its input, which may not be written to
        (1, "torch.nn.Sequential(torch.nn.Linear({n}, 3), torch.nn.Dropout(0.3), torch.nn.Tanh())", "{f}({x})"),
        (1, "torch.nn.Sequential(torch.nn.Linear({n}, 3), torch.nn.RReLU(), torch.nn.AlphaDropout(0.2))", "{f}({x})"),
        (
            2,
            "torch.nn.MultiheadAttention({n}, 1, dropout=0.3)",
            "{f}({x}, {y} * 1, {x})[0]",
        ),
        (2, "torch.nn.GRU({n}, 3, num_layers=2, dropout=0.3)", "{f}({x})[0]"),
        (2, "torch.nn.TransformerEncoderLayer({n}, 1, 3)", "{f}({x})"),
    ],
    "buffers": [
        (2, "torch.nn.BatchNorm1d({m} if {rank} == 3 else {n})", "{f}({x})"),
        (2, "torch.nn.Sequential(torch.nn.Linear({n}, 3), torch.nn.BatchNorm1d({m} if {rank} == 3 else 3))", "{f}({x})"),
        (2, "torch.nn.BatchNorm1d({m} if {rank} == 3 else {n}, momentum=None)", "{f}({x})"),
        (2, "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear({n}, 3))", "{f}({x})"),
        (3, "torch.nn.InstanceNorm1d({m}, track_running_stats=True)", "{f}({x}.repeat(1, 1, 2))"),
        (1, "torch.nn.utils.spectral_norm(torch.nn.Linear({n}, 3))", "{f}({x})"),
        (3, "torch.nn.BatchNorm2d({m})", "{f}({x}[None].transpose(1, -2))"),
        (1, "torch.ao.quantization.FakeQuantize()", "{f}({x})"),
        (0, "Counted()", "{f}({x})"),
        (0, "Rescaled()", "{f}({x})"),
        (0, "Delayed()", "{f}({x})"),
        (1, "torch.nn.Sequential(Delayed(), torch.nn.Linear({n}, 2), Rescaled(), torch.nn.Tanh())", "{f}({x})"),
    ],
    "module_state": [
        (0, "Clamped()", "{f}({x})"),
        (0, "Centred()", "{f}({x})"),
        (1, "Coded()", "{f}({x})"),
        (1, "Remembering()", "{f}({x})"),
        (0, "Warming()", "{f}({x})"),
        (1, "torch.nn.Sequential(Centred(), torch.nn.Linear({n}, 2), Coded(), Warming())", "{f}({x})"),
        (1, "torch.nn.Sequential(torch.nn.Linear({n}, 2), Remembering(), Clamped())", "{f}({x})"),
    ],
}

#: How a region comes to a module: each runs ``{f}`` on ``{input}``.
WAYS_TO_A_MODULE = [
    "run({f}, {input})",
    "run({f}.forward, {input})",
    "run(functools.partial({f}), {input})",
    "run(functools.partial({f}.forward, {input}))",
    "run(lambda v: {f}(v), {input})",
    "run(lambda: {f}({input}))",
    "run(lambda v, m={f}: m(v), {input})",
    "run(lambda m, v: m(v), {f}, {input})",
    "run(lambda v, *, m: m(v), {input}, m={f})",
    "run(lambda held, v: held[0](v), [{f}], {input})",
    "run(Wrapped({f}), {input})",
]

#: Constructors of what updates parameters.
OPTIMIZERS = [
    "torch.optim.SGD({}, 0.01)",
    "torch.optim.SGD({}, 0.01, momentum=0.9, foreach=True)",
    "torch.optim.Adam({}, 0.01)",
    "torch.optim.AdamW({}, 0.01, foreach=True)",
    "torch.optim.AdamW({}, 0.01, fused=True)",
    "torch.optim.Adagrad({}, 0.01)",
]

#: Random sources that regions may not find by themselves.
SOURCES = ["torch.Generator().manual_seed({seed})", "random.Random({seed})", "np.random.default_rng({seed})"]

#: Calls of regions in one line, by feature.
CALLS = {
    "generators": [
        "run(noisy, {x}, {g})",
        "run(noisy, {x}, generator={g})",
        "run(lambda v, held: noisy(v, held[0]), {x}, [{g}])",
        "run(lambda v, held: noisy(v, held['key'][1]), {x}, {{'key': (1, {g})}})",
        "run(lambda held: noisy(held.field_0, held.field_1), Held({x}, {g}))",
        "run(functools.partial(noisy, generator={g}), {x})",
        "run(functools.partial(noisy, {x}), {g})",
        "run(lambda v: noisy(v, {g}), {x})",
        "run(lambda v, function: function(v), {x}, functools.partial(noisy, generator={g}))",
        "run(functools.partial(lambda draw, v: draw(v), lambda v: noisy(v, {g})), {x})",
    ],
    "tracked_sources": ["run(Noisy({source}), {x})", "run(lambda v, source={source}: v * number(source), {x})"],
    "sequential": ["in_segments(run, [{steps}], {segments}, {x})"],
    "chunks": [
        "in_chunks(run, {step}, {x}, {chunks}, {d})",
        "in_chunks(run, lambda v: ({step})(v) * {k}, {x}, {chunks}, {d} - {rank})",
        "in_chunks(run, lambda v: (({step})(v), v.cos()), {x}, {chunks}, {d})",
        "in_chunks(run, lambda v: ({step})(v).sum({d}), {x}, {chunks}, {d}, 'sum')",
        "in_chunks(run, lambda v: (({step})(v).sum(), v.numel()), {x}, {chunks}, {d}, 'mean')",
        "in_chunks(run, lambda v: run({step}, v).sin(), {x}, {chunks}, {d})",
    ],
    "threads": [
        "on_thread(run, {step}, {x})",
        "run(lambda v: on_thread(run, {step}, v).sin(), {x})",
        "run(lambda v: on_thread(plain, {step}, v.cos()) * v.tanh(), {x})",
    ],
    "wrappers": [
        "Unboxed.apply(run({step}, Boxed.apply({x})))",
        "Unboxed.apply(run(lambda v, box: box.sin() * v, {y}, box=Boxed.apply({x})))",
        "Unboxed.apply(run(lambda v: ({step})(Boxed.apply(v)), {x}))",
        "run(lambda box: Unboxed.apply(({step})(box.tanh())).cos(), Boxed.apply({x}))",
    ],
    "loops": [
        "in_loop(run, {step}, {x}, {times}, {slots})",
        "in_loop(run, lambda s: (({step})(s[0]), s[1] + 1), ({x}, 0), {times}, {slots})[0]",
        "in_loop(run, lambda s: [s[1], ({step})(s[0]) * {k}], [{x}, {y}], {times}, {slots})",
        "in_loop(run, lambda s: {{'h': ({step})(s['h']), 'y': s['y'] * {k}}}, {{'h': {x}, 'y': {y}}}, {times}, {slots})['h']",
        "in_loop(run, lambda s: (({step})(s) * {y}).tanh(), {x}, {times}, {slots})",
        "in_loop(run, lambda s: run({step}, s) * {k}, {x}, {times}, {slots})",
        "in_loop(run, lambda s: in_loop(run, {step}, s, 2, 2).sin(), {x}, {times}, {slots})",
        "run(lambda v: in_loop(run, {step}, v, {times}, {slots}).sin(), {x})",
    ],
}

#: Headers of blocks with what follows the body, by feature.
BLOCKS = {
    "no_grad": [
        ("with torch.no_grad():", []),
        ("with torch.enable_grad():", []),
        ("with torch.set_grad_enabled(False):", []),
        ("with torch.inference_mode():", []),
    ],
    "autocast": [
        ('with torch.autocast("cpu", dtype=torch.bfloat16):', []),
        ('with torch.autocast("cpu", dtype=torch.float16):', []),
        ('with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):', []),
        ('with torch.autocast("cpu", enabled=False):', []),
    ],
    "forked_random": [
        ("with torch.random.fork_rng():", []),
        ("with torch.random.fork_rng(), contextlib.nullcontext(torch.manual_seed({seed})):", []),
    ],
    "hooks": [
        ("with torch.autograd.graph.save_on_cpu():", []),
        ("with torch.autograd.graph.saved_tensors_hooks(copied, unchanged):", []),
        ("with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach(),), lambda packed: packed[0]):", []),
    ],
    "handlers": [
        ("try:", ["except Exception:", "    pass"]),
        ("try:", ["except BaseException:", "    pass"]),
        ("try:", ["finally:", "    pass"]),
        ("with contextlib.suppress(Exception):", []),
        ("with contextlib.suppress(BaseException):", []),
    ],
    "ambient": [
        ("with setting(torch.set_default_dtype, torch.get_default_dtype(), torch.float64):", []),
        ("with setting(torch.set_default_dtype, torch.get_default_dtype(), torch.bfloat16):", []),
        ("with factor({k}):", []),
        ('with torch.device("cpu:0"):', []),
        ("with torch.backends.mkldnn.flags(enabled=False):", []),
        ("with torch.backends.cudnn.flags(enabled=True, deterministic=True):", []),
        ("with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):", []),
        ("with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):", []),
        ("with setting(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), True):", []),
        ('with setting(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "medium"):', []),
        ("with SineIsCosine():", []),
    ],
}

#: More of them, for what is around the whole program or backward: torch does not let this one stand inside a device's block.
SURROUNDINGS = [('with setting(torch.set_default_device, None, "cpu:0"):', [])]

#: Statements that do something else than compute; ``{own}`` is a tensor that no outer function knows.
SIDE_EFFECTS = {
    "tensor_hooks": [
        "{own}.register_hook(lambda grad: grad * {k})",
        "{own}.register_hook(lambda grad: None)",
        "{own}.register_hook(lambda grad: grad * torch.rand_like(grad))",
        "{own}.register_hook(lambda grad: run(F.dropout, grad.sin()) * grad)",
        "{own}.retain_grad()",
    ],
    "backward_hooks": [
        "{own}.grad_fn.register_hook(lambda given, taken: scaled_gradients(given, {k}))",
        "{own}.grad_fn.register_prehook(lambda taken: scaled_gradients(taken, {k}))",
        "{leaf}.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, 'grad', leaf.grad * {k}))",
        "{leaf}.register_hook(lambda gradient: gradient * {k})",
        "torch.autograd.graph.register_multi_grad_hook([{own}], lambda found: see('gradient', 'of all', found[0]))",
        "torch.autograd.graph.register_multi_grad_hook([{own}, {leaf}], lambda one: see('gradient', 'any', one), mode='any')",
        "{module}.register_full_backward_hook(lambda _, given, taken: scaled_gradients(given, {k}))",
        "{module}.register_full_backward_pre_hook(lambda _, taken: scaled_gradients(taken, {k}))",
        "{module}.register_full_backward_hook(lambda _, given, taken: see('gradient', 'of a module', taken[0]))",
    ],
    "failures": ["fail()", "fail()"],
    "seeds": ["torch.manual_seed({seed})", "torch.set_rng_state(torch.get_rng_state())", "torch.rand({part})"],
    "python_random": ["random.seed({seed})", "random.random()", "random.shuffle([1, 2, 3])"],
    "numpy_random": ["np.random.seed({seed})", "np.random.rand()"],
    "generators": ["{g}.manual_seed({seed})", "torch.rand(2, generator={g})"],
    "side_effects": ["if not ckpt_hooks.is_recomputing(): log.append(float({x}.detach().sum()))"],
    "first_run_only": [
        "if not ckpt_hooks.is_recomputing(): {x}.detach().sin()",
        "if not ckpt_hooks.is_recomputing(): {x}.detach() * {k}",
        "if not ckpt_hooks.is_recomputing(): ({x}.detach() + {b}.detach()).exp().cos()",
    ],
}

#: What is written to between forward and backward: to a tensor, and to what a module has.
AFTERMATH = {
    "v": [
        "{x}.detach().mul_({k})",
        "{x}.detach().add_({k})",
        "{x}.detach().zero_()",
        "{x}.detach().copy_({x}.detach().cos())",
    ],
    "m": [
        "for parameter in {x}.parameters(): parameter.detach().mul_({k})",
        "for buffer in {x}.buffers(): buffer.zero_()",
        "for buffer in {x}.buffers(): buffer.copy_(buffer.flip(-1) if buffer.dim() else buffer + 1)",
    ],
}
