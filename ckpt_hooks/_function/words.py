"""Words for errors and warnings: causes, the name of a tensor, the operator that saved it."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ckpt_hooks._core.descriptions import region_in_words
from ckpt_hooks._core.misuse import add_note
from ckpt_hooks._state.walk import walk_from
from ckpt_hooks._torch.autograd import current_node, nodes_below, packed_of, saved_in
from ckpt_hooks._torch.tensors import storage_of
from ckpt_hooks.errors import CheckpointError, DeterminismError

CAUSES = (
    "The recompute did other work than forward; make the function do the same in both. Usual causes: a global, a module "
    "attribute, train()/eval() or requires_grad of a tensor that changed between forward and backward; a cache that forward "
    "filled; an iterator that forward used up (pass its items as arguments, or as xs to checkpoint_loop); a hook that removed "
    "itself; random numbers of Python or NumPy without ckpt_hooks.track_rng; a choice between equal values by top-k, sort or "
    "argmax (policies.routing_saveable keeps it); another graph of a function compiled by torch.compile (compile around "
    "the region, or write `with checkpoint_region():`)."
)
_SEE_MORE = "Pass `debug=True` to see the operators of both runs."


def draws_error(region: tuple[str, ...], more: str = "") -> DeterminismError:
    return DeterminismError(
        f"{region_in_words(region)}: the recompute has drawn other random numbers than forward, so that a dropout mask, for "
        "example, would differ. Usual causes: a random table that forward made and keeps (functools.lru_cache, a global dict); "
        "another thread that draws from the same generator. Make the table before the region, and give each thread a generator "
        f"of its own.{more}",
        region=region,
        index=-1,
        expected="the random numbers of forward",
        found="other random numbers",
    )


#: Whether another thread was seen to draw from the default generators in a recompute: from then on reruns are watched.
other_threads_draw = False


def warn_of_drawing_thread() -> None:
    global other_threads_draw
    if not other_threads_draw:
        other_threads_draw = True
        warnings.warn(
            "another thread draws from torch's default generator while regions recompute: give that thread a generator of its "
            "own (torch.Generator). From now on each operator of a recompute is watched, to tell which thread draws.",
            stacklevel=2,
        )


def name_of_tensor(tensor: torch.Tensor, function: Any, default: str = "a tensor that the function reaches") -> str:
    named, storage = list(_named_tensors(function)), storage_of(tensor)
    names = [name for name, value in named if value is tensor]
    names += [name for name, value in named if storage is not None and storage_of(value) == storage]
    return next(iter(names), default)


def _named_tensors(function: Any) -> Iterator[tuple[str, torch.Tensor]]:
    named: list[tuple[str, str, Any]] = []
    with contextlib.suppress(TypeError, ValueError):  # no Python function, or a variable that is unassigned
        variables = inspect.getclosurevars(function)
        for name, value in variables.nonlocals.items():
            named.append(("the variable {}", repr(name), value))
            entries = enumerate(value) if isinstance(value, (list, tuple)) else ()
            named += [("the entry {}", f"{name}[{index}]", entry) for index, entry in entries]
        named += [("the global {}", repr(name), value) for name, value in variables.globals.items()]
    for module in walk_from(function).modules:
        parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        for kind, rows in (("parameter", parameters), ("buffer", buffers), ("attribute", vars(module).items())):
            named += [(f"the {kind} {{}} of {type(module).__name__}", repr(name), value) for name, value in rows]
    return ((words.format(name), value) for words, name, value in named if isinstance(value, torch.Tensor))


def node_of(frame: Any, index: int) -> Any:
    """Returns the node that saved a tensor, from the node running on this thread downward; None if not found."""
    if not 0 <= index < len(frame.numbers):
        return None
    number: int = frame.numbers[index]
    for node in nodes_below([current_node()]):
        for packed in map(packed_of, saved_in(node)):
            if isinstance(packed, tuple) and len(packed) == 2 and packed[0] is frame and packed[1] == number:
                return node
    return None


def is_of_ctc_loss(frame: Any, index: int) -> bool:
    node = node_of(frame, index)
    return node is not None and node.name().startswith("CtcLoss")


def blame(error: DeterminismError, frame: Any) -> None:
    """Adds to an error which operator saved the tensor, and how to see more."""
    node = node_of(frame, error.index)
    words = str(error)
    if node is not None:
        error.grad_fn = str(node.name())
        words += f" The tensor at position {error.index} was saved by {error.grad_fn}."
    if frame.explain is None:
        words += f" {_SEE_MORE}"
    error.args = (words.replace("\n ", "\n"),)


def explain_failure(error: Exception, region: tuple[str, ...]) -> None:
    """Adds a note to an exception of a rerun."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return
    add_note(
        error,
        f"Raised by the recompute of {region_in_words(region)}, where forward raised nothing. Something that forward read "
        "may be used up (an iterator, a file, a queue) or gone (a tensor in a context variable, or a tensor from which a "
        "backward inside of the region started). Read it before the region, and pass it as an argument. If the function runs "
        "backward, write `with checkpoint_region():`, which runs Python once.",
    )


def uninitialized(region: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f"{region_in_words(region)} reaches lazy modules whose parameters are not made yet, so it cannot run with a "
        "context_fn or debug=True. Run the model once before the first step of training, as torch advises for lazy modules.",
        region=region,
    )
