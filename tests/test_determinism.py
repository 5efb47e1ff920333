"""What recomputed values are compared by."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks.determinism import hash_of, sample_of

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of some dtype with different values."""
    count = torch.Size(shape).numel()
    return torch.arange(count).mul(37).remainder(101).reshape(shape).to(torch.float32).to(dtype)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype)
    return wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)


def other_way_round(tensor: torch.Tensor) -> torch.Tensor:
    dimensions = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dimensions).contiguous().permute(dimensions)


@pytest.mark.parametrize("last", [16, 8, 6, 3, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hash_does_not_depend_on_the_layout(dtype, last):
    """A recompute may find a value in memory that is laid out otherwise; it is the same value."""
    tensor = numbers(dtype, 3, 5, last)
    expected = hash_of(tensor)
    assert expected.dtype is torch.int64
    assert expected.shape == ()
    assert hash_of(other_way_round(tensor)) == expected
    assert hash_of(with_gaps(tensor)) == expected


@pytest.mark.parametrize("make", [hash_of, sample_of])
@pytest.mark.parametrize("last", [16, 3, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_value_counts(dtype, last, make):
    """So few that all are among the samples."""
    tensor = numbers(dtype, 2, last)
    before = make(tensor)
    for place in range(tensor.numel()):
        other = tensor.clone()
        bits = other.view(torch.uint8).view(-1)
        bits[place * tensor.element_size()] ^= 1
        found = make(other)
        assert not torch.equal(found.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


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


def test_hashes_of_what_is_computed_when_it_is_read():
    tensor = numbers(torch.complex64, 4, 2)
    assert hash_of(tensor.conj()) == hash_of(tensor.conj().resolve_conj())
    imaginary = tensor.conj().imag
    assert imaginary.is_neg()
    assert hash_of(imaginary) == hash_of(imaginary.resolve_neg())


def test_hashes_of_expanded_and_of_single_values():
    single = torch.tensor(2.5)
    assert hash_of(single.expand(3, 4)) == hash_of(torch.full((3, 4), 2.5))
    assert hash_of(single) == hash_of(torch.tensor([2.5]))
    assert hash_of(torch.empty(0)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex128], ids=str)
def test_hashes_of_a_dimension_of_one_with_any_stride(dtype):
    """Which is dense whatever that stride is."""
    tensor = numbers(dtype, 4)
    assert hash_of(tensor.as_strided((4, 1), (1, 4))) == hash_of(tensor.reshape(4, 1).clone())
    assert hash_of(tensor[:1].as_strided((1, 1), (1, 0))) == hash_of(tensor[:1].reshape(1, 1).clone())


def test_hashes_have_no_history():
    tensor = torch.ones(2, 4, requires_grad=True)
    assert not hash_of(tensor).requires_grad
    assert not hash_of(tensor * 2).requires_grad
