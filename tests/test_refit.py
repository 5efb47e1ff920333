"""Copies of tensors, and putting content and version back."""

from __future__ import annotations

import pytest
import torch

from ckpt_hooks._tensors.copies import copy_of, fill_all, restore_layout, stand_in_for


def written(*shape: int) -> torch.Tensor:
    """Returns a tensor that was written to twice."""
    return torch.zeros(*shape).add_(1).add_(1)


LAYOUTS = {
    "contiguous": lambda: written(3, 4),
    "transposed": lambda: written(4, 3).t(),
    "expanded": lambda: written(3, 1).expand(3, 4),
    "with gaps": lambda: written(3, 8)[:, ::2],
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3, 4)),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("copy", [copy_of, stand_in_for])
def test_copies_have_memory_of_their_own(copy, make):
    tensor = make()
    found = copy(tensor)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert not found.requires_grad


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_what_stands_in_for_a_tensor_has_its_version(make):
    assert stand_in_for(make())._version == make()._version


def test_restore_layout_returns_what_fits_already():
    tensor = written(3, 4)
    assert restore_layout(tensor, (4, 1), 2) is tensor
    other = restore_layout(tensor, (1, 3), 5)
    assert (other.stride(), other._version) == ((1, 3), 5)
    assert torch.equal(other, tensor)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_content_and_version_are_put_back(make):
    tensor = make()
    content, version, enabled = copy_of(tensor), tensor._version, torch.is_grad_enabled()
    with torch.no_grad():
        tensor[:, :1].mul_(5) if tensor.stride(1) == 0 else tensor.mul_(5)
    fill_all([(tensor, version, content, None)])
    assert torch.equal(tensor, content)
    assert tensor._version == version
    assert torch.is_grad_enabled() is enabled


def test_all_versions_are_put_back_of_tensors_that_share_memory():
    """Views have the version of what they are views of: the last one of them that is filled says which."""
    base = written(4)
    halves = base[:2], base[2:]
    contents = [copy_of(half) for half in halves]
    base.mul_(3)
    fill_all((half, 2, content, None) for half, content in zip(halves, contents, strict=True))
    assert torch.equal(base, torch.full((4,), 2.0))
    assert base._version == 2


def test_what_was_filled_has_its_version_when_a_later_one_fails():
    first, content = written(2), torch.ones(2)

    def tensors():
        yield first, 7, content, None
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fill_all(tensors())
    assert first._version == 7
    assert torch.equal(first, content)
    assert torch.is_grad_enabled()


def test_another_shape_is_put_back():
    """An observer gives its statistics the shape of what it sees first."""
    tensor = torch.zeros(0)
    content = copy_of(tensor)
    tensor.resize_(4).fill_(1)
    fill_all([(tensor, 0, content, None)])
    assert tensor.shape == (0,)
    assert tensor._version == 0
