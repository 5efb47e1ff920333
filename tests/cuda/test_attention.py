"""Attention under each of its kernels: what it saves, how it draws, and what of that may be compared."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckpt_hooks import checkpoint
from tests.cuda.device import DEVICE, WAYS, assert_as_eager, each, eager, needs_cuda, outcome, step

pytestmark = needs_cuda

KERNELS = [name for name in SDPBackend.__members__ if name not in ("ERROR", "OVERRIDEABLE")]
COMPARED = {
    "values": functools.partial(checkpoint, determinism_check="values"),
}


class Attention(nn.Module):
    """Self-attention of eight heads, with a dropout of its own after it."""

    def __init__(self, width: int, dropout: float, *, is_causal: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.is_causal = dropout, is_causal

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=self.is_causal)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)


def program_with(kernel: str, dropout: float, *, is_causal: bool = True):
    """Returns a program whose forward alone is told which kernel to take; skips the test where there is none."""

    def program(run):
        module = Attention(512, dropout, is_causal=is_causal).to(DEVICE, torch.bfloat16)
        x = torch.randn(2, 100, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

        def with_kernel(function, x):
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                return run(function, x)

        return step(with_kernel, module, x)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which name the reasons
            outcome(program, eager)
    except RuntimeError as error:
        if kernel == "MATH" or not any(word in str(error) for word in ("kernel", "cuDNN")):
            raise
        pytest.skip(f"no such kernel here: {error}")
    return program


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kernel", KERNELS)
@each({**WAYS, **COMPARED})
def test_attention(run, kernel, dropout):
    """Bit for bit, and where values are compared nothing that a kernel leaves unfilled is taken for one."""
    assert_as_eager(program_with(kernel, dropout), run)


@pytest.mark.parametrize("kernel", KERNELS)
@each({**WAYS, **COMPARED})
def test_attention_that_is_not_causal(run, kernel):
    """Another variant of the same kernels."""
    assert_as_eager(program_with(kernel, 0.0, is_causal=False), run)


@pytest.mark.parametrize("kernel", KERNELS)
@each(COMPARED)
def test_compared_again_and_again(run, kernel):
    """Memory that a kernel leaves unfilled holds something else each time."""
    program = program_with(kernel, 0.0)
    for _ in range(5):
        junk = [torch.randint(256, (512,), dtype=torch.uint8, device=DEVICE) for _ in range(100)]
        del junk
        outcome(program, run)
