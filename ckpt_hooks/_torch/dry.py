"""A fake mode which reports the memory that real tensors would take."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .autograd import is_called_by_engine
from .tensors import dry_storages, num_holders, set_versions, version_of

# The errors of operators on fake tensors if a result depends on data, or an operator has no fake kernel.
_DEPENDS: Any = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
# Operators whose real results have other sizes than their fake results: real kernels add workspaces for backward.
_UNKNOWN = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
_BLOCK = 512  # bytes: allocators of accelerators round sizes up to a multiple of this


class _AskedByTorch(type):
    # Some programs take another path if a tensor is fake, such as Transformers for masks of attention
    # (https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py), so programs get False. Torch
    # must get the true answer, and only the calling frame tells torch from a program.
    def __instancecheck__(cls, instance: object) -> bool:
        name = sys._getframe(1).f_globals.get("__name__", "")
        return name.partition(".")[0] == "torch" and isinstance(instance, FakeTensor)


class _Fake(metaclass=_AskedByTorch):
    pass


class DryMode(FakeTensorMode):
    # Torch asks a fake mode after all other modes, so it also sees operators that recorded regions replay, or call past other
    # modes. Each operator gets fake tensors in place of the program's real tensors, to which nothing is written.
    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self._tell: Callable[..., object] = lambda *_: None
        self._is_inside = False  # whether an operator runs: operators of its decomposition do not count
        self._made: dict[int, weakref.ref[Any]] = {}
        self._real: dict[int, tuple[torch.Tensor, int, FakeTensor]] = {}  # by ``id``: tensor, version before, fake
        self._totals: dict[Any, int] = {}
        vars(torch._subclasses)["FakeTensor"] = _Fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, frames of torch._dynamo would come between the caller and ``sys._getframe(1)``

    def listen(self, tell: Callable[..., object]) -> None:
        """Calls a function with each later change of memory: address, changed bytes, device, and the device's bytes in use."""
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:
            return self.dispatch(func, types, args, kwargs or {})
        if func._schema.name in _UNKNOWN:
            raise _unknown(func)
        args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        inputs = _tensors_in((args, kwargs))
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._is_inside = True
        try:
            returned = self.dispatch(func, types, args, kwargs)
        except _DEPENDS as error:
            raise _unknown(func) from error
        finally:
            self._is_inside = False
        outputs = _tensors_in(returned)
        if func is torch.ops.aten.add.Tensor and is_called_by_engine(sys._getframe(1)):
            # The engine adds in place to a real gradient that only the engine has (torch/csrc/autograd/input_buffer.cpp), but
            # never to a fake. So the memory of the fake that a real addition would reuse counts as freed here.
            alone = next((tensor.untyped_storage() for tensor in inputs if num_holders(tensor) == 1), None)
            if alone is not None:
                self._end(alone._cdata, alone.nbytes())
        if any(declared.alias_info is None for declared in func._schema.returns):
            for output in outputs:
                if (storage := output.untyped_storage())._cdata not in known:
                    self._begin(storage, output.device)
        if temporary := _temporary_of(func, inputs, outputs):
            self._change(-1, temporary, outputs[0].device)
            self._change(-1, -temporary, outputs[0].device)
        return returned

    def _begin(self, storage: Any, device: torch.device) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._made and nbytes:
            self._made[key] = weakref.ref(storage, lambda _: self._end(key, nbytes))
            dry_storages[key] = device
            self._change(key, nbytes, device)

    def _end(self, key: int, nbytes: int) -> None:
        if self._made.pop(key, None) is not None:
            self._change(key, -nbytes, dry_storages.pop(key))

    def _change(self, key: int, nbytes: int, device: torch.device) -> None:
        if device.type != "cpu":
            nbytes = (-(-abs(nbytes) // _BLOCK)) * (_BLOCK if nbytes > 0 else -_BLOCK)
        self._totals[device] = self._totals.get(device, 0) + nbytes
        self._tell(key, nbytes, device, self._totals[device])

    def _fake(self, tensor: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._real:
            self._is_inside = True
            try:
                self._real[id(tensor)] = tensor, version_of(tensor), self._converted(tensor)
            finally:
                self._is_inside = False
        return self._real[id(tensor)][2]

    def _converted(self, tensor: torch.Tensor) -> Any:
        if tensor.is_meta:
            return self.like(tensor)
        # The fake of a single number on the host knows the value, such as an optimizer's count of steps. It gets a copy, since
        # operators write to the known value.
        is_known = tensor.numel() == 1 and tensor.device.type == "cpu"
        constant = tensor.detach().clone() if is_known else tensor
        return self.fake_tensor_converter.from_real_tensor(self, constant, make_constant=is_known)

    def like(self, tensor: torch.Tensor) -> Any:
        """Returns a fake tensor like a meta tensor, on the default device."""
        with self:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.get_default_device())

    def end(self) -> None:
        """Restores the versions of real tensors: autograd counts writes before this mode exchanges the tensors."""
        vars(torch._subclasses)["FakeTensor"] = FakeTensor
        self._tell = lambda *_: None
        for key in self._made:
            dry_storages.pop(key, None)
        self._made.clear()
        for tensor, version, _ in self._real.values():
            if version >= 0:
                set_versions((tensor,), (version,))
        self._real.clear()


def _tensors_in(values: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _unknown(func: Any) -> ValueError:
    return ValueError(
        f"The step calls {func}, and a dry run has no values for it, or no rule for the sizes of its results. Leave the call "
        "out of the step (`.item()` for a log, say), make sizes and branches independent of data, or run the step for real: "
        "plan_memory without dry_run, or memory_ledger."
    )


_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # floats in a register


def _temporary_of(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Returns the most bytes that a kernel of the host takes besides its results, by shapes; 0 where there is no rule."""
    if not outputs or outputs[0].device.type != "cpu":
        return 0
    name = func._schema.name.removeprefix("aten::")
    if name in ("convolution", "convolution_backward"):
        return _of_convolution(inputs, outputs, is_backward=name == "convolution_backward")
    if name == "native_batch_norm_backward":
        return outputs[0].nbytes if inputs[0].is_contiguous() else 0
    if name.startswith("upsample_") and name.endswith("_backward"):
        return 0 if inputs[0].is_contiguous() else inputs[0].nbytes
    if name.startswith("upsample_"):  # for small pictures the kernel copies to channels last
        is_copied = inputs[0].is_contiguous() and inputs[0].dim() == 4 and sum(outputs[0].shape[2:]) <= 128
        return inputs[0].nbytes + outputs[0].nbytes if is_copied else 0
    if torch.Tag.pointwise in func.tags:  # inputs are cast to the dtype of the result
        casts = [cast for cast in inputs if cast.dim() and cast.dtype != outputs[0].dtype and cast.is_floating_point()]
        return sum(cast.numel() for cast in casts) * outputs[0].itemsize if outputs[0].is_floating_point() else 0
    return 0


def _of_convolution(inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, is_backward: bool) -> int:
    # oneDNN copies tensors to a form in which channels lie in groups, a channel for each lane of a register, and results back.
    # Torch does not report these bytes (https://uxlfoundation.github.io/oneDNN/dev_guide_understanding_memory_formats.html).
    y, x, weight = (inputs[0], *inputs[1:3]) if is_backward else (outputs[0], *inputs[:2])
    step = x.shape[-1] / y.shape[-1]  # the stride, or its inverse for a transposed convolution
    if max(weight.shape[2:]) == 1 and step == 1 and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return 0  # a product of matrices, without copies
    if not x.is_contiguous() or x.dtype is not torch.float32:  # channels last or other dtypes: only weights are copied
        return (1 + is_backward + weight.is_contiguous()) * weight.nbytes
    of_x = _in_lanes(x, _LANES, 1) if x.shape[1] >= _LANES else 0
    of_y, of_weight = _in_lanes(y, _LANES, 1), _in_lanes(weight, _LANES, 0)
    if not is_backward:
        return max(of_x + of_weight + of_y - y.nbytes, of_y + (y.nbytes if step < 0.75 else 0))
    gradient, total = (x.nbytes if outputs[0].shape == x.shape else 0), sum(output.nbytes for output in outputs)
    lanes = 8 if 8 <= x.shape[1] < 16 else _LANES
    of_weights = gradient + of_weight + _in_lanes(y, lanes, 1) + (_in_lanes(x, lanes, 1) if x.shape[1] >= 8 else 0)
    if not gradient:
        return of_weights - total
    of_x = _in_lanes(x, _LANES, 1)
    of_data = max(of_y + of_weight + of_x, of_x + gradient * (2 if step > 1.5 else 1))
    return max(of_data, of_weights) - total


def _in_lanes(tensor: torch.Tensor, lanes: int, dim: int) -> int:
    channels = tensor.shape[dim]
    return tensor.nbytes // channels * (-(-channels // lanes) * lanes)
