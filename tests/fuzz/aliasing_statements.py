"""What the programs of :mod:`tests.fuzz.aliasing_programs` are made of."""

from __future__ import annotations

import importlib.util

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
SHAPES = [(2, 3), (3, 3), (3,), (2, 2, 3), (4, 3), (6,), (2, 2), (4, 2, 3)]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", ";").split(";") if part.strip()]


#: Expressions, by what stands for tensors to read (x, y, z; w without gradients), to write to (t, u) and to fill (e), booleans,
#: indices and complex numbers (b, j, c), leaves, and numbers: constants (k), dimensions (d), places (i), sizes (n).
READS = _listed("""
    {x} * {w}.sin() ; {x} * {w}.cos() ; {x} * ({w} + {k}) ; {x} + {w} ; {x} * torch.sigmoid({w}) ; {w}.tanh() ; {w}.square()
    {x} * {w}.mT.sin() ; {x} * {w}.detach().view(-1)[{i}].cos() ; {x} * {w}[{i}:].sum().sin() ; {x} @ {w}.cos() ; {w} * {k}
    {x}.sin() ; {x}.cos() ; {x}.tanh() ; {x} * {y} ; {x} * {y} ; {x} + {y} ; {x} - {y} ; {x} @ {y} ; {x} * {k}
    torch.sigmoid({x}) ; {x}.square() ; F.softmax({x}, -1) ; {x}.sum({d}) ; {x}.mean() ; {x}.clone() ; F.gelu({x})
    torch.cat([{x}, {y}]) ; torch.stack([{x}, {y}]) ; torch.where({x} > 0, {x}, {y}) ; torch.where({b}, {x}, {y})
    {x}.contiguous() ; {x}.reshape(-1) * {k} ; F.layer_norm({x}, {x}.shape[-1:]) ; {x}[torch.tensor([0, -1])] ; {x}[{j}]
    F.dropout({x}, 0.5) ; torch.randn_like({x}) * {y} ; {x} * torch.rand(()) ; {x}.cumsum(0) ; torch.zeros_like({x})
    torch.addcmul({x}, {y}, {z}) ; {x}.index_select(0, {j}) ; F.linear({x}, {y}) ; F.rrelu({x}, training=True) ; {x} > 0
    torch.ones_like({x}) * {k} ; {x}.detach().clone().requires_grad_() ; torch.zeros({x}.shape, dtype={x}.dtype)
    torch.view_as_complex({x}) * (0.5 + 1j) ; torch.complex({x}, {y}) ; {c} * {c} ; {c}.abs() ; Square.apply({x})
    Tanh.apply({x}) ; torch.lerp({x}, {y}, 0.3) ; torch.maximum({x}, {y}) ; torch.zeros(3, 4).copy_({x})
    torch.autograd.grad({x}.sum(), [{leaf}], retain_graph=True)[0] ; torch.empty({x}.shape, dtype={x}.dtype).copy_({x})
    torch.autograd.grad(({x} * {x}).sum(), [{leaf}], create_graph=True)[0] ; torch.rand({x}.shape, dtype={x}.dtype)
    torch.empty_like({x}).normal_() ; torch.empty_like({x}).bernoulli_(0.5) * {x} ; torch.nan_to_num({x} / {y})
""")

