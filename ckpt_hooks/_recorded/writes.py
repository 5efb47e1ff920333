"""Operators that write to their arguments, as recorded on a tape.

Torch moves the version only when the operator has returned through autograd, so the tape tracks writes itself. Each write is an
operator on the tape, after which every tensor in the storage has another value. Kept tensors that are still needed are copied
before they are overwritten. A replay does not write to storages from outside again: tensors read after the write are kept.

If a saved tensor shares a version with the target of a later write, plain autograd raises in backward, and so does the handle.
Without a shared version plain autograd returns the written content, and so does the handle (Rule 15).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckpt_hooks._core.descriptions import RegionPath
from ckpt_hooks._core.holdings import Cause, Reason
from ckpt_hooks._core.modes import count_writes
from ckpt_hooks._core.mutation import Why
from ckpt_hooks._operators.draws import device_of
from ckpt_hooks._operators.facts import OpFacts, OpKind, Written, facts_of_code
from ckpt_hooks._tensors.copies import PLAIN_OR_FAKE, Clones, has_no_gaps, same_layout
from ckpt_hooks._tensors.held_tensors import HeldByHooks, Lost
from ckpt_hooks._tensors.nested import outer_tensors_in, tensors_in
from ckpt_hooks._torch.autograd import Hooks
from ckpt_hooks._torch.tensors import counted_detach, storage_address, storage_of
from ckpt_hooks.policies.decisions import OFFLOAD, RECOMPUTE, SAVE

from .tape import Tape, decide, op_of, run
from .values import Op, Store, Value, counter_of, is_held_twice, new_value


def _count_in_table() -> int:
    table = {0: Value()}
    value = table.get(0)
    return sys.getrefcount(value)


# ``getrefcount`` of a value that only a table and a local variable hold. Python 3.14 no longer counts the call's own argument.
_IN_TABLE = _count_in_table()


def targets_of(facts: OpFacts, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, Written]]:
    return [(tensor, written) for written in facts.written for tensor in outer_tensors_in(written.of(args, kwargs))]


def _covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its storage, in any order of dimensions, as ``empty_like`` of a transposed tensor does."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and (tensor.is_contiguous() or has_no_gaps(tensor))


def run_writing(tape: Tape, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    wanted = RECOMPUTE if tape.decisions is None else tape.decisions.of(facts)
    if facts.writes_first and facts.single and wanted == RECOMPUTE and facts.keywords.isdisjoint(kwargs):
        value = _alone(tape, facts, args[0])
        if value is not None:
            return _run_writing_alone(tape, value, func, facts, args, kwargs)
        # The tape has nothing in this memory, such as a counter of batches: no replay needs the write, and a tensor read there
        # later is copied at the end.
        if _is_unmet(tape, args[0]):
            store = tape.tables.store_of(args[0])
            store.written = True
            return facts.call(*args, **kwargs)
    targets = targets_of(facts, args, kwargs)
    if facts.replaces_storage or any(type(tensor) not in PLAIN_OR_FAKE for tensor, _ in targets):
        return run_opaque(tape, func, facts, args, kwargs)
    # The version counters that the write moves, looked up before the tape forgets tensors whose storages become external.
    bumped = [counter_of(tape.tables, tensor) for tensor, written in targets if written.counted]
    overwritten = set()
    inside: dict[int, Store] = {}
    external: dict[int, Store] = {}
    for tensor, written in targets:
        store = tape.tables.store_of(tensor)
        if store.uninitialized:
            if written.overwritten and _covers(tensor):
                overwritten.add(id(tensor))
            else:
                tape.tables.make_external(store, "memory that was written to in part")
        (external if store.external else inside)[id(store)] = store
    # If all written tensors are kept, no replay repeats the write.
    keeps = wanted in (SAVE, OFFLOAD) and not any(store.handles for store in inside.values())
    for key, store in list(inside.items()):
        # If some tensors in a storage are kept and others are not, a replay cannot write to all of them.
        if not keeps and not store.uninitialized and any(holder() is not None for holder in store.held or ()):
            tape.tables.make_external(store, "kept by the policy, and written to since")
            external[key] = inside.pop(key)
    quiet = look_at_handles(tape, external.values(), bumped, facts.full_name, [tensor for tensor, _ in targets])
    if not inside and not facts.has_fresh:
        copy_held(tape, external.values())
        try:
            out = facts.call(*args, **kwargs)
        finally:  # the operator may have written before it raised
            after_external(tape, external.values(), quiet)
        count_writes(func, args)
        return out
    copy_held(tape, inside.values())
    op, values = op_of(tape, facts, args, kwargs, frozenset(overwritten), () if inside else facts.unread(args))
    copy_held(tape, external.values())
    try:
        out = run(tape, op, func, facts, args, kwargs)
        count_writes(func, args)
        decision = decide(tape, facts, args, kwargs, out)
    except BaseException:
        for store in inside.values():
            tape.tables.make_external(store, f"written to by {func}, which raised")
        after_external(tape, (*inside.values(), *external.values()), quiet)
        raise
    made = tape.note(op, values, out if facts.has_fresh else None, decision)
    for store in inside.values():
        made += after_inside(tape, op, store, bumped, decision)
    if decision != RECOMPUTE:
        tape.cut(op, made)
    after_external(tape, external.values(), quiet)
    return out


def _alone(tape: Tape, facts: OpFacts, target: torch.Tensor) -> Value | None:
    """Returns a tensor's value if no other tensor shares its memory and no operator has read it; None otherwise."""
    # The value must be of the innermost region: then its replay writes to memory that no other replay has.
    tables, key = tape.tables, id(target)
    value = tables.known.get(key) or tables.uninitialized.get(key)
    if value is None or sys.getrefcount(value) > _IN_TABLE:
        return None
    store = value.store
    is_alone = not (store.external or store.handles or store.held) and len(store.members) == 1 and store.birth > tape.start
    if not is_alone or value.saved is not None or storage_address(target) != store.address:
        return None
    return None if store.uninitialized and not (facts.written[0].overwritten and _covers(target)) else value


