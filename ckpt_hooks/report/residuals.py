"""Tensors saved for backward: of a function, by running it once, or of a live graph, by reading it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ckpt_hooks._core.settings import observe

from .formatting import as_text
from .graph import GraphReader
from .notes import Known, Notes, OperatorNotes
from .saved_entries import SavedResiduals, tables_of


def saved_residuals(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SavedResiduals:
    """Runs a function once, and lists each tensor that its backward would hold.

    Each storage is billed once, with the operator which made it, the line of the user's program, the module, the region, and
    the reason for holding. Tensors dropped by regions are listed apart.

    The function runs as ever, in training mode or not: random numbers are drawn, buffers are written to. Its graph is dropped,
    and no backward runs. Under ``torch.no_grad()`` nothing is saved. Operators run under a dispatch mode, as in
    :func:`ckpt_hooks.checkpoint_region`, at some 20 us each.

    Args:
        function: The function, or a module. Its result is a tensor, or holds tensors in lists, tuples, dicts or dataclasses.
        *args: The arguments.
        **kwargs: The keyword arguments.

    Returns:
        The report: ``tensors``, ``total_bytes``, ``added_bytes`` (without arguments, parameters and other memory from before),
        ``by_reason``, ``dropped``, ``dropped_bytes``.

    Raises:
        TypeError: If the result holds no tensor.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint
        >>> from ckpt_hooks.report import saved_residuals
        >>> x = torch.ones(256, requires_grad=True)
        >>> saved_residuals(lambda x: x.sin().exp(), x).by_reason
        {'argument': 1024, 'saved': 1024}
        >>> saved_residuals(checkpoint()(lambda x: x.sin().exp()), x).dropped_bytes
        1024
    """
    notes = Notes()
    with observe(notes), OperatorNotes(notes):
        result = function(*args, **kwargs)
    tensors = _tensors_in(result)
    if not tensors:
        raise TypeError(
            f"saved_residuals reads the graph of the function's result, but got {type(result).__name__}, in which it finds no "
            "tensor. Return tensors, alone or in lists, tuples, dicts or dataclasses."
        )
    known = Known()
    for module in notes.outermost.values():
        known.add_module(module)
    known.add_arguments([("args", args), ("kwargs", kwargs)])
    reader = GraphReader(known, notes)
    with _collector_off():
        reader.read(tensors)
        unclaimed = reader.unclaimed(tensors)
        del result, tensors
        reader.add_unseen(unclaimed)
        return reader.report()


def saved_tensors_report(*results: Any, known: Any = ()) -> SavedResiduals:
    """Reads which tensors a live graph holds for backward. Nothing runs, and no tensor is brought back.

    The nodes which saved a tensor are known always. Lines, and the storages of dropped tensors, are known where forward ran
    under :func:`ckpt_hooks.trace`. Elsewhere ``dropped_bytes`` is an upper bound: a tensor counts for each node which saved it,
    but for views of parameters. Memory that C++ nodes do not show is missing, as inside of ``CopySlices``, left by a write into
    a view: :func:`saved_residuals` has it.

    Torch cannot free a graph of more than some 50,000 operators in a row after a walk over its nodes: its stack overflows.

    Args:
        *results: Results of forward: tensors, alone or in lists, tuples, dicts or dataclasses.
        known: Modules and tensors which exist in any case, in any nesting. Their tensors have reasons of their own, and names.

    Returns:
        The report, as by :func:`saved_residuals`.

    Raises:
        TypeError: If there is no tensor in the results.

    Example:
        >>> import torch
        >>> from ckpt_hooks.report import saved_tensors_report
        >>> layer = torch.nn.Linear(8, 8)
        >>> loss = layer(torch.ones(2, 8)).sin().sum()
        >>> saved_tensors_report(loss, known=layer).by_reason
        {'saved': 128}
    """
    tensors = _tensors_in(results)
    if not tensors:
        raise TypeError(
            f"saved_tensors_report reads the graph of tensors, but got {[type(result).__name__ for result in results]}, in "
            "which it finds no tensor. Pass the loss, or the results of forward."
        )
    there = Known()
    there.add_arguments([("known", known)])
    reader = GraphReader(there)
    with _collector_off():
        reader.read(tensors)
        return reader.report()


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Switches off the garbage collector: it would go through the entries of a large report again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, dict):  # of a class that torch's trees do not know
            found += _tensors_in(list(leaf.values()))
    return found


def print_saved_residuals(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Prints the report of :func:`saved_residuals`, as wide as the terminal at most.

    Args:
        function: The function, or a module, which runs once.
        *args: The arguments.
        **kwargs: The keyword arguments.

    Raises:
        TypeError: If the result holds no tensor.

    Example:
        >>> import torch
        >>> from ckpt_hooks.report import print_saved_residuals
        >>> layer = torch.nn.Linear(8, 8)
        >>> print_saved_residuals(lambda x: layer(x).relu(), torch.ones(2, 8))  # doctest: +ELLIPSIS
        backward holds 128 B in 2 storages, 64 B of this for backward alone
        ...
    """
    print(saved_residuals(function, *args, **kwargs))  # noqa: T201


def format_saved_residuals(report: SavedResiduals, max_rows: int = 60) -> str:
    """Returns a report as text: totals by reason, then rows with the largest first. Layers alike share a row.

    Args:
        report: A report.
        max_rows: The number of rows of a table; the rest is summed up.

    Returns:
        The lines.

    Example:
        >>> import torch
        >>> from ckpt_hooks.report import format_saved_residuals, saved_tensors_report
        >>> y = torch.ones(256, requires_grad=True).exp()
        >>> print(format_saved_residuals(saved_tensors_report(y)))
        backward holds 1.0 KiB in 1 storage, 1.0 KiB of this for backward alone
        <BLANKLINE>
           bytes  storages  reason
         1.0 KiB         1  saved
        <BLANKLINE>
           bytes  tensor        reason  saved by
         1.0 KiB  float32[256]  saved   ExpBackward0
    """
    return as_text(report._headline(), tables_of(report, max_rows))
