"""Errors of replays: results of other shapes, other values, and in debug mode the lines of operators.

Sizes that Python has read are constants on a tape, as are loops. If data decides on a shape, as for routed tokens, a replay
with another choice cannot use these constants, so the shapes of such results are noted and compared.

Inside a user's dispatch mode values are compared, since the mode may change results after the recorder has seen them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ckpt_hooks._core.call_sites import module_names, outermost_module
from ckpt_hooks._core.descriptions import describe, describe_tensor, format_path, region_in_words
from ckpt_hooks._core.modes import is_without_values, modes_in_words, past_modes, users_modes
from ckpt_hooks._core.packed import KeptTensor, TapeHandle, tracked
from ckpt_hooks._operators.facts import routing_advice
from ckpt_hooks._operators.operator_log import Entry, OperatorLog
from ckpt_hooks._tensors.copies import is_on_host
from ckpt_hooks._tensors.determinism import Fingerprints, first_difference, hash_of, may_be_unfilled
from ckpt_hooks._tensors.samples import Sampled, differing, sample_of
from ckpt_hooks._torch.autograd import current_node, graph_task_id, queue_callback, sequence_number
from ckpt_hooks._torch.compiling import skipped
from ckpt_hooks.errors import CheckpointError, DeterminismError

from .values import Op, OpWithShapes, Tables, Value, flatten, read_by


def check_shapes(frame: Any, op: OpWithShapes, out: Any) -> None:
    expected, actual = op.shapes, shapes_of(out)
    if expected is None or actual is None or expected == actual:
        return
    region = format_path(frame.path)
    error = DeterminismError(
        f"{region_in_words(region)}: the replay of {op.facts.operator} has returned another shape than forward.\n"
        f"shape in forward: {_in_words(expected)}\nshape in the replay: {_in_words(actual)}\n"
        f"{routing_advice([op.facts.full_name]).strip()}",
        region=region,
        index=op.number,
        expected=f"{op.facts.operator} with a result of shape {_in_words(expected)}",
        found=f"{op.facts.operator} with a result of shape {_in_words(actual)}",
    )
    error.routing = (op.facts.full_name,)
    if frame.lines is not None:
        frame.lines.explain_operator(error, op.number)
    raise error


def shapes_of(out: Any) -> list[tuple[int, ...]] | None:
    """Returns the shapes of results; None if sizes are symbols, while torch traces."""
    shapes = [tuple(output.shape) for output in flatten(out) if isinstance(output, torch.Tensor) and not output.is_nested]
    return shapes if all(type(size) is int for shape in shapes for size in shape) else None


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


class OperatorLines:
    """The lines of the operators of an outermost region and of recorded regions inside."""

    # ``Entry.mark`` is the number of the latest value before the operator: :meth:`_place_of` finds an operator by this number.
    __slots__ = ("_entries", "_latest", "_log", "_places", "_root")

    def __init__(self, tables: Tables) -> None:
        latest = self._latest = [-1]  # the number of the latest autograd node when the latest operator began

        def count() -> int:
            latest[0] = sequence_number()
            return tables.number

        self._log: OperatorLog | None = OperatorLog(count)
        self._entries: list[Entry] = self._log.entries
        self._places: dict[int, int] = {}  # the place of the operator that saved a tensor, by the identity of the handle
        self._root = outermost_module()

    def enter(self) -> None:
        assert self._log is not None
        self._log.__enter__()

    def exit(self) -> None:
        assert self._log is not None
        self._log.__exit__()
        self._log = None

    @skipped
    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Returns a pack hook that notes which operator saves a tensor: the next, or the latest if the tensor is its result."""
        entries, places, latest = self._entries, self._places, self._latest
        explain = self._explain

        def note(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            place = len(entries) - (latest[0] == sequence_number())
            if isinstance(packed, KeptTensor):
                packed = tracked(packed)
                packed.needed_by = partial(explain, place, "Autograd saved the tensor for")
            else:
                places[id(packed)] = place
            return packed

        return note

    def explain_saved(self, error: CheckpointError, handle: Any) -> None:
        saved = handle.value.saved
        if saved is not None and saved.by_policy:
            self._explain(self._place_of(handle.value.number), "The tensor is the result of", error)
        else:
            self._explain(self._places.get(id(handle), -1), "Autograd saved the tensor for", error)

    def explain_replay(self, error: CheckpointError, value: Value, steps: Iterable[Op | Value]) -> None:
        readers = [step.number for step in steps if isinstance(step, Op) and value in read_by(step)]
        if readers:
            self._explain(self._place_of(min(readers)), "The tensor is read by", error)

    def explain_operator(self, error: CheckpointError, number: int) -> None:
        self._explain(self._place_of(number), "In forward the operator was", error)

    def _place_of(self, number: int) -> int:
        return bisect_left(self._entries, number, key=lambda entry: entry.mark) - 1

    def _explain(self, place: int, words: str, error: CheckpointError) -> None:
        if 0 <= place < len(self._entries):
            entry, names = self._entries[place], module_names(self._root)
            error.args = (f"{error}\n{words} {entry.in_words()}\n  at {entry.line(names)}",)


def _fingerprint(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:  # a nested tensor may have no shape
        return hash_of(tensor)
    return tuple(tensor.shape), tensor.dtype, tensor.device, hash_of(tensor)


def _fingerprint_in_words(fingerprint: Any) -> str:
    if not isinstance(fingerprint, tuple):
        return str(fingerprint)
    shape, dtype, device, values = fingerprint
    return f"{describe(shape, dtype, device)} with fingerprint {values.item() if isinstance(values, torch.Tensor) else values}"


class ComparedValues:
    __slots__ = (
        "_fingerprint",
        "_fingerprints",
        "_gives_up",
        "_numbers",
        "_pending",
        "_sampled",
        "_taken",
        "_task",
        "_without_grad",
        "modes",
    )

    def __init__(self, modes: Sequence[str], sampled: Sampled | None = None) -> None:
        self.modes = modes  # names of the modes around the outermost region
        self._sampled, self._gives_up = sampled, False  # the self-check's pass, and whether it compares nothing
        self._fingerprint: Callable[[torch.Tensor], Any] = _fingerprint if sampled is None else sample_of
        self._fingerprints = Fingerprints(self._fingerprint, ())
        self._taken = self._fingerprints.taken
        self._numbers: list[int] = []  # the numbers of the values of handles, by index
        self._without_grad: set[int] = set()
        self._task = -1  # the latest backward at whose end values are compared
        # Samples of forward and replays to compare, each with a function that makes the error.
        self._pending: list[tuple[tuple[Any, Any, torch.dtype], Callable[[str, str], DeterminismError]]] = []

    @skipped
    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Returns a pack hook that takes the fingerprints of tensors with handles."""
        fingerprints, numbers, without_grad = self._fingerprints, self._numbers, self._without_grad

        def pack_compared(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, TapeHandle):
                if not tensor.requires_grad:
                    without_grad.add(len(numbers))
                numbers.append(packed.value.number)
                fingerprints.note(tensor)
            return packed

        return pack_compared

    def close(self) -> None:
        """Ends forward, after which the pack hook takes no fingerprints."""
        self._fingerprints.close()

    def give_up(self) -> None:
        """Compares nothing in the self-check, since an inner region draws anew."""
        self._gives_up = self._sampled is not None

    def compare(self, handle: TapeHandle, tensor: torch.Tensor) -> None:
        index, value = handle.index, handle.value
        # Not compared: kept tensors, and tensors written to without a change of version, which plain autograd accepts.
        if value.saved is not None or value.number != self._numbers[index] or is_without_values():
            return
        expected, sampled = self._taken[index], self._sampled
        if expected is None or self._gives_up:
            return
        node = current_node()
        with torch.no_grad():
            actual = past_modes(self._fingerprint, tensor)
        if index in self._without_grad and may_be_unfilled(node, tensor):
            return
        error = partial(
            self._error, format_path(handle.frame.path), index, describe_tensor(tensor), None if node is None else node.name()
        )
        if sampled is None:
            if past_modes(first_difference, [expected], [actual]) is not None:
                raise error(*map(_fingerprint_in_words, (expected, actual)))
            return
        sampled.passed()
        self._pending.append(((expected, actual, tensor.dtype), error))
        task = graph_task_id()
        if is_on_host(tensor) or task == -1:
            self._settle()
        elif task != self._task:  # compare once, when the backward has succeeded: the device is waited for once
            self._task = task
            queue_callback(self._settle)

    def _settle(self) -> None:
        """Compares the pending values, in the self-check."""
        assert self._sampled is not None
        pending, self._pending = self._pending, []
        for place in differing([row for row, _ in pending])[:1]:
            self._sampled.settle(pending[place][1]("", ""))

    def _error(
        self, region: tuple[str, ...], index: int, tensor: str, saved_by: str | None, before: str, after: str
    ) -> DeterminismError:
        words = f"{region_in_words(region)}: the replay of the region computed other values than forward.\n"
        words += f"tensor at position {index}: {tensor}\n"
        if self._sampled is not None:
            before, after = f"{tensor} of forward", "other values"
            words += (
                "Either memory was written to without an operator (by NumPy, DLPack, `.data` or a kernel by pointer): use an "
                "operator. Or an operator returns other results each time: keep its output by a policy."
            )
        else:
            words += (
                "Either an operator returns other results each time: keep its output by a policy. Or a mode around the region "
                "changes results: enter the mode inside the region."
            )
        words += "" if saved_by is None else f" The tensor was saved by {saved_by}."
        words += "" if self._sampled is not None else modes_in_words(self.modes, users_modes())
        return DeterminismError(words, region=region, index=index, expected=before, found=after, grad_fn=saved_by)
