"""The cross entropy of a linear layer, in slices of tokens: the logits of all tokens never exist at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ._checkpoint.chunks import checkpoint_chunks
from ._core.misuse import check_is, checked_part, integer_in, wrong
from ._torch.compiling import skipped

__all__ = ["chunked_cross_entropy"]


@skipped
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunks: int | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes the cross entropy of ``hidden @ weight.T + bias`` in slices of tokens, each slice a region.

    In place of a head and its loss, of which the logits are the largest tensor of a step::

        loss = F.cross_entropy(head(hidden).flatten(0, -2).float(), labels.flatten())  # tokens by vocabulary, four times
        loss = chunked_cross_entropy(hidden, head.weight, labels)  # an eighth of the tokens by vocabulary

    The loss and its gradients are bitwise those of the loop over slices without regions. They differ from one call for all
    tokens by rounding: logits of slices are other matrix products, and the gradient of ``weight`` is a sum over slices.

    Kept until the graph is freed:
        ``hidden``, ``weight``, ``bias`` and ``labels``. If the leading dimensions of ``hidden`` cannot be viewed as one, a copy
        of it: for the next token do not cut ``hidden``, but shift ``labels`` and fill with ``ignore_index``. The logits of a
        slice exist in forward until its loss is known. Backward computes them again, from the last slice to the first, and
        drops them before the next. At its end it holds the gradient of ``hidden`` twice, and one gradient of ``weight`` besides
        the running sum.

    Dtypes:
        Logits and ``softcap`` have the dtype of the matrix product, which is the dtype of autocast where that is on. Half
        precision becomes float32 for the loss, a slice at a time, as in Transformers. The gradient of ``weight`` is summed in
        the dtype of the matrix product: with a weight in half precision, more slices round more often.

    Args:
        hidden: The input of the head, floating point: ``[..., hidden size]``.
        weight: The weight of the head, ``[vocabulary, hidden size]``, of the same dtype, except under autocast. It may be the
            weight of an embedding too.
        labels: The indices of words, integers: ``[...]``, one for each row of ``hidden``.
        bias: The bias of the head, ``[vocabulary]``, or None.
        chunks: The number of slices. There are fewer where tokens are fewer. Each slice costs one addition to the gradient of
            ``weight``. None means 8, if there is no ``chunk_size``.
        chunk_size: The number of tokens of a slice, in place of ``chunks``.
        ignore_index: The label of tokens to leave out of the loss.
        reduction: ``"mean"`` over the labels that are not ignored, NaN if all are; ``"sum"``; or ``"none"``, which returns a
            loss for each label.
        label_smoothing: The part of each target that is spread evenly over the vocabulary, from 0.0 to 1.0.
        softcap: Replaces logits by ``softcap * tanh(logits / softcap)``, as ``final_logit_softcapping`` of Gemma does.

    Returns:
        A scalar, or with ``"none"`` a tensor of the shape of ``labels``: float64 for logits in float64, else float32.

    Raises:
        TypeError: If ``hidden``, ``weight``, ``labels`` or ``bias`` is not a tensor of the right kind of dtype.
        ValueError: If a shape does not fit ``hidden``, the dtypes of ``hidden``, ``weight`` and ``bias`` differ outside of
            autocast, or another option is invalid.

    Note:
        Sources: losses in slices, Hsu et al., "Liger Kernel" (2024, arXiv:2410.10989); the memory of logits, Wijmans et al.,
        "Cut Your Losses in Large-Vocabulary Language Models" (2024, arXiv:2411.09009). Both compute gradients by kernels of
        their own; this is the program of :func:`ckpt_hooks.checkpoint_chunks`, for any device, and any backward. Under FSDP
        call it where the unit that owns ``weight`` is gathered.

    Example:
        >>> import torch
        >>> from ckpt_hooks.losses import chunked_cross_entropy
        >>> head = torch.nn.Linear(4, 10, bias=False)
        >>> hidden, labels = torch.ones(2, 6, 4, requires_grad=True), torch.zeros(2, 6, dtype=torch.long)
        >>> loss = chunked_cross_entropy(hidden, head.weight, labels, chunks=3)
        >>> loss.backward()
        >>> loss.shape, hidden.grad.shape
        (torch.Size([]), torch.Size([2, 6, 4]))
    """
    _check_tensors(hidden, weight, labels, bias)
    ignored = integer_in(ignore_index)
    if ignored is None or not -(2**63) <= ignored < 2**63:
        advice = "Pass a label that is no index of a word, such as -100."
        raise wrong(ignore_index, "ignore_index", "an integer of 64 bits", advice, ValueError)
    if reduction not in ("mean", "sum", "none"):
        raise wrong(reduction, "reduction", "'mean', 'sum' or 'none'", "Leave it out for the mean.", ValueError)
    smoothing = checked_part(label_smoothing, "label_smoothing", "Leave it out for no smoothing.")
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap <= sys.float_info.max):
        raise wrong(softcap, "softcap", "a positive number, or None", "Leave it out to keep logits as they are.", ValueError)
    return loss_in_chunks(
        _logits, hidden, labels, (weight, bias, softcap), ignored, reduction, smoothing, chunks=chunks, chunk_size=chunk_size
    )


