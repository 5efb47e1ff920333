"""Tensors saved for backward: of a function, by running it once, or of a live graph, by reading it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ckpt_hooks._core.observers import observe
from ckpt_hooks._core.words import kind_in_words

from .entries import Reason, Residual, SavedResiduals
from .formatting import fold_names, format_bytes, format_table, name_pattern
from .graph import GraphReader
from .notes import Known, Notes, OperatorNotes

__all__ = ["format_saved_residuals", "print_saved_residuals", "saved_residuals", "saved_tensors_report"]


def saved_residuals(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SavedResiduals:
    """Runs a function once, and lists each tensor that its backward would hold.

    Each storage is billed once, with the operator which made it, the line of the user's program, the module, the region, and
    the reason for holding. Tensors dropped by regions are listed apart.

    The function runs as ever, in training mode or not: random numbers are drawn, buffers are written to. Its graph is dropped,
    and no backward runs. Under ``torch.no_grad()`` nothing is saved. Operators run under a dispatch mode, as in
    :func:`ckpt_hooks.checkpoint_region`, at some 20 us each.

    Args:
        function: The function, or a module. Its result is a tensor, or holds tensors in lists, tuples, dicts or dataclasses.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

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

    Operators and lines are known for regions that were observed; the nodes which saved a tensor are known always. Memory that
    C++ nodes do not show is missing, as inside of ``CopySlices``, left by a write into a view: :func:`saved_residuals` has it.
    Torch cannot free a graph of more than some 50,000 operators in a row after a walk over its nodes: its stack overflows.

    Args:
        *results: Results of forward: tensors, alone or in lists, tuples, dicts or dataclasses.
        known: Modules and tensors which exist in any case, in any nesting. Their tensors have reasons of their own, and names.

    Returns:
        The report, as by :func:`saved_residuals`. A dropped tensor that was saved several times counts each time.

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
    """Prints the report of :func:`saved_residuals`.

    Args:
        function: The function, or a module, which runs once.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

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
    print(format_saved_residuals(saved_residuals(function, *args, **kwargs)))  # noqa: T201


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
    count = len(report.tensors)
    lines = [
        f"backward holds {format_bytes(report.total_bytes)} in {count} storage{'s' * (count != 1)}, "
        f"{format_bytes(report.added_bytes)} of this for backward alone"
    ]
    if report.dropped:
        lines[0] += f"; regions dropped {format_bytes(report.dropped_bytes)}"
    counts: dict[str, int] = {}
    for entry in report.tensors:
        counts[entry.reason.value] = counts.get(entry.reason.value, 0) + 1
    rows = [[format_bytes(nbytes), str(counts[reason]), reason] for reason, nbytes in report.by_reason.items()]
    if rows:
        lines += ["", *_indented(format_table(["bytes", "storages", "reason"], rows, right=[0, 1]))]
        lines += ["", *_indented(_table(report.tensors, max_rows))]
    if report.dropped:
        lines += ["", "dropped, and brought back in backward:", *_indented(_table(report.dropped, max_rows))]
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f" {line}" for line in lines]


_COLUMNS = ("bytes", "", "tensor", "reason", "operator", "line", "module", "region", "saved by", "why")


def _table(entries: Sequence[Residual], max_rows: int) -> list[str]:
    """Returns the lines of a table of entries: a row for each group of entries alike, the largest groups first."""
    groups: dict[Any, list[Residual]] = {}
    patterns: dict[str | None, str | None] = {None: None}
    for entry in entries:
        for name in (entry.module, entry.name):
            if name not in patterns:
                patterns[name] = name_pattern(name or "")
        key = (
            entry.nbytes,
            entry.shape,
            entry.dtype,
            entry.reason,
            entry.operator,
            entry.site,
            patterns[entry.module],
            patterns[entry.name],
            tuple(map(name_pattern, entry.region)) if entry.region else (),
            entry.saved_by,
            entry.why,
            tuple((view.shape, view.reason, view.saved_by) for view in entry.views) if entry.views else (),
        )
        group = groups.get(key)
        if group is None:
            groups[key] = [entry]
        else:
            group.append(entry)
    ordered = sorted(groups.values(), key=lambda group: -group[0].nbytes * len(group))
    rows: list[list[str]] = []
    for group in ordered[:max_rows]:
        rows += _rows_of(group)
    lines = format_table(_COLUMNS, rows, right=[0, 1])
    rest = [entry for group in ordered[max_rows:] for entry in group]
    if rest:
        lines.append(f"and {len(rest)} more, {format_bytes(sum(entry.nbytes for entry in rest))}")
    return lines


def _rows_of(group: Sequence[Residual]) -> list[list[str]]:
    first = group[0]
    times = f"x{len(group)}" if len(group) > 1 else ""
    size = format_bytes(first.nbytes * len(group)) if first.nbytes or first.dtype is not None else "?"
    rows = [[size, times, *_cells_of(first, group)]]
    rows += [["", "", *_view_cells(view)] for view in first.views]
    return rows


def _cells_of(entry: Residual, group: Sequence[Residual]) -> list[str]:
    operator = (entry.operator or "").removeprefix("aten.").removesuffix(".default")
    names = fold_names(each.name for each in group if each.name is not None)
    module = fold_names(each.module for each in group if each.module is not None)
    region = fold_names("/".join(each.region) for each in group)
    why = entry.why if entry.reason in _IN_WORDS else ""
    return [
        _kind_of(entry) + (f" {names}" if names else ""),
        entry.reason.value,
        operator,
        entry.site or "",
        module,
        region,
        ", ".join(entry.saved_by),
        why,
    ]


#: Reasons which need more words.
_IN_WORDS = frozenset({Reason.HOOKS, Reason.CTX, Reason.NAME, Reason.NOT_REPLAYED, Reason.UNSEEN})


def _view_cells(view: Residual) -> list[str]:
    cells = _cells_of(view, [view])
    cells[0] = f"  as {_kind_of(view)}"
    cells[2] = cells[3] = cells[4] = ""
    return cells


def _kind_of(entry: Residual) -> str:
    return "?" if entry.dtype is None else kind_in_words((entry.dtype, entry.shape))
