"""The vocabulary: templates of expressions, by feature and by the least rank of the tensor they work on.

A template is a format string. ``{x}`` is the tensor at hand; the other fields are what :class:`tests.fuzz.slots.Slots`
knows how to fill in to suit it: ``{y}`` a tensor of its shape, ``{b}`` one that broadcasts with it, ``{z}`` any other, ``{d}``
one of its dimensions, ``{i}`` and ``{index}`` an index and a tensor of indices along that, ``{part}`` a length up to its
size, ``{n}`` ``{m}`` its last two sizes, ``{k}`` a number, ``{P(3,n)}`` a parameter of that shape.
Templates need not fit every tensor: the generator tries each statement, and drops one that raises. Where ``.contiguous()``
stands without need, torch 2.13 crashes or reads what nobody wrote without it. There is no ``group_norm`` among them: where only
part of its backward is differentiated, plain autograd's own gradients are of memory that nobody wrote.
"""

from __future__ import annotations

import re

__all__ = ["EXPRESSIONS", "UNARY", "by_rank"]

_ELEMENTWISE = """
{x}.sin()
{x}.cos()
{x}.tanh()
{x}.sigmoid()
{x}.clamp(max=2).exp()
{x}.abs().log1p()
({x}.abs() + 0.1).sqrt()
({x}.square() + 0.5).rsqrt()
({x}.abs() + 0.5).reciprocal()
({x}.abs() + 1).log()
{x}.clamp(max=2).expm1()
{x}.atan()
{x}.erf()
{x}.abs()
-{x}
{x}.sinc()
{x}.frac()
{x}.sign() * {x}
({x}.abs() + 1).lgamma()
{x}.tanh() ** 3
({x}.abs() + 0.5) ** 0.5
{x}.clamp(-1, 1)
{x}.clamp_min(0.1)
{x}.clone()
{x}.nan_to_num()
{x}.relu()
F.relu6({x})
F.gelu({x})
F.gelu({x}, approximate="tanh")
F.silu({x})
F.mish({x})
F.elu({x})
F.selu({x})
F.celu({x})
F.softplus({x})
F.softsign({x})
F.logsigmoid({x})
F.hardtanh({x}, -0.5, 0.5)
F.hardswish({x})
F.hardsigmoid({x})
F.leaky_relu({x}, 0.2)
F.tanhshrink({x})
F.softshrink({x}, 0.1)
F.prelu({x}, {P(1)})
{x} * {k}
{x} + {k}
{k} - {x}
{x} / ({x}.abs() + {k})
{x} + {b}
{x} - {y}
{x} * {b}
{x} / ({b}.abs() + 1)
torch.maximum({x}, {y})
torch.minimum({x}, {b})
torch.atan2({x}, {b}.abs() + 0.5)
torch.hypot({x}, {y} + 3)
torch.logaddexp({x}, {y})
torch.lerp({x}, {y}, {k})
torch.addcmul({x}, {y}, {b}, value={k})
torch.addcdiv({x}, {y}, {b}.abs() + 1)
torch.where({x} > {b}, {x}, {y})
torch.where({y} > 0, {x} * 2, {k})
{x}.masked_fill({y} > 0.5, {k})
{x} * ({y} > 0)
({x}.abs() + 0.5).pow({b}.tanh())
torch.fmod({x}, 0.7)
torch.remainder({x}, 0.7)
torch.polar({x}.abs(), {y}).real
torch.view_as_real(torch.complex({x}, {y}) * torch.complex({y}, {x}))
torch.complex({x}, {y}).abs()
{x}.sin() if {x}.sum() > 0 else {x}.cos()
{x}.tanh() + {x}.shape[-1] if {x}.dim() else {x}
{x}.double()
{x}.float()
{x}.to({y}.dtype)
{x}.contiguous()
{x} + torch.zeros_like({y})
{x}.sum() * {y}
{x}.mean()
{x} - {x}.mean()
({x} * {y}).sum()
{x}.square().mean().sqrt()
F.mse_loss({x}, {y})
F.mse_loss({x}, {y}, reduction="none")
F.smooth_l1_loss({x}, {y})
F.huber_loss({x}, {y}, delta=0.3)
F.l1_loss({x}, {y}.detach())
F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())
F.kl_div(F.logsigmoid({x}), {y}.sigmoid(), reduction="mean")
torch.linalg.vector_norm({x}) + 1
torch.stack([{x}, {y}])
torch.stack([{x}, {x}], dim=-1).sum(-1)
torch._foreach_mul([{x}, {z}], {k})
torch._foreach_tanh([{x}, {y}])
"""

