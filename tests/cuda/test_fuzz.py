"""Random programs with their tensors on the device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.device import DEVICE, needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("impl", ["ours", "ours-mixed"])
def test_random_programs(impl):
    """Bit for bit against plain autograd, in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.fuzz", "--device", DEVICE, "--impl", impl, "--programs", "100"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    raising = re.search(r"(\d+) of which raise", done.stdout)
    assert raising is not None
    assert int(raising[1]) < 50, done.stdout  # of those nothing is seen