VIEWS = _listed("""
    {x}.view(-1) ; {x}.reshape({n}, -1) ; {x}.transpose(0, -1) ; {x}.permute(*range({x}.dim())[::-1]) ; {x}.select({d}, {i})
    {x}.narrow({d}, {i}, {n}) ; {x}[{i}:] ; {x}[::2] ; {x}[..., 1::2] ; {x}[{i}] ; {x}[None] ; {x}.expand(2, *{x}.shape)
    {x}.unsqueeze({d}) ; {x}.squeeze() ; {x}.as_strided(({n}, {n}), ({n}, 1), {i}) ; {x}.as_strided(({n},), (2,), {i})
    {x}.diagonal() ; {x}.diagonal({i}) ; {x}.mT ; {x}.flatten() ; {x}.unflatten(0, (-1, {n})) ; {x}.movedim(0, -1)
    {x}.detach() ; {x}.detach() ; {x}.data ; {x}.data ; {x}.view_as({x}) ; {x}.unfold({d}, 2, 1) ; {x}[:, {i}:{n}]
    torch.view_as_complex({x}) ; torch.view_as_real({c}) ; {c}.conj() ; {c}.real ; {c}.imag ; {c}.conj().imag ; {c}.mT
    {x}.detach()[{i}:] ; {x}[{i}].data ; {x}.data.view(-1) ; {x}.mT.detach() ; {x}.contiguous() ; {x}.reshape(-1)
    {x}.unbind({d}) ; {x}.chunk(2, {d}) ; {x}.split({n}, {d}) ; torch.unsafe_chunk({x}, 2) ; torch.unsafe_split({x}, {n})
    {x}.tensor_split(2) ; {x}.split([1, {x}.shape[0] - 1]) ; {x}.type({x}.dtype) ; {x}.to(torch.float64) ; {x}.real
""")

#: Statements.
WRITES = _listed("""
    {t}.add_({y}) ; {t}.mul_({k}) ; {t}.mul_({y}) ; {t}.copy_({y}) ; {t}.fill_({k}) ; {t}.zero_() ; {t}.sin_() ; {t}.sub_({k})
    {t}[{i}] = {y} ; {t}[{i}] = {k} ; {t}[..., ::2] = {k} ; {t}[{t}.detach() > 0] = {k} ; {t}[torch.tensor([0, -1])] = {y}
    {t}[{i}:{n}] = {y} ; {t}[{b}] = {k} ; {t}[{j}] = {y} ; {t}[...] = {y} ; {t}[{i}].add_({y}) ; {t}[:, {i}:{n}] = {y}
    {t}.masked_fill_({t} > 0.5, {k}) ; {t}.masked_fill_({b}, {k}) ; {t}.index_add_(0, torch.tensor([0, 0]), {y}[:2])
    {t}.clamp_(-1, 1) ; {t}.addcmul_({y}, {z}, value=0.5) ; {t}.lerp_({y}, 0.3) ; {t}.index_put_(({j},), {y}, accumulate=True)
    torch._foreach_mul_([{t}, {u}], {k}) ; torch._foreach_add_([{t}, {u}], [{y}, {z}]) ; torch._foreach_add_([{t}], [{y}])
    with torch.no_grad(): torch._foreach_copy_([{t}, {u}], [{y}, {z}]) ; torch._foreach_zero_([{t}]) ; {t}.copy_({t}.flip(0))
    {t}.mT.copy_({y}) ; with torch.no_grad(): torch.mul({y}.expand_as({t}), {k}, out={t})
    torch.add({y}.detach().expand_as({t}), {k}, out={t}) ; with torch.no_grad(): torch.add({t}, {y}.expand_as({t}), out={t})
    torch.stack([{t}.detach().sin()[0]] * {n}, out={t}[:{n}]) ; with torch.no_grad(): {t}.mul_({k})
    with torch.no_grad(): {t}.copy_({y}) ; with torch.no_grad(): {t}[{i}] = {y} ; {t}.uniform_(-1, 1) ; {t}.bernoulli_(0.5)
    {t}.normal_() ; F.dropout({t}, 0.5, True, inplace=True) ; {t}.tril_() ; F.relu({t}, inplace=True)
    F.rrelu({t}, training=True, inplace=True) ; F.hardtanh({t}, inplace=True) ; {t}.neg_() ; {t}.detach().mul_({k})
    {t}.detach().copy_({y}) ; {t}.data.mul_({k}) ; {t}.data.copy_({y}) ; {t}.data[{i}] = {y} ; {t}.data.normal_()
    {t}.detach()[{i}:].zero_() ; {t}.scatter_(0, torch.zeros({t}.shape, dtype=torch.int64), {k})
    {t}.view(-1)[{i}:].add_({k}) ; {t}.detach().view(torch.uint8).zero_() ; {t}.cumsum_(0) ; {t}.fill_diagonal_({k})
    {c}.mul_(1j) ; {c}.conj().mul_(0.5 + 1j) ; {c}.imag.zero_() ; {c}.conj_physical_() ; {b}.logical_not_()
    {j}.add_(1).remainder_(2) ; {b}.copy_({x} > 0) ; {j}.zero_() ; {t}.squeeze_() ; {t}.squeeze_({d}) ; {t}.unsqueeze_({d})
    {t}.transpose_(0, -1) ; {t}.t_()
""")

