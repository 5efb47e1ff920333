"""A fake mode that tells of the memory which real tensors would take."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import graph
from torch.utils._pytree import tree_leaves, tree_map_only

from .autograd import current_node, sequence_number
from .tensors import num_holders, run_past_modes, set_versions, version_of

# What fake tensors raise where a result depends on data, or an operator has no rule. 2.11 to 2.15. Goes with a public way.
_WITHOUT_VALUES: Any = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
_ENGINE = graph._engine_run_backward.__code__
_ADD = torch.ops.aten.add.Tensor
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class Run(NamedTuple):
    """A run of an operator."""

    number: int  # 0 outside of operators
    name: str | None
    made_node: bool


_NO_RUN = Run(0, None, False)


class DryMode(FakeTensorMode):
    # A fake mode is the last of all modes, so it sees replays of recorded regions and what these call past other modes. Real
    # tensors are exchanged for fake ones operator by operator: nothing is written to them. 2.11 to 2.15, private in all of
    # these. Goes with a public way.
    def __init__(self, temporary_of: Callable[[Any, Any, list[Any]], int]) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.tell: Callable[[int, int, torch.device], object] | None = None  # of each change: address, bytes, device
        self.run = _NO_RUN
        self._runs = itertools.count(1).__next__
        self._sequence = sequence_number()
        self._temporary_of = temporary_of
        self._is_inside = False  # of an operator, whose parts are none of the program's
        self._alive: dict[int, tuple[Any, int, torch.device]] = {}
        self._fakes: dict[int, tuple[Any, int, Any]] = {}  # of real tensors, with their versions, by identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        self._is_inside = True
        before, self._sequence = self._sequence, sequence_number()
        try:
            if func not in _LIFTS:
                args, kwargs = tree_map_only(torch.Tensor, self.fake, (args, kwargs or {}))
            given = _tensors_in((args, kwargs))
            known = {one.untyped_storage()._cdata for one in given}
            found = super().__torch_dispatch__(func, types, args, kwargs or {})
        except _WITHOUT_VALUES as error:
            raise ValueError(
                f"The step calls {func}, whose result depends on values, or which has no rule for fake tensors: a dry run has "
                "shapes alone. Leave the call out of the step, give sizes and branches that do not depend on data, register a "
                "fake kernel (torch.library.register_fake), or measure a real step without a dry run."
            ) from error
        finally:
            self._is_inside = False
        if torch.Tag.nondeterministic_seeded in func.tags:  # so that regions find states of their own
            generator = kwargs.get("generator") if kwargs else None
            run_past_modes(partial(torch.rand, 1, generator=generator))
        made = _tensors_in(found)
        self.run = Run(self._runs(), str(func), self._sequence > before)
        # Where gradients meet, the engine adds in place to the first if it alone has that, but not for subclasses.
        if func is _ADD and current_node() is None and sys._getframe(1).f_code is _ENGINE and num_holders(given[0]) == 1:
            self._end(given[0].untyped_storage()._cdata, None)
        for one in made:
            if one.untyped_storage()._cdata not in known:
                self.begin(one)
        if made and (temporary := self._temporary_of(func, args, made)):
            self._change(0, temporary, made[0].device)
            self._change(0, -temporary, made[0].device)
        self.run = _NO_RUN
        return found

    def begin(self, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes and key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._end, key)), nbytes, tensor.device
            self._change(key, nbytes, tensor.device)

    def _end(self, key: int, _: object) -> None:
        if (found := self._alive.pop(key, None)) is not None:
            self._change(key, -found[1], found[2])

    def _change(self, key: int, nbytes: int, device: torch.device) -> None:
        if self.tell is not None:
            self.tell(key, nbytes, device)

    def fake(self, tensor: Any) -> Any:
        """Returns a fake tensor for a real one, the same each time; on the default device for one of the meta device."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            version = version_of(tensor)
            if tensor.is_meta:
                device = torch.get_default_device()
                shape = tensor.shape, tensor.stride()
                with self:
                    found = torch.empty_strided(*shape, dtype=tensor.dtype, device=device)
            else:
                # A single number stays known, in a copy, as an optimizer's number of steps.
                is_known = tensor.numel() == 1 and tensor.device.type == "cpu"
                real = tensor.detach().clone() if is_known else tensor
                found = self.fake_tensor_converter.from_real_tensor(self, real, make_constant=is_known)
            self._fakes[id(tensor)] = tensor, version, found
        return self._fakes[id(tensor)][2]

    def put_back(self) -> None:
        """Sets the versions of real tensors, whose contents are as they were, to what they were."""
        for tensor, version, _ in self._fakes.values():
            if version_of(tensor) != version:
                set_versions((tensor,), (version,))


def _tensors_in(values: Any) -> list[Any]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
