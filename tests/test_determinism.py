"""What recomputed values are compared by."""

from __future__ import annotations

import pytest
import torch
import torch.nested
from torch.testing._internal.two_tensor import TwoTensor

from ckpt_hooks._tensors.determinism import first_difference, hash_of, projections_of
from ckpt_hooks._tensors.samples import differing
from tests.measure import peak_of

#: Every dtype there is, but for those of quantised tensors, which say more than numbers.
DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
DTYPES = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.qint", "torch.quint"))]
SHAPES = [(), (1,), (5,), (1, 1), (4, 1), (1, 4), (3, 5), (2, 3, 1), (1, 2, 2), (2, 1, 3), (2, 3, 4)]


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of some dtype with different values."""
    count = torch.Size(shape).numel()
    return torch.arange(count).mul(37).remainder(101).reshape(shape).to(torch.float32).to(dtype)


def dense(shape: tuple[int, ...]) -> list[int]:
    return list(torch.empty(shape).stride())


#: Strides of a tensor of some shape, and how far from the beginning of its memory it starts.
LAYOUTS = {
    "dense": lambda shape: (dense(shape), 0),
    "somewhere within": lambda shape: (dense(shape), 3),
    "other way round": lambda shape: (list(reversed(dense(tuple(reversed(shape))))), 0),
    "every other number": lambda shape: ([2 * stride for stride in dense(shape)], 1),
    "rows apart": lambda shape: (dense((*shape[:-1], shape[-1] + 2)) if shape else [], 1),
    "odd strides of dimensions of one": lambda shape: (
        [7 if size == 1 else stride for size, stride in zip(shape, dense(shape), strict=True)],
        0,
    ),
    "no strides of dimensions of one": lambda shape: (
        [0 if size == 1 else stride for size, stride in zip(shape, dense(shape), strict=True)],
        0,
    ),
    "first dimension expanded": lambda shape: ([0, *dense(shape)[1:]] if shape else [], 0),
    "last dimension expanded": lambda shape: ([*dense(shape)[:-1], 0] if shape else [], 0),
    "one number": lambda shape: ([0] * len(shape), 0),
}


def laid_out(bits: torch.Tensor, dtype: torch.dtype, strides: list[int], offset: int) -> torch.Tensor:
    """Returns a tensor that has some bytes, the last dimension of which is the bytes of one number, laid out in some way."""
    *shape, width = bits.shape
    end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    memory = torch.full((end * width,), 1, dtype=torch.uint8)
    place = memory.as_strided(bits.shape, [*(stride * width for stride in strides), 1], offset * width)
    for dimension, stride in enumerate(strides):
        if stride == 0:
            place, bits = place.narrow(dimension, 0, 1), bits.narrow(dimension, 0, 1)
    place.copy_(bits)
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, strides)


def bits_of(dtype: torch.dtype, shape: tuple[int, ...], strides: list[int]) -> torch.Tensor:
    """Returns different bytes for each number, which are the same along dimensions of stride 0."""
    width = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * width
    bits = torch.arange(count).mul(37).remainder(101).to(torch.uint8).reshape(*shape, width)
    if dtype is torch.bool:
        bits %= 2
    for dimension, stride in enumerate(strides):
        if stride == 0:
            bits = bits.narrow(dimension, 0, 1).expand(*shape, width)
    return bits.contiguous()


def are_equal(one, other):
    return first_difference([one], [other]) is None


@pytest.mark.filterwarnings("ignore:B?Complex")
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *((dtype, "dense") for dtype in DTYPES),
        *(
            (dtype, layout)
            for layout in LAYOUTS
            if layout != "dense"
            for dtype in (torch.float32, torch.bool, torch.complex128)
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_values_of_any_kind(dtype, layout):
    """The same numbers are the same wherever they lie, and to change one of them is seen, where all are looked at.

    A recompute may find a value in memory that is laid out otherwise; it is the same value.
    """
    for shape in SHAPES:
        strides, offset = LAYOUTS[layout](shape)
        bits = bits_of(dtype, shape, strides)
        tensor, plain = laid_out(bits, dtype, strides, offset), laid_out(bits, dtype, dense(shape), 0)
        assert tensor.shape == plain.shape == torch.Size(shape)
        found = hash_of(tensor)
        assert are_equal(found, hash_of(plain))
        assert are_equal(found, hash_of(tensor))
        rows = bits.flatten(0, -2) if shape else bits.unsqueeze(0)
        for place in range(len(rows)) if layout == "dense" else {0, len(rows) // 2, len(rows) - 1}:
            other = rows.clone()
            other[place, place % other.shape[1]] ^= 1
            assert not are_equal(found, hash_of(laid_out(other.reshape(bits.shape), dtype, dense(shape), 0)))


@pytest.mark.filterwarnings("ignore:B?Complex")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_without_values(dtype):
    for shape in [(0,), (3, 0), (0, 3), (2, 0, 1)]:
        assert hash_of(torch.empty(shape, dtype=dtype)) is None
        assert hash_of(torch.empty(shape, dtype=dtype).mT if len(shape) > 1 else torch.empty(shape, dtype=dtype)) is None
    assert hash_of(torch.empty(3, 4, dtype=dtype, device="meta")) is None
    assert hash_of(torch.empty(3, 0, dtype=dtype, device="meta")) is None


def pairs():
    """Returns functions of one number that make tensors which are more than numbers in memory."""

    def dense_of(number):
        tensor = torch.zeros(4, 6)
        tensor[0, 1], tensor[2, 3] = 2.0, number
        return tensor

    def by_channel(number):
        scales, zeros = torch.tensor([0.1, 0.2, 0.5, 0.3]), torch.tensor([0, 1, 0, 2])
        return torch.quantize_per_channel(dense_of(number), scales, zeros, 0, torch.qint8)

    nested = torch.nested.nested_tensor
    complex_of = dense_of(3.0).to(torch.complex64)
    return {
        "coo": lambda number: dense_of(number).to_sparse(),
        "coo, not summed up": lambda number: torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 3]], [1.0, 1.0, number], (4, 6)),
        "coo, hybrid": lambda number: dense_of(number).to_sparse(1),
        "coo, other places": lambda number: torch.sparse_coo_tensor([[0, int(number)], [1, 3]], [2.0, 3.0], (9, 6)),
        "csr": lambda number: dense_of(number).to_sparse_csr(),
        "csc": lambda number: dense_of(number).to_sparse_csc(),
        "bsr": lambda number: dense_of(number).to_sparse_bsr((2, 2)),
        "bsc": lambda number: dense_of(number).to_sparse_bsc((2, 2)),
        "mkldnn": lambda number: dense_of(number).to_mkldnn(),
        "nested": lambda number: nested([torch.ones(2), torch.full((3,), number)]),
        "nested, other sizes": lambda number: nested([torch.ones(8 - int(number)), torch.ones(int(number))]),
        "nested, transposed": lambda number: nested([torch.ones(2, 4), torch.full((3, 4), number)]).transpose(1, 2),
        "jagged": lambda number: nested([torch.ones(2), torch.full((3,), number)], layout=torch.jagged),
        "quantised": lambda number: torch.quantize_per_tensor(dense_of(number), 0.1, 3, torch.quint8),
        "quantised, other scale": lambda number: torch.quantize_per_tensor(dense_of(3.0), number, 3, torch.qint32),
        "quantised by channel": by_channel,
        "conjugate": lambda number: (complex_of + 1j * number).conj(),
        "conjugate, 0-dimensional": lambda number: torch.tensor(1 + number * 1j).conj(),
        "conjugate, half": lambda number: (complex_of + 1j * number).to(torch.complex32).conj(),
        "negative": lambda number: (complex_of + 1j * number).conj().imag,
        "negative and conjugate": lambda number: torch._neg_view((complex_of + 1j * number).conj()),
        "parameter": lambda number: torch.nn.Parameter(dense_of(number)),
        "buffer": lambda number: torch.nn.Buffer(dense_of(number)),
        "two tensors": lambda number: TwoTensor(torch.ones(2), torch.full((2,), number)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(pairs()))
def test_values_of_what_is_more_than_numbers_in_memory(kind):
    make = pairs()[kind]
    found = hash_of(make(3.0))
    assert are_equal(found, hash_of(make(3.0)))
    assert not are_equal(found, hash_of(make(5.0)))


def test_what_a_jagged_tensor_finds_out_later_is_no_value():
    """It notes the lengths of its shortest and longest row when somebody asks."""
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    before = hash_of(tensor)
    tensor._get_max_seqlen()
    tensor._get_min_seqlen()
    assert are_equal(hash_of(tensor), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(2,), (64,), (4096,), (512, 1024), (4096, 256), (256, 4096)], ids=str)
def test_hashes_of_equal_values_differ(shape, dtype):
    """Which an exclusive or takes for nothing where there is an even number of them, and a sum where that is a large power."""
    values = (0.0, 1.0) if dtype is torch.bool else (0.0, 1.0, -1.0, 2.0, 4.0, 0.5)
    found = {int(hash_of(torch.full((1,), value, dtype=dtype).expand(shape).contiguous())) for value in values}
    assert len(found) == len(values)


def test_differences_that_cancel_each_other_out_in_two_rows_are_seen():
    """As roundings do, of which some go up and some go down."""
    tensor = numbers(torch.float32, 4, 8) + 1
    other = tensor.clone()
    other.view(torch.int32)[0, 0] += 1
    other.view(torch.int32)[2, 3] -= 1
    assert hash_of(other) != hash_of(tensor)


@pytest.mark.parametrize("shape", [(5,), (4, 8), (4, 3, 8), (40_000, 2), (3, 1 << 20)], ids=str)
def test_rows_in_another_order_are_seen(shape):
    """As a batch that a function shuffles by a source of its own."""
    tensor = torch.rand(shape)
    assert hash_of(tensor.roll(1, 0)) != hash_of(tensor) != hash_of(tensor.flip(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex128], ids=str)
def test_hashes_of_a_dimension_of_one_with_any_stride(dtype):
    """Which is dense whatever that stride is."""
    tensor = numbers(dtype, 4)
    assert hash_of(tensor.as_strided((4, 1), (1, 4))) == hash_of(tensor.reshape(4, 1).clone())
    assert hash_of(tensor[:1].as_strided((1, 1), (1, 0))) == hash_of(tensor[:1].reshape(1, 1).clone())


#: Large tensors, which differ in what their memory is read by.
LARGE = {
    "two columns": lambda: torch.randn(1_000_000, 2),
    "booleans in threes": lambda: torch.rand(1_500_000, 3) < 0.5,
    "bytes, one a row": lambda: torch.randint(256, (5_000_000, 1), dtype=torch.uint8),
    "int64": lambda: torch.randint(1 << 62, (1_000, 1_000)),
    "int64, transposed": lambda: torch.randint(1 << 62, (1_000, 1_000)).t(),
    "int64, two columns of three": lambda: torch.randint(1 << 62, (300_000, 3))[:, :2],
    "float64, one dimension, every other": lambda: torch.randn(2_000_001, dtype=torch.float64)[1::2],
    "bfloat16": lambda: torch.randn(3, 1_000_003).bfloat16(),
    "float8": lambda: torch.randn(1_500, 1_001).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.randn(2, 1_000_000).t(),
    "transposed, long rows": lambda: torch.randn(1_000, 1_001).t(),
    "three dimensions": lambda: torch.randn(7, 300_001, 3).transpose(0, 2),
    "attention": lambda: torch.randn(2, 3_000, 8, 33).transpose(1, 2),
    "0-dimensional": lambda: torch.randn(()),
    "expanded": lambda: torch.randn(3, 1).expand(1_000_000, 3, 2),
    "expanded to one row": lambda: torch.randn(1).expand(4_000_000),
    "rows far apart": lambda: torch.randn(1_000, 2_000)[:, 3:1_003],
    "complex": lambda: torch.randn(1_000, 1_000, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(1_000, 701, dtype=torch.complex128).conj(),
    "conjugate, transposed": lambda: torch.randn(1_000, 701, dtype=torch.complex64).mH,
    "conjugate, fewer": lambda: torch.randn(200, 300, dtype=torch.complex128).conj(),
    "complex of 16 bits": lambda: torch.view_as_complex(torch.randn(1_000, 1_401, 2).half()).t(),
    "negative": lambda: torch.randn(1_000, 1_401, dtype=torch.complex64).conj().imag,
}
MEMORY = 4 << 20


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", list(LARGE))
def test_hashes_of_large_tensors(kind):
    """They take next to no memory, are the same for any layout, and change with each number."""
    tensor = LARGE[kind]()
    assert peak_of(lambda: hash_of(tensor)) <= max(MEMORY, tensor.nbytes // 64)
    found, plain = hash_of(tensor), tensor.resolve_conj().resolve_neg().contiguous().clone()
    assert are_equal(found, hash_of(plain))
    assert are_equal(found, hash_of(tensor))
    memory = plain.reshape(-1).view(torch.uint8)
    for place in [0, 1, 4_095, 4_096, len(memory) // 2, len(memory) - 4_097, len(memory) - 1]:
        if 0 <= place < len(memory):
            memory[place] ^= 1
            assert not are_equal(found, hash_of(plain))
            memory[place] ^= 1
    assert are_equal(found, hash_of(plain))


def test_hashes_of_many_rows_of_a_few_numbers_see_other_orders():
    """Of rows, which in memory are longer than a row of the hash."""
    tensor = torch.randn(300_000, 2)
    assert not are_equal(hash_of(tensor), hash_of(torch.cat([tensor[:1000], tensor[5000:], tensor[1000:5000]])))


def are_close(one, other, dtype):
    return not differing([(one, other, dtype)])


def close(one, other):
    found = are_close(projections_of(one), projections_of(other), one.dtype)
    assert found is are_close(projections_of(other), projections_of(one), one.dtype)
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", list(LARGE))
def test_projections_of_large_tensors(kind):
    """They take little memory, and are the same for any layout."""
    tensor = LARGE[kind]()
    found, plain = projections_of(tensor), tensor.resolve_conj().resolve_neg().contiguous()
    assert peak_of(lambda: projections_of(tensor)) <= MEMORY
    assert torch.equal(found, projections_of(tensor))
    assert are_close(found, projections_of(plain), tensor.dtype)
    if tensor.dim():
        assert not close(tensor, torch.cat([tensor[1:], tensor[:1]])) or kind in {"expanded", "expanded to one row"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("shape", [(3,), (1_000, 1_000)], ids=str)
def test_what_is_close(shape, scale, dtype):
    """As results of kernels that add in another order are, and no others: a norm is nearly the same for many tensors."""
    tensor, noise = (torch.randn(shape, dtype=dtype) for _ in range(2))
    tensor, noise = tensor * scale, noise * scale
    assert close(tensor, tensor.clone())
    assert close(tensor, tensor + noise * 1e-6)
    assert not close(tensor, tensor + noise * 2e-2)
    assert not close(tensor, noise)
    assert not close(tensor, -tensor)
    assert not close(tensor, torch.zeros_like(tensor))
    assert not close(tensor, tensor * 1.01)
    assert not close(tensor, tensor.roll(1, 0))


def test_projections_are_sums_with_independent_signs():
    numbers = [projections_of(one) for one in torch.eye(2100)]
    assert {tuple(found[[0, 5, 6, 7]].tolist()) for found in numbers} == {(1.0, 0.0, 0.0, 1.0)}
    signs = torch.stack([found[1:5] for found in numbers])
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert (signs.t() @ signs - 2100 * torch.eye(4)).abs().max() < 150
    far = (torch.nn.functional.one_hot(torch.tensor(1024 * row), 1 << 16) for row in range(64))
    rows = torch.stack([projections_of(one)[1:5] for one in far])
    assert set(rows.flatten().tolist()) == {-1.0, 1.0}
    assert (rows.t() @ rows - 64 * torch.eye(4)).abs().max() < 32
    scaled = projections_of(torch.eye(3)[0] * 1e-12)
    assert torch.equal(scaled[1:5], signs[0])
    assert (scaled[0], scaled[7]) == (1, torch.tensor(1e-12).double())


def test_projections_see_other_places():
    tensor = torch.randn(1_000, 1_000)
    assert not close(tensor, tensor[torch.randperm(1_000)])
    assert not close(tensor, tensor[:, torch.randperm(1_000)])
    assert not close(tensor, tensor.t())
    for size in (1 << 17, 1 << 18, 1 << 19, 1 << 20):
        long = torch.randn(4, size)
        assert not close(long, long[[0, 2, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_is_close_in_fewer_bits(dtype):
    tensor = torch.randn(1_000, 1_000)
    one = tensor.to(dtype)
    assert close(one, (tensor * (1 + 1e-4 * torch.randn_like(tensor))).to(dtype))
    assert close(one, one.clone())
    assert not close(one, torch.randn(1_000, 1_000).to(dtype))
    assert not close(one, tensor.roll(1, 0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_that_are_close(dtype):
    """Comparisons flip where numbers are near."""
    tensor = torch.randint(2, (1_000, 1_000), dtype=torch.uint8)
    one, flips = tensor.to(dtype), torch.rand(1_000, 1_000)
    assert close(one, (tensor ^ (flips < 1e-4)).to(dtype))
    assert not close(one, (tensor ^ (flips < 0.3)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("size", [6, 600_000])
def test_numbers_that_are_not_finite(size, dtype):
    """What is infinite or no number in both is equal; at other places it is not."""
    tensor = torch.randn(size)

    def of(*places, values=(float("nan"), float("inf"), -float("inf"))):
        other = tensor.clone()
        for place, value in zip(places, values, strict=False):
            other[place] = value
        return other.to(dtype)

    assert close(of(1, 2, 5), of(2, 1, 5))
    assert close(of(1), of(1, values=(-float("inf"),)))
    assert not close(of(1), of(2))
    assert not close(of(1), of())
    assert not close(of(1), of(1, 2))
    assert not close(of(size - 1), of(size - 2))
    assert close(of(size - 1), of(size - 1))
    everywhere = torch.full((size,), float("nan")).to(dtype)
    assert close(everywhere, torch.full((size,), -float("inf")).to(dtype))
    assert not close(everywhere, tensor.to(dtype))


def test_the_smallest_and_the_largest_numbers():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for number in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4):
            mask = (torch.rand(1_000, 300) < 0.5).to(dtype) * number
            assert close(mask, mask.clone())
            assert not close(mask, mask.flip(0))
            assert not close(mask, mask / 2)


@pytest.mark.filterwarnings("ignore:B?Complex")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projections_of_any_dtype(dtype):
    bits = bits_of(dtype, (300, 40), [40, 1])
    tensor, other = (laid_out(these, dtype, [40, 1], 0) for these in (bits, bits.flip(0)))
    assert close(tensor, laid_out(bits, dtype, [1, 300], 0))
    assert not close(tensor, other)
    for shape in [(0,), (3, 0)]:
        assert projections_of(torch.empty(shape, dtype=dtype)) is None
    assert projections_of(torch.empty(3, 4, dtype=dtype, device="meta")) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(pairs()))
def test_projections_of_what_is_more_than_numbers_in_memory(kind):
    make = pairs()[kind]
    one, same, other = (projections_of(make(number)) for number in (3.0, 3.0, 5.0))
    assert are_close(one, same, torch.float32)
    assert not are_close(one, other, torch.float32)


def test_projections_take_no_random_numbers():
    tensor, before = torch.randn(3), torch.random.get_rng_state()
    projections_of(tensor)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(projections_of(tensor), projections_of(tensor.clone()))