#: Whose results share memory with what they are made of, and no version.
SPLIT_VERSIONS = (".data", "unsafe_")

#: What makes tensors without contents, views of all there is of them, parts, and what fills one of those.
BLANKS = _listed("""
    torch.empty({shape}, dtype={dtype}) ; {x}.new_empty({shape}) ; torch.empty({shape}, dtype={dtype}).mT
    torch.empty_like({x})
""")
ASPECTS = _listed("""
    {e}[:] ; {e}.mT ; {e}.detach() ; {e}.view_as({e}) ; {e}.data ; {e}.movedim(0, -1)
""")
PARTS = [["{e}"], ["{e}[:1]", "{e}[1:]"], ["{e}[::2]", "{e}[1::2]"], ["{e}[..., :1]", "{e}[..., 1:]"]]
PARTS += [["{e}.mT[:1]", "{e}.mT[1:]"]]
FILLS = _listed("""
    {e}.copy_({y}) ; {e}.fill_({k}) ; {e}.zero_() ; {e}.uniform_(-1, 1) ; {e}.normal_() ; {e}[...] = {y} ; {e}.bernoulli_(0.5)
    torch.sin({y}.detach().expand_as({e}), out={e}) ; torch.rand({e}.shape, out={e})
    torch._foreach_copy_([{e}], [{y}.detach()]) ; {e}.detach().zero_() ; {e}.mT.copy_({y}) ; {e}.view(-1).fill_({k})
    {e}.data.fill_({k}) ; {e}.masked_fill_(torch.ones(()).bool(), {k})
""")
NUMPY_FILLS = _listed("""
    {e}.numpy()[...] = {k} ; {e}.numpy()[...] = {y}.detach().numpy() ; {e}.detach().mT.numpy().fill({k})
""")

MODULES = {
    "torch.nn.BatchNorm1d({last}, dtype={dtype})": [
        *("{m}({x})", "{m}({x})", "{m}.running_mean", "F.batch_norm({x}, {m}.running_mean, {m}.running_var)"),
    ],
    "torch.nn.LSTMCell({last}, 2, dtype={dtype})": ["{m}({x})"],
    "torch.nn.GRUCell({last}, {last}, dtype={dtype})": ["{m}({x})", "{m}({x}, {x})"],
    "torch.nn.LSTM({last}, 2, dtype={dtype})": ["{m}({x})[0]"],
    "Keeping()": ["{m}({x})", "{m}({x})", "{m}({x})", "{m}.last", "{m}.seen[0]", "{m}.last.detach()"],
}
BLOCKS = ["with torch.no_grad():", "with torch.no_grad():", "with torch.enable_grad():"]
TERMS = ["{x}.sum()", "({x} * {k}).sum()", "{x}.sin().sum()", "({x} * {x}).mean()"]
ENDINGS = {
    "once": ["loss.backward()"],
    "twice": ["loss.backward(retain_graph=True)", "see_gradients('first', leaves, see)", "loss.backward()"],
    "partial": ["part.backward(retain_graph=True)", "see_gradients('part', leaves, see)", "loss.backward()"],
    "halves": ["torch.autograd.backward([part], retain_graph=True, inputs=leaves[:1])", "(loss + part).backward()"],
    "double": [
        "grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True)",
        "for grad in grads: see('gradient', 'of first order', grad)",
        "second = sum((grad * grad).sum() for grad in grads)",
        "if second.requires_grad: second.backward()",
    ],
    "double, later": [
        "grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True)",
        "part.backward(retain_graph=True)",
        "second = sum((grad * grad).sum() for grad in grads)",
        "if second.requires_grad: second.backward(retain_graph=True)",
        "loss.backward()",
    ],
}
