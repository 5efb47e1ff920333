"""Tensors saved for backward: of a function, by running it once, or of a live graph, by reading it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ckpt_hooks._core.descriptions import kind_in_words
from ckpt_hooks._core.events import observe
from ckpt_hooks._core.holdings import Reason
from ckpt_hooks._core.misuse import Misuse, check_is
from ckpt_hooks._tensors.nested import leaf_tensors_in
from ckpt_hooks._torch.pytree import tree_leaves

from .graph import ForwardNotes, GraphReader, OperatorNotes
from .printing import Printed, Residual, Table, alike, count_of, fold_names, format_bytes, json_of, name_pattern, times

#: Reasons of memory that exists without backward too.
_THERE_ANYWAY = frozenset({Reason.ARGUMENT, Reason.PARAMETER, Reason.OUTSIDE})


@dataclasses.dataclass(frozen=True, repr=False)
class SavedResiduals(Printed):
    """The memory that backward holds. Prints totals by reason, then rows, the largest first; equal layers share a row.

    Attributes:
        tensors: An entry for each storage, in the order of forward.
        dropped: An entry for each storage that a region dropped, which takes no memory until backward.
        is_dropped_exact: Whether the storages of all dropped tensors are known. If not, each entry is a tensor as a node saved
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
        """The bytes that only backward holds: without arguments, parameters and memory from before."""
        return sum(entry.nbytes for entry in self.tensors if entry.reason not in _THERE_ANYWAY)

    @functools.cached_property
    def dropped_bytes(self) -> int:
        """The bytes of dropped tensors."""
        return sum(entry.nbytes for entry in self.dropped)

    def _headline(self) -> str:
        dropped = f"; regions dropped {format_bytes(self.dropped_bytes)}" if self.dropped else ""
        if dropped and not self.is_dropped_exact:
            # The sum is no useful bound: a tensor that a loop saves a hundred times would count a hundred times.
            dropped = "; how much regions dropped is unknown: to know it, run forward under ckpt_hooks.trace()"
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
    # The name of a parameter begins with its module, so the module is not repeated.
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


#: Reasons for which a row shows more words.
_IN_WORDS = frozenset({Reason.HOOKS, Reason.CTX, Reason.NAME, Reason.NOT_REPLAYED, Reason.UNSEEN})


def _kind_of(entry: Residual) -> str:
    return "?" if entry.dtype is None else kind_in_words((entry.dtype, entry.shape))


def saved_residuals(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> SavedResiduals:
    """Runs a function once and lists the tensors that its backward would hold.

    Each storage counts once, with the operator that made it, the line, the module, the region and the reason for holding it.
    Tensors that regions dropped are listed apart. The function draws random numbers and updates buffers as usual. No backward
    runs, and the graph is dropped. Recording takes about 20 microseconds for each operator.

    Args:
        function: The function or module. Its result is a tensor, or holds tensors in lists, tuples, dicts or dataclasses.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        A report: ``tensors``, ``total_bytes``, ``added_bytes`` (without memory from before the call), ``by_reason``,
        ``dropped``, ``dropped_bytes``. Empty under ``torch.no_grad()``.

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
    tensors = leaf_tensors_in(result)
    if not tensors:
        raise TypeError(
            f"saved_residuals reads the graph of the function's result, but {type(result).__name__} has no tensor in it. "
            "Return tensors, alone or in lists, tuples, dicts or dataclasses."
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
    """Lists the tensors that an existing graph holds for backward. Runs nothing and recomputes nothing.

    The nodes that saved a tensor are always known. Lines, and storages of dropped tensors, are known if forward ran under
    :func:`ckpt_hooks.trace`; otherwise ``dropped_bytes`` is an upper bound that counts a tensor for each node. Memory inside
    C++ nodes such as ``CopySlices``, left by a write into a view, is missing; :func:`saved_residuals` finds it.

    Torch's stack overflows when it frees a graph of more than about 50,000 operators in a row whose nodes Python has seen.

    Args:
        *results: Results of forward: tensors, alone or in lists, tuples, dicts or dataclasses.
        known: Modules and tensors that exist in any case, at any depth. Their tensors get names and reasons of their own.

    Returns:
        A report as from :func:`saved_residuals`.

    Raises:
        TypeError: If ``results`` hold no tensor.

    Example:
        >>> import torch
        >>> from ckpt_hooks.report import saved_tensors_report
        >>> layer = torch.nn.Linear(8, 8)
        >>> loss = layer(torch.ones(2, 8)).sin().sum()
        >>> saved_tensors_report(loss, known=layer).by_reason
        {'saved': 128}
    """
    for leaf in tree_leaves(known):
        kinds, advice = (torch.Tensor, torch.nn.Module), "Pass modules and tensors that exist in any case, or leave known out."
        check_is(leaf, kinds, "known", "modules and tensors", advice)
    tensors = leaf_tensors_in(results)
    if not tensors:
        raise TypeError(
            f"saved_tensors_report reads the graph of tensors, but got {[type(result).__name__ for result in results]} "
            "without any tensor. Pass the loss, or the results of forward."
        )
    notes = ForwardNotes()
    notes.add_arguments([("known", known)])
    reader = GraphReader(notes)
    reader.read(tensors)
    return SavedResiduals(*reader.residuals())


def print_saved_residuals(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Runs a function once and prints the tensors that its backward would hold. See :func:`saved_residuals`.

    Args:
        function: The function or module.
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
    print(saved_residuals(function, *args, **kwargs))  # noqa: T201
