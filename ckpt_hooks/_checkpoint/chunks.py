"""``checkpoint_chunks``: runs a function on slices of its input, each slice a region."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch

from ckpt_hooks import _ambient
from ckpt_hooks._core.call_sites import warn_user
from ckpt_hooks._core.misuse import (
    Misuse,
    accepts,
    add_note,
    check_runs,
    checked_flag,
    checked_integer,
    described_as,
    name_of_callable,
    name_of_function,
    signature_of,
    unknown_error,
    wrong,
)
from ckpt_hooks._core.modes import QuietDispatchMode, is_without_values, past_modes
from ckpt_hooks._core.mutation import Why, mutated
from ckpt_hooks._operators.draws import DrawWatch, place_of_probability
from ckpt_hooks._options import Form, check_swallowed, options_of
from ckpt_hooks._state.journal import JournalLoan, journal_of
from ckpt_hooks._tensors.nested import leaves_of, named_entries, with_entries
from ckpt_hooks._torch.compiling import skipped

from .curried import MADE, PLAIN

R = TypeVar("R")
#: Calls a function as a region, given its arguments and keyword arguments.
RunRegion = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: ``check_rows`` compares two slices of at most this many rows with one slice of the same rows.
_MOST_ROWS = 8

#: Functions whose rows ``check_rows`` has compared, or the objects of such methods, by ``id``: it compares each only once.
_compared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


_DEFAULT_CHUNKS = 8

_NOTE = (
    "A slice along dimension {dim} is not contiguous. In the function, call `.contiguous()` on it, or `reshape` in place of "
    "`view`."
)


class Chunks(NamedTuple):
    chunks: int | None = None
    dim: int = 0
    reduce: str | None = None
    chunked: str | Sequence[str] = ()
    check_rows: bool = False
    chunk_size: int | None = None

    def checked(self) -> Chunks:
        chunks = self.chunks
        if self.chunk_size is not None:
            checked_integer(self.chunk_size, "chunk_size", "Pass the number of rows of a slice, such as 1024.")
            if chunks is not None:
                raise Misuse.TWO_SIZES.error(kind=ValueError)
        elif chunks is None:
            chunks = _DEFAULT_CHUNKS
        if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
            raise wrong(chunks, "chunks", "a positive integer", "Pass the number of slices, such as 8.", ValueError)
        if self.reduce not in (None, "sum", "mean"):
            advice = "Leave it out to concatenate results."
            raise wrong(self.reduce, "reduce", "None, 'sum' or 'mean'", advice, ValueError)
        names = (self.chunked,) if isinstance(self.chunked, str) else self.chunked
        if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
            advice = "Write chunked='labels', or chunked=['labels', 'mask']."
            raise wrong(self.chunked, "chunked", "names of arguments", advice)
        return self._replace(chunks=chunks, chunked=tuple(names), check_rows=checked_flag(self.check_rows, "check_rows"))


def chunks_among(options: dict[str, Any]) -> Chunks | None:
    """Removes the options of chunks from ``options`` and returns them; None if there are none."""
    values = {name: options.pop(name) for name in Chunks._fields if name in options}
    if values and values.keys().isdisjoint(("chunks", "chunk_size")):
        raise Misuse.NO_CHUNKS.error(kind=ValueError, name=next(iter(values)))
    return Chunks(**values).checked() if values else None


@overload
def checkpoint_chunks(
    function: Callable[..., Any],
    x: torch.Tensor,
    *args: Any,
    chunks: int | None = None,
    dim: int = 0,
    reduce: Literal["mean"],
    chunked: str | Sequence[str] = (),
    check_rows: bool = False,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor: ...


@overload
def checkpoint_chunks(
    function: Callable[..., R],
    x: torch.Tensor,
    *args: Any,
    chunks: int | None = None,
    dim: int = 0,
    reduce: Literal["sum"] | None = None,
    chunked: str | Sequence[str] = (),
    check_rows: bool = False,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> R: ...


@skipped
def checkpoint_chunks(
    function: Callable[..., Any],
    x: torch.Tensor,
    *args: Any,
    chunks: int | None = None,
    dim: int = 0,
    reduce: str | None = None,
    chunked: str | Sequence[str] = (),
    check_rows: bool = False,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> Any:
    """Runs a function on slices of ``x``, each slice a region, and combines the results.

    For functions that compute each row by itself, such as an MLP on tokens or a head with its loss::

        y = checkpoint_chunks(mlp, x, chunks=8, dim=1)

        def loss_of(x, labels):
            return F.cross_entropy(head(x), labels, reduction="sum"), (labels != -100).sum()
        loss = checkpoint_chunks(loss_of, x, labels, chunked="labels", chunks=16, reduce="mean")

    Results and gradients are bitwise those of the loop ``torch.cat([function(part) for part in x.chunk(chunks, dim)], dim)``.
    They differ from one call on all of ``x`` by rounding, and in the random numbers of each row.

    Kept until the graph is freed:
        ``x``, of which the slices are views, other arguments, and the results. Other tensors of a slice exist during its call
        only. Backward recomputes one slice at a time, from the last to the first. At its end it holds the gradient of ``x``
        twice, and one gradient of each parameter besides the running sum.

    Hooks:
        Hooks on a parameter run once for all slices. Forward hooks of a module run twice for each slice, in forward and
        recompute. Under FSDP put the module inside a unit; as a unit of its own it would gather its parameters for each slice.

    Args:
        function: The function to call for each slice. ``checkpoint(...)(function)`` sets options of the regions.
        x: The tensor to cut, the first argument of ``function``.
        *args: Further arguments of ``function``, the same for all slices unless named by ``chunked``.
        chunks: The number of slices, as for ``torch.chunk``: slices have equal numbers of rows, rounded up, so there may be
            fewer. None means 8, if there is no ``chunk_size``.
        dim: The dimension to cut and to combine along. Negative numbers count from the end of ``x``.
        reduce: None concatenates results: tensors with a row for each row of the slice, or tuples, lists, dicts and dataclasses
            of such tensors, or of None in all slices. ``"sum"`` adds them from the first slice to the last. ``"mean"`` adds
            sums and counts and divides; the function returns ``(sum, count)``.
        chunked: Names of other arguments to cut. They have as many rows as ``x``, or are None.
        check_rows: Whether the first call with this function verifies that rows do not depend on each other: it compares rows
            in one slice with the same rows in two, with dropout that keeps all. Restores random states, buffers and containers.
            Warns if rows differ and the function draws other random numbers.
        chunk_size: The number of rows of a slice, in place of ``chunks``; the last may have fewer.
        **kwargs: Keyword arguments of ``function``, the same for all slices unless named by ``chunked``.

    Returns:
        The combined results, in the structure of the function's. With ``"sum"`` and ``"mean"`` they have the shapes of its
        results or sum.

    Raises:
        TypeError: If ``x`` is not a tensor, ``check_rows`` is not a boolean, ``chunked`` is no name or names, an argument is an
            iterator, ``function`` is a generator or coroutine function, or it returns something else than tensors and None, or
            with ``"mean"`` no pair.
        ValueError: If another option or a name in ``chunked`` is invalid, if a result has another number of rows than its
            slice, or other shapes to add; with ``check_rows``, if rows depend on each other.

    Note:
        Sources: tiled MLPs, Bekman et al., "Arctic Long Sequence Training" (2025, arXiv:2506.13996); losses in slices, Hsu et
        al., "Liger Kernel" (2024, arXiv:2410.10989). Liger computes gradients in forward, which saves one of four matrix
        products but is exact only for incoming gradients that are powers of two, so it is not done here.

    Example:
        >>> import torch
        >>> from ckpt_hooks import checkpoint_chunks
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> x = torch.ones(2, 6, 4, requires_grad=True)
        >>> y = checkpoint_chunks(mlp, x, chunks=3, dim=1)
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([2, 6, 4]), torch.Size([2, 6, 4]))
    """
    how = Chunks(chunks, dim, reduce, chunked, check_rows, chunk_size).checked()
    region = PLAIN
    wrapper: Any = function
    if isinstance(wrapper, MADE):
        function, region = wrapper.__wrapped__, wrapper._region
    if not callable(function):
        raise Misuse.NO_FUNCTION.error(function, form="checkpoint_chunks", right="checkpoint_chunks(block, x)")
    check_runs(function)
    if unknown := [name for name in kwargs if name not in how.chunked and not accepts(function, (), {name: None}, partly=True)]:
        advice = f"For an option of regions, write `checkpoint_chunks(checkpoint({unknown[0]}=...)(function), x)`."
        raise unknown_error(unknown, Chunks._fields, "checkpoint_chunks", advice)
    if kwargs:
        others = {name: value for name, value in kwargs.items() if name not in how.chunked}
        check_swallowed(function, others, options_of(Form.CURRIED), "checkpoint_chunks")
    return run_in_chunks(region.run, function, (x, *args), kwargs, how)


@skipped
def run_in_chunks(
    run: RunRegion, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: Chunks
) -> Any:
    arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    first = next(iter(arguments), None)
    x = arguments.get(first)
    if not isinstance(x, torch.Tensor):
        raise wrong(x, "The argument to cut", "a tensor", "Pass it as the first argument. Name others to cut in `chunked`.")
    dim = how.dim
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        wanted = f"a dimension of the tensor to cut ({described_as(x)})"
        raise wrong(dim, "dim", wanted, "Pass the dimension of the rows, such as 1 or -2.", ValueError)
    dim %= x.dim()
    keys = {name: name if name in kwargs else _position_of(name, function, len(args)) for name in how.chunked}
    cut: dict[Any, Any] = {first: x, **{key: arguments[key] for key in keys.values() if arguments[key] is not None}}
    for name, key in keys.items():
        value = cut.get(key, x)
        if not isinstance(value, torch.Tensor) or value.shape[dim : dim + 1] != x.shape[dim : dim + 1]:
            wanted = f"a tensor with {x.shape[dim]} rows in dimension {dim}, like the first argument"
            raise wrong(value, name, wanted, "Leave it out of chunked if each slice needs all of it.", ValueError)

    def call(part: tuple[torch.Tensor, ...]) -> Any:
        bound = {**arguments, **dict(zip(cut, part, strict=True))}
        given = tuple([bound[position] for position in range(len(args))])
        try:
            return run(function, given, {name: bound[name] for name in kwargs})
        except RuntimeError as error:
            if "view size is not compatible" in str(error) and not part[0].is_contiguous():
                add_note(error, _NOTE.format(dim=dim))
            raise

    def results(tensors: Iterable[torch.Tensor], size: int) -> Any:
        # ``split`` makes one autograd node for all slices. ``narrow`` would make one for each slice, with a gradient as large
        # as ``x``.
        parts = zip(*(torch.split(tensor, size, dim) for tensor in tensors), strict=True)
        return _joined(((part[0].shape[dim], call(part)) for part in parts), how.reduce, dim)

    if how.check_rows and not torch.compiler.is_dynamo_compiling():
        _compare_rows(function, tuple(arguments.values()), list(cut.values()), dim, results)
    rows = x.shape[dim]
    size = min(how.chunk_size or rows, rows) if how.chunks is None else -(-rows // how.chunks)
    return results(cut.values(), max(size, 1))


def _position_of(name: str, function: Callable[..., Any], count: int) -> int:
    try:
        names: Sequence[str] = list(signature_of(function).parameters)[:count]
    except (TypeError, ValueError):  # built-in functions have no signature
        names = []
    except AttributeError:  # Dynamo gives no signature to a function that is defined in traced code
        inner: Any = function
        num_bound = 0
        while type(inner) is functools.partial:
            inner, num_bound = inner.func, num_bound + len(inner.args)
        names = inner.__code__.co_varnames[num_bound : inner.__code__.co_argcount][:count]
    if name not in names:
        raise Misuse.NO_NAME.error(name, ValueError, name=name_of_callable(function))
    return names.index(name)


def _joined(results: Iterable[tuple[int, Any]], reduce: str | None, dim: int) -> Any:
    """Combines the results of slices; each result comes with the number of rows of its slice."""
    outputs: list[Sequence[Any]] = []
    first: Any = None
    for rows, result in results:
        entries = leaves_of(result)
        are_tensors = [isinstance(entry, torch.Tensor) for entry in entries]
        if reduce == "mean":
            if not (len(entries) == 2 and are_tensors[0] and (are_tensors[1] or isinstance(entries[1], (int, float)))):
                raise Misuse.NO_COUNT.error(result)
        elif not any(are_tensors) or not all(entry is None or isinstance(entry, torch.Tensor) for entry in entries):
            raise Misuse.RESULT.error(result)
        if not outputs:
            first = result
        elif [entry is None for entry in entries] != [total is None for total in outputs[0]]:
            raise Misuse.RESULT.error(result)
        for entry, total in zip(entries, outputs[0] if outputs else entries, strict=True):
            shape = tuple(getattr(total, "shape", ()))  # () for a plain number, such as a count
            if reduce is None and entry is not None and entry.shape[dim : dim + 1] != (rows,):
                raise Misuse.RESULT_ROWS.error(entry, ValueError, dim=dim, rows=rows)
            if reduce and getattr(entry, "shape", ()) != shape:
                raise Misuse.RESULT_SHAPES.error(entry, ValueError, shape=shape)
        if reduce and outputs:
            sums = zip(outputs[0], entries, strict=True)
            outputs = [[None if total is None else total + entry for total, entry in sums]]
        else:
            outputs.append(entries)
    if reduce == "mean":
        total, count = outputs[0]
        return total / count
    if reduce:
        joined = list(outputs[0])
    else:
        joined = [None if parts[0] is None else torch.cat(parts, dim) for parts in zip(*outputs, strict=True)]
    return _with_leaves(first, joined)


def _with_leaves(result: Any, leaves: list[Any]) -> Any:
    """Returns a copy of ``result`` with other leaves, popped from the front of ``leaves``."""
    entries = named_entries(result)
    if entries is None:
        return leaves.pop(0)
    return with_entries(result, [_with_leaves(entry, leaves) for _, entry in entries])


def _compare_rows(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    cut: Sequence[torch.Tensor],
    dim: int,
    results: Callable[[Iterable[torch.Tensor], int], Any],
) -> None:
    """Raises if rows give other results in one slice than in two; compares once for each function."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    rows = cut[0].shape[dim]
    half = min(rows // 2, _MOST_ROWS)
    if not half or cut[0].is_meta or is_without_values() or _compared.get(id(owner)) is owner:
        return
    # The rows are from the middle: labels at the start of a sequence are often ignored, and ignored rows would not differ.
    some = [tensor.narrow(dim, rows // 2 - half, 2 * half) for tensor in cut]

    def compared() -> tuple[str | None, Any, Any]:
        with torch.no_grad(), _as_before(function, arguments), DrawWatch() as watch, _KeepsAll():
            whole, halves = results(some, 2 * half), results(some, half)
        return watch.first_draw, whole, halves

    drawn, whole, halves = past_modes(compared)
    pairs = zip(leaves_of(whole), leaves_of(halves), strict=True)
    if not all(_are_close(of_whole, of_halves, cut[0]) for of_whole, of_halves in pairs if of_whole is not None):
        if drawn is None:
            raise Misuse.DEPENDENT_ROWS.error(kind=ValueError, name=name_of_callable(function), dim=dim, rows=half)
        warn_user(
            f"check_rows could not compare rows: {name_of_callable(function)!r} draws random numbers ({drawn}), so its rows "
            "differ in any case. To check the rows, make the first call without random numbers, such as in eval() mode."
        )
    with contextlib.suppress(TypeError):  # the object allows no weak references, so each call compares its rows
        _compared[id(owner)] = owner


class _KeepsAll(QuietDispatchMode):
    """Makes dropout keep all elements, for the same results from the same rows in each run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = place_of_probability(func)
        if 0 <= position < len(args):
            args = (*args[:position], 0.0, *args[position + 1 :])
        elif position >= 0:
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is torch.ops.aten.bernoulli_.float:  # draws the mask of a dropout that has no kernel of its own
            return args[0].fill_(1)
        elif func is torch.ops.aten.native_dropout.default:
            x, probability, *_ = args
            return x / (1 - probability), torch.ones_like(x, dtype=torch.bool)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _as_before(function: Callable[..., Any], arguments: Sequence[Any]) -> Iterator[None]:
    """Restores random states, and the state reached by a function, after the block, as after a rerun."""
    journal = journal_of(function, [value for value in arguments if not isinstance(value, torch.Tensor)], preserve_buffers=True)
    region = (name_of_function(function),)
    loan = JournalLoan(journal, {}, lambda tensor, _: mutated(Why.WRITTEN_LATE, region, tensor, 0)) if journal else None
    before = _ambient.enter(_ambient.capture(preserve_rng_state=True, generators=journal.generators if journal else ()))
    caches_casts = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)  # before torch 2.13 later calls would get casts made under ``no_grad``
        if loan is not None:
            loan.begin()
        try:
            yield
        finally:
            if loan is not None:
                loan.end()
    finally:
        torch.set_autocast_cache_enabled(caches_casts)
        _ambient.leave(before)


def _are_close(whole: torch.Tensor, halves: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether results agree up to the square root of the coarsest epsilon, relative to the largest element."""
    dtypes = [tensor.dtype for tensor in (whole, x) if tensor.is_floating_point() or tensor.is_complex()]
    if torch.is_autocast_enabled(x.device.type):
        dtypes.append(torch.get_autocast_dtype(x.device.type))
    if not whole.numel() or whole.dtype not in dtypes:
        return True
    largest = whole.abs().nan_to_num().max()
    tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * largest
    return bool(torch.allclose(whole, halves, 0, float(tolerance), equal_nan=True))