_VECTORS = """
{x}.sum({d})
{x}.sum({d}, keepdim=True)
{x}.mean({d}, keepdim=True)
{x}.var({d}, correction=0)
({x}.var({d}, correction=0) + 0.1).sqrt()
torch.var_mean({x}, {d}, correction=0)
{x}.amax({d})
{x}.amin({d}, keepdim=True)
{x}.max({d}).values
{x}.min({d})[0]
{x}.median({d}).values
{x}.logsumexp({d})
{x}.tanh().prod({d})
{x}.norm(dim={d})
{x}.cumsum({d})
{x}.tanh().cumprod({d})
{x}.logcumsumexp({d})
{x}.cummax({d}).values
{x}.softmax({d})
F.softmin({x}, {d})
{x}.log_softmax({d})
{x}.sort({d}).values
{x}.sort({d}, descending=True).values * {x}
{x}.topk({part}, {d}).values
{x}.kthvalue(1, {d}).values
{x}.argsort({d}).to({x}.dtype) * {x}
{x}.diff(dim={d}, prepend={x})
F.layer_norm({x}, ({n},))
F.layer_norm({x}, ({n},), {P(n)}, {P(n)})
F.rms_norm({x}, ({n},), {P(n)})
F.normalize({x}, dim={d})
F.glu(torch.cat([{x}, {y}], {d}), {d})
F.linear({x}, {P(3,n)})
F.linear({x}, {P(4,n)}, {P(4)})
F.linear({x}, {P(n,n)}, {P(n)}) + {x}
{x} @ {P(n,2)}
{x} @ {P(n)}
torch.einsum("...i,ij->...j", {x}, {P(n,3)})
torch.tensordot({x}, {P(n,2)}, dims=1)
F.bilinear({x}, {y}, {P(2,n,n)})
torch.outer({x}.flatten()[:3], {y}.flatten()[:3])
torch.dot({x}.flatten(), {y}.flatten())
torch.kron({x}.flatten()[:3], {y}.flatten()[:2])
F.cosine_similarity({x}, {y}, dim={d})
{x}.gather({d}, {x}.argsort({d}))
torch.take_along_dim({x}, {y}.argsort({d}), {d})
{x}.scatter({d}, {x}.argsort({d}), {y})
{x}.scatter_add({d}, {y}.argsort({d}), {y})
{x}.scatter_reduce({d}, {y}.argsort({d}), {y}, "amax")
{x}.index_select({d}, {index})
{x}.index_add({d}, {index}, {x}.index_select({d}, {index}), alpha={k})
{x}.index_copy({d}, torch.tensor([{i}]), {y}.select({d}, 0).unsqueeze({d}))
{x}.index_fill({d}, {index}, {k})
{x}.index_put((torch.tensor([0]),), torch.full((), {k}, dtype={x}.dtype), accumulate=True)
{x}[torch.tensor([0, -1])]
{x}[..., {index_last}]
{x}[torch.arange({x}.shape[0])] * 2
F.embedding(torch.tensor([[0, 1], [1, 0]]), {P(2,3)})
F.embedding({x}.argsort(-1), {P(n,2)})
F.embedding_bag(torch.tensor([[0, 1], [2, 0]]), {P(3,2)}, mode="mean")
F.one_hot({x}.argsort(-1), {n}).to({x}.dtype) * {x}.unsqueeze(-1)
F.cross_entropy({x}.reshape(-1, {n}), {x}.reshape(-1, {n}).argmax(-1))
F.cross_entropy({x}.reshape(-1, {n}), {y}.reshape(-1, {n}).softmax(-1), label_smoothing=0.1)
F.nll_loss({x}.reshape(-1, {n}).log_softmax(-1), {y}.reshape(-1, {n}).argmax(-1))
torch.cat([{x}, {y}], {d})
torch.cat([{x}, {x}.flip({d})], {d}).narrow({d}, 0, {part})
torch.hstack([{x}, {y}])
{x}.roll(1, {d})
{x}.flip({d})
{x}.repeat_interleave(2, {d})
F.pad({x}, (1, 1))
F.pad({x}, (0, 1), value={k})
torch.fft.rfft({x}, dim={d}).abs()
torch.view_as_real(torch.fft.fft({x}, dim={d}))
torch.fft.irfft(torch.fft.rfft({x}, dim={d}), n={D}, dim={d})
torch.cdist({x}.reshape(-1, {n}), {y}.reshape(-1, {n}) + 2)
torch.linalg.vector_norm({x}, dim={d})
{x}.unsqueeze(-1) * {y}.unsqueeze(-2)
"""

