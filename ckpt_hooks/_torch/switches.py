"""Private getters and setters of torch's switches, at a twentieth of the time of the public forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

C: Any = torch._C
# A guard compares torch's global state with the state when the guard was made, as compiled code does, and imports no compiler.
# It also compares autocast and gradient mode, which have no setters here. In torch 2.11 to 2.15.
GlobalStateGuard: Any = torch._C._dynamo.guards.GlobalStateGuard

# The precision of float32, by kind of operator: "ieee", "tf32", "bf16", "none". The older getters below take a third of the
# time, but raise for settings which only this newer way can express.
precision_of: Callable[[str, str], str] = C._get_fp32_precision_getter
set_precision_of: Callable[[str, str, str], object] = C._set_fp32_precision_setter

read_cudnn_tf32: Callable[[], bool] = C._get_cudnn_allow_tf32
write_cudnn_tf32: Callable[[bool], object] = C._set_cudnn_allow_tf32

read_matmul_precision: Callable[[], str] = C._get_float32_matmul_precision
write_matmul_precision: Callable[[str], object] = C._set_float32_matmul_precision

read_function_state: Callable[[], Any] = C._get_torch_function_state
write_function_state: Callable[[Any], object] = C._set_torch_function_state
FUNCTIONS_ENABLED: Any = C._TorchFunctionState.ENABLED

has_xpu: bool = torch.xpu._is_compiled()


def read_deterministic() -> tuple[bool, bool]:
    return C._get_deterministic_algorithms(), C._get_deterministic_algorithms_warn_only()


def write_deterministic(values: tuple[bool, bool]) -> None:
    C._set_deterministic_algorithms(values[0], warn_only=values[1])
