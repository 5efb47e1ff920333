"""``chunked_loss`` of ``enable_in_transformers``: a head that returns lazy logits, which the loss computes in slices."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._torch.pytree import tree_map
from ckpt_hooks.losses import loss_in_chunks

#: Methods of a tensor that treat each row by itself if their arguments are ``_SIMPLE``.
_ROWWISE = {"__mul__", "__rmul__", "__truediv__", "mul", "div", "tanh", "contiguous", "to"}
_ROWWISE |= {"float", "double", "half", "bfloat16"}
_SIMPLE = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format)
#: Methods and attributes that do not depend on values.
_FACTS = {"device", "dim", "dtype", "is_cuda", "is_floating_point", "layout", "ndim", "numel", "shape", "size"}
_OPERATORS = ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "pow", "neg", "eq", "ne", "lt", "le"]
_OPERATORS += ["gt", "ge", "getitem", "setitem", "len", "iter", "bool", "float"]


#: Tensors, each with its version counter.
Versions = list[tuple[torch.Tensor, int]]


class Logits:
    """The logits of all tokens, computed when looked at."""

    def __init__(
        self, head: ChunkedHead, hidden: torch.Tensor, example: torch.Tensor, read: Versions, steps: tuple[Any, ...] = ()
    ) -> None:
        self._head, self._hidden = head, hidden
        self._example = example  # the logits of zero tokens, which have the dtype and the vocabulary of all logits
        self._steps = steps  # the methods called on the logits so far, such as those of a softcap
        self._read = read
        self._is_sharded = False
        self._whole: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in _ROWWISE and isinstance(args[0], Logits):
            return args[0]._call(name, *args[1:], **kwargs)
        args, kwargs = tree_map(lambda value: value.whole() if isinstance(value, Logits) else value, (args, kwargs))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _ROWWISE:
            return partial(self._call, name)
        if name in _FACTS:
            shape = *self._hidden.shape[:-1], self._example.shape[-1]
            return getattr(self._example.new_empty(()).expand(shape), name)
        return getattr(self.whole(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(self.whole())

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call = methodcaller(name, *args, **kwargs)
        if self._whole is not None or not _is_rowwise(name, (*args, *kwargs.values())):
            return call(self.whole())
        with torch.no_grad():
            return Logits(self._head, self._hidden, call(self._example), self._read, (*self._steps, call))

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            self._head.warn()
            self._whole = self._compute(Request(self._steps, lambda logits_of: logits_of(self._hidden)))
        return self._whole

    def loss(self, labels: torch.Tensor, **options: Any) -> torch.Tensor | None:
        """Computes the cross entropy of slices of tokens; None if the logits exist already."""
        if self._whole is not None:
            return None
        self._head.has_loss = True
        in_float32 = *self._steps, methodcaller("float")  # as ForCausalLMLoss does
        return self._compute(Request(in_float32, lambda logits_of: loss_in_chunks(logits_of, self._hidden, labels, **options)))

    def _compute(self, request: Request) -> torch.Tensor:
        now = self._head.read(self._hidden)
        are_others = any(a is not b for (a, _), (b, _) in zip(now, self._read, strict=True))
        if are_others and not self._is_sharded:
            self._read, self._is_sharded = now, True  # the head is a unit of FSDP2, with new parameters in each call
        elif are_others or any(m != n for (_, m), (_, n) in zip(now, self._read, strict=True)):
            raise RuntimeError(
                "chunked_loss: logits are computed when they are looked at, but hidden states or weights of the head were "
                "written to since forward. Look at logits before the optimizer's step, or leave out chunked_loss."
            )
        return self._head.answer(request, self._is_sharded)


def _is_rowwise(name: str, args: tuple[Any, ...]) -> bool:
    if name == "__getitem__":  # only slices of the vocabulary, as in ``logits[..., :words]``
        (index,) = args
        return isinstance(index, tuple) and [type(part) for part in index] == [EllipsisType, slice]
    return name in _ROWWISE and all(isinstance(value, _SIMPLE) for value in args)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._call(name, *args)


for _name in _OPERATORS:
    setattr(Logits, f"__{_name}__", _method(f"__{_name}__"))


class Request(NamedTuple):
    """A computation on logits, run in a call of the head, where FSDP2 has gathered its parameters."""

    steps: tuple[Any, ...]
    compute: Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def _logits_of(forward: Callable[[torch.Tensor], torch.Tensor], steps: tuple[Any, ...], hidden: torch.Tensor) -> torch.Tensor:
    logits = forward(hidden)
    for step in steps:
        logits = step(logits)
    return logits


class ChunkedHead:
    """Replaces ``forward`` in a head's attributes."""

    def __init__(self, head: Module, before: Callable[..., Any] | None) -> None:
        self._owner = weakref.ref(head)  # weak, since the head holds this object
        self.before = before
        self.has_loss = self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkedHead, (self._owner(), self.before)

    @property
    def _head(self) -> Module:
        head = self._owner()
        assert head is not None, "the head holds this object"
        return head

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.before or partial(type(self._head).forward, self._head))(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (hidden, *others) = args or (None,)
        if isinstance(hidden, Request):
            return self.answer(hidden)
        if not self._head.training or not torch.is_grad_enabled() or others or kwargs or not isinstance(hidden, torch.Tensor):
            return self._forward(*args, **kwargs)
        with torch.no_grad():
            example = self._forward(hidden.flatten(0, -2)[:0])
        return Logits(self, hidden, example, self.read(hidden))

    def read(self, hidden: torch.Tensor) -> Versions:
        return [(tensor, tensor._version) for tensor in (hidden, *self._head.parameters())]

    def answer(self, request: Request, by_call: bool = False) -> torch.Tensor:
        if by_call:
            return self._head(request)  # type: ignore[no-any-return]
        return request.compute(partial(_logits_of, self._forward, request.steps))

    def warn(self) -> None:
        if not self.has_loss and not self._has_warned:
            self._has_warned = True
            warn_user(
                "chunked_loss: logits were read before the loss was computed, so the logits of all tokens take memory. Pass "
                "labels to the model, and read logits afterwards."
            )


class ChunkedLoss:
    """Replaces ``loss_function`` in a model's attributes."""

    def __init__(self, before: Callable[..., Any], chunks: int) -> None:
        self.before, self._chunks = before, chunks

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes the loss as ``ForCausalLMLoss`` does."""
        if isinstance(logits, Logits):
            following = shift_labels
            if following is None and labels is not None:
                following = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            if following is not None and following.shape == logits.shape[:-1] and logits.shape[-1] == vocab_size:
                reduction = "mean" if num_items_in_batch is None else "sum"
                options = {"ignore_index": ignore_index, "reduction": reduction, "chunks": self._chunks}
                loss = logits.loss(following.to(logits.device), **options)
                if loss is not None:
                    if isinstance(num_items_in_batch, torch.Tensor):
                        num_items_in_batch = num_items_in_batch.to(loss.device)
                    return loss if num_items_in_batch is None else loss / num_items_in_batch
            logits = logits.whole()
        return self.before(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)


def put_chunked_loss(owner: Any, chunks: int) -> Callable[[], None]:
    """Makes a model compute its loss in slices; returns the function that undoes it."""
    name = type(owner).__name__
    head: Any = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    loss: Any = getattr(owner, "loss_function", None)
    of = None
    if not isinstance(head, Module):
        of = "no output embedding"
    elif getattr(loss, "__name__", "") != "ForCausalLMLoss":
        of = f"the loss {getattr(loss, '__name__', loss)}"
    elif getattr(getattr(type(owner), "loss_function", None), "fset", True) is None:
        of = "a loss that cannot be set, as in early releases of Transformers 4"
    if of is not None:
        raise ValueError(
            f"chunked_loss needs an output embedding and the loss ForCausalLMLoss, but {name} has {of}. Leave chunked_loss "
            "out, or call `ckpt_hooks.losses.chunked_cross_entropy(hidden, head.weight, labels)` for the loss."
        )
    taken, of_slices = ChunkedHead(head, vars(head).get("forward")), ChunkedLoss(loss, chunks)
    undo = partial(_undo, weakref.ref(owner), taken, of_slices, vars(owner).get("_loss_function"))
    vars(head)["forward"] = taken
    owner.loss_function = of_slices
    return undo


def _undo(owner: weakref.ref[Any], taken: ChunkedHead, loss: ChunkedLoss, loss_before: Any) -> None:
    for reference, name, ours, before in (
        (taken._owner, "forward", taken, taken.before),
        (owner, "_loss_function", loss, loss_before),
    ):
        module = reference()
        if module is not None and vars(module).get(name) is ours:
            del vars(module)[name]
            if before is not None:
                vars(module)[name] = before