_MATRICES = """
{x} @ {x}.mT
{x}.mT @ {y}
torch.matmul({x}, {y}.transpose(-1, -2))
torch.einsum("...ij,...kj->...ik", {x}, {y})
F.scaled_dot_product_attention({x}, {x}, {x})
F.scaled_dot_product_attention({x}.contiguous(), {y}.contiguous(), {x}.contiguous(), is_causal=True)
F.scaled_dot_product_attention({x} @ {P(n,n)}, {x}, {y})
F.scaled_dot_product_attention({x}.unsqueeze(0), {y}.unsqueeze(0), {x}.unsqueeze(0), attn_mask=({x} @ {y}.mT).detach() > -1)
{x}.tril()
{x}.triu(1)
{x}.trace() if {x}.dim() == 2 else {x}.sum()
torch.linalg.inv({x} @ {x}.mT + 2 * torch.eye({m}, dtype={x}.dtype))
torch.linalg.solve({x} @ {x}.mT + 2 * torch.eye({m}, dtype={x}.dtype), {y})
torch.linalg.cholesky({x} @ {x}.mT + 2 * torch.eye({m}, dtype={x}.dtype))
torch.linalg.det({x} @ {x}.mT * 0.1 + torch.eye({m}, dtype={x}.dtype))
torch.linalg.matrix_norm({x})
torch.addmm({P(m,2)}, {x}, {P(n,2)})
torch.mm({x}, {P(n,3)})
torch.mv({x}, {P(n)})
torch.baddbmm({P(2,2)}, {x}.reshape(-1, {m}, {n})[:, :2], {P(1,n,2)}.expand({x}.reshape(-1, {m}, {n}).shape[0], -1, -1))
torch.linalg.multi_dot([{x}, {P(n,2)}, {P(2,3)}])
torch.block_diag({x}, {y})
torch.rot90({x})
F.layer_norm({x}.contiguous(), ({n},))
F.layer_norm({x}.unsqueeze(-1), ({n}, 1))
F.batch_norm({x}, None, None, training=True)
F.max_pool1d({x}, 2, 1, 1)
F.avg_pool1d({x}, 2, 1, 1)
F.adaptive_avg_pool1d({x}, 2)
F.adaptive_max_pool1d({x}, 2)
F.conv1d({x}, {P(2,m,1)})
F.conv1d({x}, {P(3,m,3)}, {P(3)}, padding=1)
F.conv_transpose1d({x}, {P(m,2,2)})
F.pad({x}, (1, 1), mode="replicate")
F.pad({x}, (1, 1), mode="circular")
"""

_VOLUMES = """
torch.bmm({x}, {y}.mT)
F.conv1d({x}, {P(m,1,2)}, padding=1, groups={m})
F.conv2d({x}, {P(2,c,2,2)}, padding=1)
F.conv2d({x}.unsqueeze(1), {P(2,1,1,2)}, {P(2)}, padding=1)
F.interpolate({x}, scale_factor=2, mode="linear")
F.interpolate({x}.unsqueeze(0), scale_factor=2, mode="nearest")
F.instance_norm({x}.repeat(1, 1, 2))
F.local_response_norm({x}, 2)
F.pixel_shuffle({x}.repeat_interleave(4, -3), 2)
F.max_pool2d({x}, 2, 1, 1)
F.avg_pool2d({x}, 2, 1, 1)
F.layer_norm({x}.contiguous(), ({n},)) * {P(m)}.sum() + {P(m)}.sum()
F.layer_norm({x}, ({m}, {n}))
torch.einsum("bij,bkj->bik", {x}, {y})
"""

