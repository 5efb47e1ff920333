"""Tensors saved for backward: of a function, by running it once, or of a live graph, by reading it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ckpt_hooks._core.descriptions import kind_in_words
from ckpt_hooks._core.events import observe
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import Misuse, check_is

from .entries import Printed, Residual, Table, alike, count_of, fold_names, format_bytes, json_of, name_pattern, times
from .graph import ForwardNotes, GraphReader, OperatorNotes

#: Reasons of memory that is there without backward, too.
_THERE_ANYWAY = frozenset({Reason.ARGUMENT, Reason.PARAMETER, Reason.OUTSIDE})


@dataclasses.dataclass(frozen=True, repr=False)
class SavedResiduals(Printed):
    """The memory which backward holds.

    Prints totals by reason, then rows with the largest first, where layers alike share a row.

    Attributes:
        tensors: An entry for each storage, in the order of forward.
        dropped: An entry for each storage that a region has dropped, which takes no memory until backward.
        is_dropped_exact: Whether the storages of all dropped tensors are known. If not, an entry is a tensor as one node saved
            it, and ``dropped_bytes`` is an upper bound.
    """

    tensors: tuple[Residual, ...]
    dropped: tuple[Residual, ...]
    is_dropped_exact: bool = True

    _json = "total_bytes", "added_bytes", "by_reason", "dropped_bytes", "is_dropped_exact", "tensors", "dropped"
    to_json = json_of

    @functools.cached_property
    def by_reason(self) -> dict[str, int]:
        """The bytes for each reason, in the order of :class:`Reason`."""
        sizes: collections.Counter[Reason] = collections.Counter()
        for entry in self.tensors:
            sizes[entry.reason] += entry.nbytes
        return {reason.value: sizes[reason] for reason in Reason if reason in sizes}

    @functools.cached_property
    def total_bytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.by_reason.values())

    @functools.cached_property
    def added_bytes(self) -> int:
        """The bytes without arguments, parameters and memory from before: memory that backward alone keeps from being freed."""
        return sum(entry.nbytes for entry in self.tensors if entry.reason not in _THERE_ANYWAY)

    @functools.cached_property
    def dropped_bytes(self) -> int:
        """The bytes of dropped tensors."""
        return sum(entry.nbytes for entry in self.dropped)

    def _headline(self) -> str:
        dropped = f"; regions dropped {format_bytes(self.dropped_bytes)}" if self.dropped else ""
        if dropped and not self.is_dropped_exact:
            # No bound: a loop that reads one tensor a hundred times has dropped it once.
            dropped = "; how much regions dropped is not known: for that, run forward under ckpt_hooks.trace()"
        return (
            f"backward holds {format_bytes(self.total_bytes)} in {count_of(len(self.tensors), 'storage')}, "
            f"{format_bytes(self.added_bytes)} of this for backward alone{dropped}"
        )

    def _tables(self) -> Iterator[Table]:
        counts = collections.Counter(entry.reason.value for entry in self.tensors)
        rows = [[format_bytes(nbytes), str(counts[reason]), reason] for reason, nbytes in self.by_reason.items()]
        yield Table(["bytes", "storages", "reason"], rows, (0, 1))
        yield _table(self.tensors)
        shared = "" if self.is_dropped_exact else "; the bytes of each, which several may share"
        yield _table(self.dropped, f"dropped, and brought back in backward{shared}:", is_exact=self.is_dropped_exact)


_MOST_ROWS = 60
_COLUMNS = ("bytes", "", "tensor", "reason", "module or name", "line", "operator", "region", "saved by", "why")


def _table(entries: Sequence[Residual], title: str = "", *, is_exact: bool = True) -> Table:
    pattern = functools.cache(name_pattern)

    def key(entry: Residual) -> object:
        return (
            *(*entry[:4], entry.why, entry.operator, entry.site, entry.saved_by),
            entry.module and pattern(entry.module),
            entry.name and pattern(entry.name),
            tuple(map(pattern, entry.region)),
            tuple((view.shape, view.reason, view.saved_by) for view in entry.views),
        )

    ordered = sorted(alike(entries, key), key=lambda group: -group[0].nbytes * len(group))
    rows: list[list[str]] = []
    for group in ordered[:_MOST_ROWS]:
        rows += _rows_of(group, is_exact)
    rest = [entry for group in ordered[_MOST_ROWS:] for entry in group]
    size = f", {format_bytes(sum(entry.nbytes for entry in rest))}" if is_exact else ""
    more = f"and {len(rest)} more{size}" if rest else ""
    return Table(_COLUMNS, rows, (0, 1), range(4, len(_COLUMNS)), title, more)


def _rows_of(group: Sequence[Residual], is_exact: bool) -> list[list[str]]:
    first = group[0]
    count = len(group) if is_exact else 1
    size = format_bytes(first.nbytes * count) if first.nbytes or first.dtype is not None else "?"
    operator = (first.operator or "").removeprefix("aten.").removesuffix(".default")
    # The name of a parameter has its module in it.
    place = fold_names(entry.name for entry in group if entry.name is not None)
    place = place or fold_names(entry.module for entry in group if entry.module is not None)
    rows: list[list[str]] = []
    views = [view for entry in group for view in entry.views]
    for members in alike([*group, *views], lambda residual: (_kind_of(residual), residual.reason)):
        kind, reason, why = _kind_of(members[0]), members[0].reason, members[0].why
        region = fold_names("/".join(entry.region) for entry in members)
        saved_by = ", ".join(dict.fromkeys(name for entry in members for name in entry.saved_by))
        last = region, saved_by, why if reason in _IN_WORDS else ""
        if rows:
            rows.append(["", "", f"  as {kind}", reason.value, "", "", "", *last])
        else:
            rows.append([size, times(group), kind, reason.value, place, first.site or "", operator, *last])
    return rows


#: Reasons which need more words.
_IN_WORDS = frozenset({Reason.HOOKS, Reason.CTX, Reason.NAME, Reason.NOT_REPLAYED, Reason.UNSEEN})


def _kind_of(entry: Residual) -> str:
    return "?" if entry.dtype is None else kind_in_words((entry.dtype, entry.shape))


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
    if not callable(function):
        raise Misuse.NO_FUNCTION.error(function, form="saved_residuals", right="saved_residuals(block, x)")
    notes = ForwardNotes()
    with observe(notes), OperatorNotes(notes):
        result = function(*args, **kwargs)
    tensors = _tensors_in(result)
    if not tensors:
        raise TypeError(
            f"saved_residuals reads the graph of the function's result, but got {type(result).__name__}, in which it finds no "
            "tensor. Return tensors, alone or in lists, tuples, dicts or dataclasses."
        )
    for module in notes.outermost.values():
        notes.add_module(module)
    notes.add_arguments([("args", args), ("kwargs", kwargs)])
    reader = GraphReader(notes)
    reader.read(tensors)
    unclaimed = reader.unclaimed(tensors)
    del result, tensors
    reader.add_unseen(unclaimed)
    return SavedResiduals(*reader.residuals())


def saved_tensors_report(*results: Any, known: Any = ()) -> SavedResiduals:
    """Reads which tensors a live graph holds for backward. Nothing runs, and no tensor is brought back.

    The nodes which saved a tensor are known always. Lines, and the storages of dropped tensors, are known where forward ran
    under :func:`ckpt_hooks.trace`. Elsewhere ``dropped_bytes`` is an upper bound: a tensor counts for each node which saved it.
    Memory that C++ nodes do not show is missing, as inside of ``CopySlices``, left by a write into a view:
    :func:`saved_residuals` has it.

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
    for leaf in tree_leaves(known):
        kinds, advice = (torch.Tensor, torch.nn.Module), "Pass those that exist in any case, or leave it out."
        check_is(leaf, kinds, "known", "modules and tensors", advice)
    tensors = _tensors_in(results)
    if not tensors:
        raise TypeError(
            f"saved_tensors_report reads the graph of tensors, but got {[type(result).__name__ for result in results]}, in "
            "which it finds no tensor. Pass the loss, or the results of forward."
        )
    notes = ForwardNotes()
    notes.add_arguments([("known", known)])
    reader = GraphReader(notes)
    reader.read(tensors)
    return SavedResiduals(*reader.residuals())


def _tensors_in(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += _tensors_in([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, dict):  # of a class that torch's trees do not know
            tensors += _tensors_in(list(leaf.values()))
    return tensors


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
