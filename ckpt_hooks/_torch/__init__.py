"""Every private call into torch: its use, and why the public way does not serve.

Unless a comment says otherwise, each call is in torch 2.11 to 2.15, and can be removed once there is a public way.

To check a new release of torch, read these modules and run the suite. Timings: torch 2.13, an x86-64 core.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

_VERSIONS = "torch 2.11 to 2.15"
_release = tuple(map(int, torch.__version__.split(".")[:2]))


@contextlib.contextmanager
def hook_points() -> Iterator[None]:
    """Turns a missing part of torch into an ImportError that names the part and the supported versions."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"ckpt_hooks works with {_VERSIONS}, and this is torch {torch.__version__}, which lacks a part that ckpt_hooks "
            f"needs: {error}. Install one of these versions, or a later ckpt_hooks."
        ) from error


with hook_points():
    if _release < (2, 11):
        raise ImportError("saved-tensor hooks as they are since 2.11")
    from . import autograd as autograd
    from . import compiling as compiling
    from . import functions as functions
    from . import modes as modes
    from . import profiling as profiling
    from . import tensors as tensors

if _release > (2, 15):
    warnings.warn(
        f"ckpt_hooks is tested with {_VERSIONS}, and this is torch {torch.__version__}. All parts that ckpt_hooks needs are "
        "there, but results were not tested: compare losses with and without ckpt_hooks, or install a later ckpt_hooks.",
        stacklevel=2,
    )