_VIEWS_0 = """
{x}.view({x}.shape)
{x}.view_as({y})
{x}.unsqueeze(0)
{x}.unsqueeze(-1)
{x}.expand(2, *{x}.shape)
{x}[None]
{x}[...]
{x}.reshape(-1)
{x}.squeeze()
torch.broadcast_to({x}, (2, *{x}.shape))
torch.broadcast_tensors({x}, {b})
"""

_VIEWS_1 = """
{x}.view(-1)
{x}.flatten()
{x}.narrow({d}, 0, {part})
{x}.select({d}, {i})
{x}[{i_first}]
{x}[..., {i_last}]
{x}[..., :{part_last}]
{x}[::2]
{x}.squeeze({d})
{x}.unfold({d}, {part}, 1)
{x}.chunk(2, {d})
{x}.chunk(2, {d})[0]
{x}.split({part}, {d})
{x}.tensor_split(2, {d})
{x}.unbind({d})
{x}.unbind({d})[-1]
{x}.as_strided((2,), (1,))
{x}.diag_embed()
{x}.unflatten({d}, (1, -1))
"""

_VIEWS_2 = """
{x}.t()
{x}.mT
{x}.transpose({d}, -1)
{x}.transpose({d}, 0)
{x}.permute(*range({x}.dim() - 1, -1, -1))
{x}.movedim(0, -1)
{x}.diagonal(dim1=-2, dim2=-1)
{x}.flatten(0, 1)
{x}.transpose(-1, -2).reshape(-1, {m})
{x}.swapaxes(0, 1)
"""

_CUSTOM = """
Square.apply({x})
Tanh.apply({x})
Gate.apply({x}, {y})
Gate.apply({x}, {x})[0]
Threshold.apply({x})
Scale.apply({x}, {k})
ReadsTwice.apply({x}, {y})
TwoOutputs.apply({x})
TwoOutputs.apply({x})[1]
Rerun.apply({x})
Straight.apply({x})
Parts.apply({x}, {y})
Parts.apply({x}, {y})[0]
Parts.apply({x}, {y}.detach())[1] * {k}
Parts.apply({x}, {x})[2] * {y}
"""

_FAILURES = """
Fails.apply({x})
Fails.apply({x} * {k}) * {y}
"""

_WRAPPERS = """
Unboxed.apply(Boxed.apply({x}).sin() * {k})
Unboxed.apply(Boxed.apply({x}) * Boxed.apply({y}).sigmoid())
Unboxed.apply(F.silu(Boxed.apply({x}) + {y}).tanh_())
"""

_KERNELS = """
Overwrites.apply({x} * {k})
Overwrites.apply({x} - {y}).sin() + {b}
(lambda h: Overwrites.apply(h) * (h * {k}).sin())({x} + {k})
(lambda h: Overwrites.apply(h) + Overwrites.apply(h * {k}) + h)({x} * {k})
Turns.apply({x} + {k}) * {y}
Turns.apply({x} * {k}).sin()
(lambda h: (Turns.apply(h) * {k}, h + 1))({x} - {k})[1]
Fills.apply({x}, {y})
Fills.apply({x} * {k}, {x})[0]
Noise.apply({x})
Noise.apply({x} * {k}).tanh()
Scratch.apply({x} * {k})
(lambda h: Scratch.apply(h) + (h * 2).cos().sin())({x} + {k})
Marks.apply({x}, torch.zeros_like({x}).detach())
Marks.apply({x} * {k}, torch.ones_like({x}).detach())[0] * {y}
Product.apply({x})
Product.apply({x} * {k}) * {y}
"""

_RANDOM_0 = """
F.dropout({x}, 0.4)
F.dropout({x}, 0.4) + F.dropout({y}, 0.2)
F.alpha_dropout({x}, 0.3, training=True)
F.rrelu({x}, 0.1, 0.5, training=True)
torch.rand_like({x}) * {x}
torch.randn_like({x}) + {x}
torch.bernoulli({x}.sigmoid().detach()) * {x}
torch.normal({x}.detach(), 0.1) * {x}
{x} * torch.randint_like({x}, 1, 4)
{x} * torch.empty_like({x}).uniform_(0.5, 1.5)
{x} * torch.empty_like({x}).exponential_().clamp(max=2)
{x} + torch.poisson({x}.detach().abs())
{x} + 0.1 * torch.randn({x}.shape, dtype={x}.dtype)
{x}.sin() if torch.rand(()) > 0.5 else {x}.cos()
"""