def _is_unmet(tape: Tape, target: torch.Tensor) -> bool:
    """Whether the tape has seen no tensor in the memory of a write's target."""
    tables = tape.tables
    if type(target) not in PLAIN_OR_FAKE or id(target) in tables.inputs or tables.value_now(target) is not None:
        return False
    address = storage_of(target)
    return address is not None and not tables.is_taken(address)


def _run_writing_alone(tape: Tape, before: Value, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    tables, store, target = tape.tables, before.store, args[0]
    op, recorded, present = Op(), list(args), [0]
    recorded[0] = before
    for position in facts.tensors[len(recorded)][1:]:  # ``op_of`` written out: saves 1% of a small block with dropouts
        tensor = recorded[position]
        if isinstance(tensor, Tensor):
            value = tables.known.get(id(tensor))
            if value is None or storage_of(tensor) != value.store.address:
                value = tape.value_of(tensor, facts)
            recorded[position] = value
            present.append(position)
    op.facts, op.args, op.kwargs, op.present = facts.as_functional(), recorded, kwargs, tuple(present)
    op.draw, op.surroundings, op.call = None, tape.surroundings, facts.call
    try:
        out = run(tape, op, func, facts, args, kwargs)
    except BaseException:
        tables.make_external(store, f"written to by {func}, which raised")
        raise
    tables.number = op.number = tables.number + 1
    if out is target:
        value = new_value(op.number, store, before.counter, op)
        value.tensor = before.tensor
    else:  # another argument's ``__torch_function__`` or ``__torch_dispatch__`` has returned another tensor
        op.facts, op.call = facts, None
        value = _after(tape, op, before)
    store.written = True
    if store.uninitialized:
        store.uninitialized, store.members = False, []
        tables.register(target, value)
    else:
        tables.known[id(target)] = value
    return out


def copy_held(tape: Tape, stores: Iterable[Store]) -> None:
    """Copies the kept tensors of storages about to be written to, if a holder besides the tape's table needs them."""
    for store in stores:
        if store.uninitialized:  # there is nothing to copy yet
            continue
        if store.external and len(store.members) > 1:
            _forget_views(tape, store)
        references, store.held = store.held, None
        clones: Clones = {}
        for reference in references or ():
            value = reference()
            if value is None or value.saved is None:
                continue
            tensor, saved = value.tensor(), value.saved
            in_table = tensor is not None and tape.tables.known.get(id(tensor)) is value
            others = 1 - (not in_table)  # holders that need no copy: the table, if it has the value
            del value
            if saved.tensor is not None and saved.tensor.nbytes > _SMALL:
                for result, output in _readers_of(tape, reference, others, saved.tensor.nbytes):
                    tape.held.keep(result, output, SAVE, tape.path, _READ_BEFORE)
            if is_held_twice(reference, others):
                saved.copy(clones)


def _forget_views(tape: Tape, store: Store) -> None:
    """Forgets unneeded views of memory from outside, such as the view through which a write goes."""
    known = tape.tables.known
    for member in reversed(store.members):  # the latest first, since a view of a view holds the view
        if (tensor := member()) is None or (value := known.get(id(tensor))) is None:
            continue
        if value.op is not None and value.store is store and sys.getrefcount(value) <= _IN_TABLE:
            del known[id(tensor)]


#: Bytes above which the results of a tensor's readers may be kept in place of its copy.
_SMALL = 1 << 12
_READ_BEFORE = Cause(Reason.INPUT, "read from memory that was overwritten since")


def _readers_of(tape: Tape, reference: weakref.ref[Value], others: int, most: int) -> Sequence[tuple[Value, torch.Tensor]]:
    """Returns the results of all readers of a value, to keep in place of its copy; none if they are not smaller."""
    # This saves memory for a memory bank, from which forward reads a few rows before it overwrites other rows.
    value, results, nbytes, reads = reference(), [], 0, 0
    for result in tape.tables.known.values():
        op = result.op
        if op is None or result.before is not None or not any(argument is value for argument in op.args):
            continue
        tensor, store = result.tensor(), result.store
        if tensor is None or not op.facts.single or store.birth != result.number or store.written:
            return ()
        results.append((result, tensor))
        reads += sum(argument is value for argument in op.args)
        nbytes += tensor.nbytes
    del value
    return results if nbytes < most and not is_held_twice(reference, others + reads) else ()


def put_copies(store: Store, copies: list[tuple[torch.Tensor, torch.Tensor]], name: str, path: RegionPath) -> None:
    """Replaces kept tensors of a storage that was written to unseen by copies."""
    references, store.held = store.held, None
    for reference in references or ():
        value = reference()
        if value is None or value.saved is None:
            continue
        saved = value.saved.tensor
        if saved is None:  # the copy on the host stays valid
            continue
        replacements = [copy for tensor, copy in copies if are_one_place(tensor, saved)]
        if replacements:
            value.saved.tensor, value.saved.memory, value.saved.version = replacements[0], None, None
        else:
            value.saved = Lost(Why.OVERWRITTEN, path, name)


def are_one_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return same_layout(tensor, other) and tensor.storage_offset() == other.storage_offset()


def after_inside(tape: Tape, op: Op, store: Store, bumped: list[object], decision: int) -> list[Value]:
    """Makes a new value of every tensor in a written storage; returns the new values."""
    facts, tables, made = op.facts, tape.tables, []
    handles = [handle for reference in store.handles or () if (handle := reference()) is not None]
    quiet = [handle for handle in handles if handle.value.counter not in bumped]
    for handle in handles:
        if handle.value.counter in bumped:
            handle.value = _overwritten(handle.value, facts.full_name, handle.frame.path)
    was_uninitialized, store.uninitialized, store.written = store.uninitialized, False, True
    known = tables.uninitialized if was_uninitialized else tables.known
    members, store.members = store.members, []
    for member in members:
        tensor = member()
        if tensor is None or not store.has(tensor):
            continue
        before = known.get(id(tensor))
        if before is None or before.op is op or before.store is not store:
            continue
        value = _after(tape, op, before)
        if was_uninitialized:
            known.pop(id(tensor))
            tables.register(tensor, value)
        else:  # the weak reference to the tensor removes the new value too
            known[id(tensor)] = value
            store.members.append(member)
        made.append(value)
        if decision != RECOMPUTE:
            tape.keep(value, tensor, decision, Cause(Reason.POLICY, f"as written by {facts.full_name}"))
    # As in plain autograd, a tensor saved without a shared version has the written content from now on.
    store.handles = None
    for handle in quiet:
        tensor = handle.value.tensor()
        successor = None if tensor is None else tables.known.get(id(tensor))
        if successor is None:
            successor = _after(tape, op, handle.value)
            made.append(successor)
        handle.value = successor
        store.handles = [*(store.handles or ()), weakref.ref(handle)]
    return made


def _after(tape: Tape, op: Op, before: Value) -> Value:
    value = Value()
    tape.tables.number = value.number = tape.tables.number + 1
    value.op, value.before = op, before
    value.store, value.counter, value.tensor, value.saved = before.store, before.counter, before.tensor, None
    return value


def _overwritten(value: Value, name: str, path: Any) -> Value:
    changed = new_value(value.number, value.store, value.counter)
    changed.tensor, changed.saved = value.tensor, Lost(Why.OVERWRITTEN, path, name)
    return changed


def _handed_over(handle: Any, tensor: torch.Tensor, hooks: Hooks) -> Value:
    """Returns the value of a handle whose tensor goes through saved-tensor hooks, as plain autograd passes saved tensors."""
    value = new_value(handle.value.number, handle.value.store, handle.value.counter)
    value.tensor = handle.value.tensor
    value.saved = HeldByHooks(tensor, hooks, handle.frame.path, handle.value.store.cause)
    return value


def look_at_handles(
    tape: Tape, stores: Iterable[Store], bumped: list[object], name: str, targets: list[torch.Tensor]
) -> list[tuple[Any, torch.Tensor, Store]]:
    """Returns the handles in outside storages that stay valid after a write, with their tensors."""
    # Handles that share a version with the target become errors. Tensors of regions inside the user's saved-tensor hooks go
    # through these hooks, which may copy.
    quiet = []
    for store in stores:
        handles, store.handles = store.handles, None
        for reference in handles or ():
            handle = reference()
            if handle is None:
                continue
            if handle.value.counter in bumped:
                handle.value = _overwritten(handle.value, name, handle.frame.path)
                continue
            saved = None if handle.value.saved is None else handle.value.saved.tensor
            tensor = handle.value.tensor() if saved is None else saved
            if tensor is None:
                tensor = _face_of(store, handle.frame.alone(handle.value), targets)
            if tensor is None:
                handle.value = _overwritten(handle.value, name, handle.frame.path)
            elif handle.frame.hooks_around is not None:
                handle.value = _handed_over(handle, tensor, handle.frame.hooks_around)
            else:
                quiet.append((handle, tensor, store))
    return quiet


def _face_of(store: Store, tensor: torch.Tensor, faces: list[torch.Tensor]) -> torch.Tensor | None:
    """Returns a view of a storage with the layout of ``tensor``, a replayed copy of a dead tensor; None if no face fits."""
    if storage_address(tensor) == store.address:
        return tensor
    for face in faces:
        if storage_of(face) == store.address and face.dtype is tensor.dtype and not (face.is_conj() or face.is_neg()):
            return face.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return None


def after_external(tape: Tape, stores: Iterable[Store], quiet: list[tuple[Any, torch.Tensor, Store]]) -> None:
    """Forgets the tensors of outside storages after a write; ``quiet`` handles get values of the written content."""
    for store in stores:
        store.written = True
        tape.tables.forget_members(store)
    for handle, tensor, store in quiet:
        handle.value = tape.input_of(tensor, store)
        store.handles = [*(store.handles or ()), weakref.ref(handle)]


def may_run_again(args: Any, kwargs: Any) -> bool:
    """Whether a run of Inductor's code can be repeated: it writes to no input, and draws on a single device at most."""
    code = facts_of_code(args[0])
    devices = {device_of(args, kwargs), *code.devices, *(source.device for source in args[1] if isinstance(source, Tensor))}
    return code.written == frozenset() and len(devices) == 1


def run_opaque(tape: Tape, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    """Runs an operator with unknown effects, which may write to any argument; its results are kept."""
    arguments = facts.arguments_of(args)
    inputs = tensors = tensors_in((arguments, kwargs))
    if facts.is_compiled and (places := facts_of_code(args[0]).written) is not None:
        tensors = [arguments[1][place] for place in places]
    stores = {id(store): store for store in map(tape.tables.store_of, tensors)}
    if facts.kind is OpKind.SAVEABLE:  # it only reads
        out = facts.call(*args, **kwargs)
    else:
        out = _run_opaque(tape, str(func), tensors, stores.values(), partial(facts.call, *args, **kwargs))
    if facts.is_asked_about:
        decide(tape, facts, arguments, kwargs, out)  # the policy only sees the operator: results are kept in any case
    for tensor in outer_tensors_in(out):
        if not (facts.is_compiled and any(tensor is source for source in inputs)):
            tape.note_external(tensor, f"returned by {func}")
    return out


def _run_opaque(tape: Tape, name: str, tensors: list[torch.Tensor], stores: Collection[Store], call: Callable[[], Any]) -> Any:
    # It is unknown which tensors are written to, so none counts as modified: saved tensors have the content after the call.
    quiet = look_at_handles(tape, stores, [], name, tensors)
    copy_held(tape, stores)
    try:
        return call()
    finally:
        for store in stores:
            tape.tables.make_external(store, f"handed to {name}")
        after_external(tape, stores, quiet)


def run_unseen(tape: Tape, writer: str, args: Any, call: Callable[[], Any]) -> Any:
    """Runs a call that writes without operators; from then on its arguments count as tensors from outside."""
    tensors = tensors_in(args)
    stores = {id(store): store for store in map(tape.tables.store_of, tensors)}
    return _run_opaque(tape, writer, tensors, stores.values(), call)


def run_marking(tape: Tape, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    """Runs an operator that marks a stream as a tensor's user; a replay runs it before later reads of the tensor."""
    target: torch.Tensor = args[0]
    out = facts.call(*args, **kwargs)
    before = tape.tables.known.get(id(target))
    if before is not None and before.saved is None:
        op, _ = op_of(tape, facts, args, kwargs)
        op.number = tape.tables.number + 1
        tape.tables.number += 2
        tape.tables.register(target, new_value(tape.tables.number, before.store, before.counter, op, before))
    return out


def run_inplace_view(tape: Tape, op: Op, facts: OpFacts, args: Any, kwargs: Any) -> Any:
    """Runs and records an operator that turns a tensor into another view of the same memory."""
    target: torch.Tensor = args[0]
    store = tape.tables.store_of(target)
    before = op.args[0]
    if before.saved is not None and before.saved.tensor is target:
        before.saved.tensor, before.saved.memory = counted_detach(target), None
    bumped = [counter_of(tape.tables, target)]
    out = facts.call(*args, **kwargs)
    if tape.decisions is not None:
        decide(tape, facts, args, kwargs, out)  # the policy only sees the operator: a view is never kept
    for holder in store.held or ():
        value = holder()
        if value is not None and value.saved is not None and value.saved.version is not None:
            tape.held.note_version_later(value)
    for reference in store.handles or ():
        handle = reference()
        if handle is not None and handle.value.counter in bumped:
            handle.value = _overwritten(handle.value, facts.full_name, handle.frame.path)
    tape.tables.number = op.number = tape.tables.number + 1
    store.written = store.written or not store.external
    tape.tables.register(target, new_value(op.number, store, before.counter, op))
    # After ``set_`` the program may write to another storage by this tensor, though the tape knew no tensor there.
    if storage_of(target) != store.address:
        tape.note_external(target, f"given to another tensor by {facts.operator}")
    return out
