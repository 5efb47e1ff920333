"""What is compared of a recompute and its forward: facts of each saved tensor, and fingerprints of values where asked for.

For facts no value is read and no device waits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_hooks._core.misuse import check_signature, wrong


@dataclass(frozen=True)
class Check:
    # Shape, dtype, device and version, or the version alone, which is compared in any case: a saved value modified afterwards
    # is wrong, and plain autograd raises as well.
    facts: Callable[[Any], Any]
    fingerprint: Callable[[torch.Tensor], Any] | None = None  # None: no values


METADATA = operator.attrgetter("shape", "dtype", "device", "_version")

NOTHING = Check(operator.attrgetter("_version"))

_CHECKS = {"default": Check(METADATA), "none": NOTHING}


def check_of(determinism_check: Any) -> Check:
    if isinstance(determinism_check, str):
        if determinism_check in _CHECKS:
            return _CHECKS[determinism_check]
        if determinism_check == "values":
            from .determinism import hash_of

            return Check(METADATA, hash_of)
    elif callable(determinism_check):
        check_signature(determinism_check, "determinism_check", "tensor")
        return Check(METADATA, determinism_check)
    wanted = "one of 'default', 'none', 'values', or a function of a tensor"
    raise wrong(
        determinism_check, "determinism_check", wanted, "Leave it out for 'default', which reads no values.", ValueError
    )


def version_of(facts: Any) -> int:
    version: int = facts[-1] if isinstance(facts, tuple) else facts
    return version