_RANDOM_1 = """
{x}[torch.randperm({x}.shape[0])]
{x}.index_select(-1, torch.multinomial({x}.reshape(-1, {n}).softmax(-1)[0], 1))
F.gumbel_softmax({x}, hard=True)
F.gumbel_softmax({x}, tau=0.7)
{x}[..., torch.randint({n}, (2,))]
F.dropout({x}.unsqueeze(0), 0.3, inplace=False).squeeze(0)
"""

_RANDOM_2 = """
F.feature_alpha_dropout({x}, 0.3, training=True)
F.dropout1d({x}, 0.3)
F.scaled_dot_product_attention({x}, {y}, {x}, dropout_p=0.3)
F.fractional_max_pool2d({x}.repeat(1, 2, 2), 2, output_size=2)
"""

_GENERATORS = """
torch.rand({x}.shape, generator={g}, dtype={x}.dtype) * {x}
torch.bernoulli({x}.sigmoid().detach(), generator={g}) * {x}
{x} * torch.empty_like({x}).normal_(generator={g})
torch.normal({x}.detach(), 0.2, generator={g}) * {x}
{x}.reshape(-1)[torch.randperm({x}.numel(), generator={g})]
"""

_PYTHON_RANDOM = """
{x} * random.random()
{x} * random.gauss(0, 1)
random.choice([{x}.sin(), {x}.cos()])
{x}.roll(random.randrange(3))
"""

_NUMPY_RANDOM = """
{x} * float(np.random.rand())
{x}.sin() if np.random.rand() < 0.5 else {x}.cos()
{x} * torch.from_numpy(np.random.rand(*{x}.shape)).to({x}.dtype)
"""

_TRACKED = """
{x} * number({source})
{x}.sin() if number({source}) < 0.5 else {x}.cos()
"""

_AMBIENT_0 = """
{x} * surroundings()
({x} * surroundings()).sin()
{x}.sin() if surroundings() > 1 else {x}.cos()
{x} * {x}.sin()
{x} * torch.full({x}.shape, 0.1).exp()
{x}.sin() + torch.tensor(0.1)
"""

_AMBIENT_1 = """
{x} @ torch.eye({n}, dtype={x}.dtype)[:, :2]
{x} @ {P(n,2)}
{x} * torch.linspace(0, 1, {n})
"""

_AMBIENT_2 = """
F.scaled_dot_product_attention({x}, {y}, {x})
F.scaled_dot_product_attention({x}[None, None], {y}[None, None], {x}[None, None])[0, 0]
"""


def by_rank(**texts):
    """Returns templates by least rank, from texts by name such as ``rank_2``."""
    return {int(name[-1]): text.strip().split("\n") for name, text in texts.items()}


#: Expressions of one tensor alone that keep its shape.
UNARY = [text for text in _ELEMENTWISE.strip().split("\n")[:40] if set(re.findall(r"{(.*?)}", text)) == {"x"}]

#: By feature, then by least rank.
EXPRESSIONS = {
    "operators": by_rank(rank_0=_ELEMENTWISE, rank_1=_VECTORS, rank_2=_MATRICES, rank_3=_VOLUMES),
    "views": by_rank(rank_0=_VIEWS_0, rank_1=_VIEWS_1, rank_2=_VIEWS_2),
    "custom_functions": by_rank(rank_0=_CUSTOM),
    "failures": by_rank(rank_0=_FAILURES),
    "kernels": by_rank(rank_0=_KERNELS),
    "wrappers": by_rank(rank_0=_WRAPPERS),
    "random": by_rank(rank_0=_RANDOM_0, rank_1=_RANDOM_1, rank_2=_RANDOM_2),
    "generators": by_rank(rank_0=_GENERATORS),
    "python_random": by_rank(rank_0=_PYTHON_RANDOM),
    "numpy_random": by_rank(rank_0=_NUMPY_RANDOM),
    "tracked_sources": by_rank(rank_0=_TRACKED),
    "ambient": by_rank(rank_0=_AMBIENT_0, rank_1=_AMBIENT_1, rank_2=_AMBIENT_2),
}
