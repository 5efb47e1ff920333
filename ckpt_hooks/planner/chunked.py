"""Chunks of a plan: modules which run on slices of their input, in a count of the plan's choice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from ckpt_hooks._checkpoint.chunks import chunks_among
from ckpt_hooks._core.misuse import check_is, unknown_error, wrong
from ckpt_hooks.modules import AppliedCheckpointing, apply_checkpointing
from ckpt_hooks.modules.selecting import selected_of


@dataclasses.dataclass(frozen=True)
class PlannedChunks:
    """A module which a plan has run in chunks.

    Attributes:
        name: The module's name in the model.
        chunks: The number of slices.
        is_attribute: Whether the module calls :func:`ckpt_hooks.checkpoint_chunks` itself, with its attribute ``chunks``.
        dim: The dimension to cut, for a module which does not.
        reduce: How results of slices are put together.
        chunked: The names of other arguments to cut.
    """

    name: str
    chunks: int
    is_attribute: bool
    dim: int = 0
    reduce: str | None = None
    chunked: tuple[str, ...] = ()


#: For each module its name and options, all but one of them the same.
Chunking = tuple[PlannedChunks, ...]

_ADVICE = "Write chunks={'head': (1, 4, 8)}, or chunks={'mlp': {'chunks': (1, 4, 8), 'dim': 1}}."


def chunkings_of(model: Module, given: Any) -> list[Chunking]:
    """Returns each combination of counts that a user gives for modules, from the fewest slices."""
    check_is(given, Mapping, "chunks", "a mapping of module names to numbers of slices", _ADVICE)
    below = {name: module for name, module in model.named_modules() if name}
    choices: list[list[Chunking]] = []
    for pattern, value in given.items():
        options = dict(value) if isinstance(value, Mapping) else {"chunks": value}
        if unknown := [name for name in options if name not in ("chunks", "dim", "reduce", "chunked")]:
            raise unknown_error(unknown, ("chunks", "dim", "reduce", "chunked"), "chunks", _ADVICE)
        counts = options.get("chunks")
        if not isinstance(counts, (list, tuple)) or not counts:
            raise wrong(counts, f"chunks[{pattern!r}]", "numbers of slices", _ADVICE)
        modules = {name: module for name, (module, _) in selected_of(below, {pattern: None}, None, "chunks").items()}
        own = {name: type(getattr(module, "chunks", None)) is int for name, module in modules.items()}
        made = [chunks_among({**options, "chunks": count}) for count in sorted(counts)]
        choices.append(
            [
                tuple(PlannedChunks(name, one.chunks, own[name], one.dim, one.reduce, tuple(one.chunked)) for name in modules)
                for one in made
                if one is not None
            ]
        )
    return [tuple(itertools.chain(*one)) for one in itertools.product(*choices)]


def chunk(model: Module, chunking: Iterable[PlannedChunks], names: Mapping[str, str]) -> AppliedCheckpointing:
    """Makes modules run in chunks, by their names in the model."""
    undo: list[Callable[[], object]] = []
    select: dict[str, Any] = {}
    for one in chunking:
        if one.is_attribute:
            module: Any = model.get_submodule(names[one.name])
            undo.append(functools.partial(_put_back, weakref.ref(module), vars(module).get("chunks")))
            module.chunks = one.chunks
        elif one.chunks > 1:
            options = {"chunks": one.chunks, "dim": one.dim, "reduce": one.reduce, "chunked": one.chunked}
            select[names[one.name]] = options
    regions = apply_checkpointing(model, select) if select else AppliedCheckpointing((), ())
    return AppliedCheckpointing(regions, [regions.undo, *undo])


def _put_back(reference: weakref.ref[Any], chunks: int | None) -> None:
    if (module := reference()) is not None:
        if chunks is None:  # the class has the attribute
            vars(module).pop("chunks", None)
        else:
            module.chunks = chunks


@contextlib.contextmanager
def applied(model: Module, select: Any, chunking: Chunking) -> Iterator[None]:
    """Makes blocks regions, and modules run in chunks, in a block of code."""
    names = {one.name: one.name for one in chunking}
    with chunk(model, chunking, names), apply_checkpointing(model, select) if select else contextlib.nullcontext():
        yield


def chunks_in_words(chunking: Iterable[PlannedChunks]) -> str:
    """Returns words such as ``"head in 8 chunks"``."""
    return ", ".join(f"{one.name} in {one.chunks} chunks" if one.chunks > 1 else f"{one.name} as a whole" for one in chunking)