def loss_in_chunks(
    logits_of: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    args: tuple[Any, ...] = (),
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Computes the cross entropy of ``logits_of(rows, *args)``, for rows of a slice of ``hidden``."""
    tokens = labels.numel()
    flat = labels.reshape(tokens).to(torch.int64)
    loss: torch.Tensor = checkpoint_chunks(
        _loss_of_slice,
        hidden.reshape(tokens, hidden.shape[-1]),
        flat,
        ignore_index,
        "none" if reduction == "none" else "sum",
        label_smoothing,
        logits_of,
        *args,
        chunked="labels",
        reduce=None if reduction == "none" else "sum",
        **options,
    )
    if reduction == "mean":
        return loss / (flat != ignore_index).sum()
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _loss_of_slice(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    logits_of: Callable[..., torch.Tensor],
    *args: Any,
) -> torch.Tensor:
    logits = logits_of(hidden, *args)
    if logits.dtype in (torch.float16, torch.bfloat16):  # as ForCausalLMLoss of Transformers does
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _check_tensors(hidden: Any, weight: Any, labels: Any, bias: Any) -> None:
    for name, value in {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}.items():
        if name != "bias" or value is not None:
            check_is(value, torch.Tensor, name, "a tensor", "Pass hidden states, weight, labels and bias, in this order.")
    if not hidden.is_floating_point() or not hidden.dim():
        raise wrong(hidden, "hidden", "a floating point tensor [..., hidden size]", "Pass the input of the head.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise wrong(labels, "labels", "a tensor of integers", "Pass an index for each token, and not probabilities.")
    size, words = hidden.shape[-1], weight.shape[0] if weight.dim() else 0
    if weight.dim() != 2 or weight.shape[1] != size:
        wanted = f"a tensor [vocabulary, {size}], for hidden states of that size"
        raise wrong(weight, "weight", wanted, "Pass the weight of the head as torch.nn.Linear has it.", ValueError)
    if bias is not None and bias.shape != (words,):
        raise wrong(
            bias, "bias", f"a tensor [{words}], a value for each row of weight", "Pass the bias of the same head.", ValueError
        )
    if labels.shape != hidden.shape[:-1]:
        wanted = f"a tensor {[*hidden.shape[:-1]]}, a label for each row of hidden"
        raise wrong(
            labels,
            "labels",
            wanted,
            "For next tokens, shift labels, not hidden, and fill the end with ignore_index.",
            ValueError,
        )
    for name, value in {"weight": weight, "bias": bias}.items():
        if value is not None and value.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            wanted = f"of the dtype of hidden, {hidden.dtype}"
            raise wrong(value, name, wanted, f"Cast it, `{name}.to(hidden.dtype)`, or use torch.autocast.", ValueError)
