"""Every private call into torch: its use, why the public way does not serve, its versions, and when the call may go.

The rest of the package imports these names from here, so the check of a new release of torch is to read one file and to run the
suite. Timings are for torch 2.13 on one x86-64 core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.utils._python_dispatch

Hook = Callable[[Any], Any]

_c: Any = torch._C
_autograd: Any = _c._autograd

# Pushing the pair of hooks directly costs 0.1 us; ``torch.autograd.graph.saved_tensors_hooks``, the public form, builds an
# object and enters it, and does nothing else. 2.11 to 2.15. Goes when the public way is as quick.
push_saved_tensors_hooks: Callable[[Hook, Hook], None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks

# The innermost pair of saved-tensor hooks (a parent region's or the user's), or None. Its argument tells whether to look past
# a trace. There is no public way to ask whether hooks are active. 2.11 to 2.15. Goes with a public way.
top_saved_tensors_hooks: Callable[[bool], tuple[Hook, Hook] | None] = _autograd._top_saved_tensors_default_hooks

# Which ``backward`` is running on this thread: a number that is never used twice, or -1 outside of one. 2.11 to 2.15. Goes with
# a public way.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# The node that ``backward`` is running on this thread, or None. 2.11 to 2.15. Goes with a public way.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# Runs a callable when the graph task of this thread ends, and owns it until then: it is dropped also if that backward fails,
# which is what recomputed values hang on. FSDP and DDP rely on the same call. 2.11 to 2.15.
# Torch 2.15 has made it public; the engine's own goes when 2.14 does.
queue_callback: Callable[[Callable[[], None]], None] = getattr(
    torch.autograd.graph, "queue_callback", torch.autograd.Variable._execution_engine.queue_callback
)

# What operators are: overloads, and operators of operators; several overloads of one name are a packet. 2.11 to 2.15. Goes when
# these classes are public.
OVERLOAD: Any = torch._ops.OpOverload
OPERATORS: Any = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
OPERATOR_PACKET: Any = torch._ops.OpOverloadPacket

# The two dispatch modes of torch's own selective checkpointing. The first has the policy as ``policy_fn``, and both have one
# ``storage``. A pair is recognised, for the package's own modes to carry it out. 2.11 to 2.15. Goes when torch's modes are
# exact.
SELECTIVE_FORWARD: Any = torch.utils.checkpoint._CachingTorchDispatchMode
SELECTIVE_RECOMPUTE: Any = torch.utils.checkpoint._CachedTorchDispatchMode

# Whether an operator has an effect that must not be repeated: one registered by ``torch.library``, or that of an object of
# TorchBind among its arguments. The module is there as soon as torch is; its policies ask it since 2.15. 2.11 to 2.15. Goes
# with a public way.
has_effects: Callable[[Any], bool] = torch._higher_order_ops.effects.has_effects

# Whether the graph task that is running keeps its graph (``retain_graph=True``). 2.11 to 2.15. Goes with a public way.
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph

# The dispatch modes that are active on this thread, from the outermost. 2.11 to 2.15. Goes when the public way is as quick.
# Entering a mode by its own methods keeps flags besides, at 1.6 us, by which compiled functions know that they run under one.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
dispatch_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[None], Any] = torch._C._pop_torch_dispatch_stack

# Whether torch traces by a dispatch mode (fake, functional, proxy), which has a place of its own on the stack; and a tensor of
# such a trace, in which there is nothing. 2.11 to 2.15. Goes with a public way.
is_tracing_mode: Callable[[Any], bool] = lambda mode: getattr(mode, "_mode_key", None) is not None  # noqa: E731
FAKE: Any = torch._subclasses.fake_tensor.FakeTensor

# The fake mode that is active on this thread, or None: it has a place of its own. 2.11 to 2.15. Goes with a public way.
active_fake_mode: Callable[[], Any] = lambda: torch._C._get_dispatch_mode(  # noqa: E731
    torch._C._TorchDispatchModeKey.FAKE
)

# What runs while a module is called: its frame of Python has the module. 2.11 to 2.15. Goes with a public way.
MODULE_CALL: Any = torch.nn.Module._call_impl.__code__

# Where the object of a tensor's storage is in memory, in half the time of asking for the storage; raises
# ``NotImplementedError`` for tensors without one. 2.11 to 2.15. Goes when the public way is as quick.
storage_address: Callable[[torch.Tensor], int] = _c._storage_address

# Contexts: operators go past autograd, and past the counting of versions and the tracking of views; and past function modes.
# 2.11 to 2.15. Goes with a public way.
BelowAutograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
PastFunctionModes: Any = torch._C.DisableTorchFunction

# A view that is the negative of what is in memory; what is public copies. And what sets, without a copy, whether a tensor is
# the conjugate of what is in its memory, or the negative. 2.11 to 2.15. Goes with a public way.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
set_conj, set_neg = _c._set_conj, _c._set_neg

# Keys of the dispatcher are left out, or taken in again, on this thread. 2.11 to 2.15. Goes with a public way.
_exclude: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_COUNTING = torch._C.DispatchKey.ADInplaceOrView
# Whether the operator that a dispatch mode sees came past the key that ties versions of views to bases: ``detach()`` did,
# the one of ``.data`` did not. 2.11 to 2.15. Goes with a public way.
is_below_counting: Callable[[], bool] = functools.partial(_is_excluded, _COUNTING)

# As long as there is one, this thread's dispatch modes are not asked: whatever ends the function that has it, Ctrl-C too, they
# are asked again. 2.11 to 2.15. Goes with a public way.
_ModesNotAsked: Callable[[], object] = torch._C._DisableTorchDispatch


def counted_detach(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias with the same version counter, from within a dispatch mode too, unlike a plain ``detach``."""
    excluded = _is_excluded(_COUNTING)
    _exclude(_COUNTING, False)
    try:
        return detach_past_modes(tensor) if num_dispatch_modes() else tensor.detach()
    finally:
        _exclude(_COUNTING, excluded)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _past_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function past dispatch modes, and past the handlers of subclasses."""
    guard = _ModesNotAsked()
    try:
        return function(*args)
    finally:
        del guard  # which the traceback of an exception would keep


def past_all_modes(tensor: torch.Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function past dispatch modes, torch's modes for tracing included.

    A fake tensor makes others under its own mode, active or not. 2.11 to 2.15. Goes with a public way.

    Args:
        tensor: The function's tensor: a plain tensor, among others of the kind, or a tensor of another class.
        function: The function.
        *args: Its arguments.
    """
    if not num_dispatch_modes():
        return function(*args)
    if type(tensor) in _PLAIN:
        return _past_modes(function, *args)
    with torch.utils._python_dispatch._disable_current_modes():
        return function(*args)


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor with the version counter of another tensor, which keeps no memory alive.

    For a subclass, or a tensor which is not dense, the witness is an alias, since its data cannot be exchanged.
    """
    witness = counted_detach(tensor)
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
        empty = _past_modes(functools.partial(torch.empty, 0, dtype=tensor.dtype, device=tensor.device))
        _past_modes(setattr, witness, "data", empty)
    return witness


def detach_past_modes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor.detach()`` past dispatch modes: 0.6 us, and 1.9 under a mode which does nothing."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor.detach()
    guard = _ModesNotAsked()  # as in ``_past_modes``, written out: 0.2 us less
    try:
        return tensor.detach()
    finally:
        del guard


# What a sparse tensor is made of, summed up or not, and a nested one of the strided kind: all of its numbers, and the sizes of
# its parts. What is public raises for a sparse tensor whose indices repeat, and goes through the parts of a nested one one by
# one. 2.11 to 2.15. Goes when the public way is as quick.
sparse_parts: Callable[[torch.Tensor], list[Any]] = lambda tensor: [tensor._indices(), tensor._values()]  # noqa: E731
nested_parts: Callable[[Any], list[Any]] = lambda tensor: [  # noqa: E731
    tensor.contiguous().values(),
    tensor._nested_tensor_size().tolist(),
]

# Returns a tensor that a collective fills, when it is complete; to wait for it again does no harm. 2.11 to 2.15. Goes when the
# operator is public.
wait_for_collective: Any = lambda tensor: torch.ops._c10d_functional.wait_tensor.default(tensor)  # noqa: E731

# The ``GraphExecGroup`` that this thread is in, torch's or ours; both are set through the same slot so that each engine
# honours the other's. 2.11 to 2.15. Goes with a public way.
graph_exec_group: Callable[[], object | None] = torch._C._get_graph_exec_group
set_graph_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group

# The number that the next autograd node created on this thread will get. Tensors that one operator saves are packed after
# its node was made and before the next one's, so equal numbers mean the same operator. 2.11 to 2.15. Goes with a public way.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

# 0.06 us for a question that takes one public call a device type. 2.11 to 2.15. Goes when the public way is as quick.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# Sets the version counters of tensors, which count modifications in place. Only for tensors of the package's own making, or
# back to what they were. 2.11 to 2.15. Goes with a public way.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = _autograd._unsafe_set_version_counter


# The sequence number of a node, given by its thread; a generator's address. 2.11 to 2.15. Both go with a public way.
node_number: Callable[[Any], int] = lambda node: node._sequence_nr()  # noqa: E731
address_of_generator: Callable[[Any], int] = lambda generator: generator._cdata  # noqa: E731


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage object, the same for all views; None for a tensor without a storage.

    The public ``data_ptr`` is 0 for freed memory, and makes a lazy copy a real copy.
    """
    try:
        return storage_address(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def is_kept_anyway(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf which requires grad, a parameter mostly, which costs nothing to keep; False for views.

    ``is_leaf`` of a view whose base was written to may give the view a new place in the graph, or raise.
    """
    return tensor.requires_grad and not tensor._is_view() and tensor.is_leaf


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was freed, as frameworks do with gathered parameters."""
    try:
        if type(tensor) in _PLAIN and tensor.data_ptr():  # a fake tensor warns when it is asked, and will raise
            return False
        return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
    except (NotImplementedError, RuntimeError):
        return False


# Active ``TorchFunctionMode`` objects (a default device is one), outermost first. 2.11 to 2.15. Goes with a public way.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], object] = torch._C._get_function_stack_at

# Pushes and pops a mode without entering it, which changes the state of some. 2.11 to 2.15. Goes with a public way.
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], object] = torch._C._pop_torch_function_stack

# Has the mode that ``torch.set_default_device`` has pushed on this thread, as ``device_context``. 2.11 to 2.15. Goes with a
# public way.
GLOBAL_DEVICE: Any = torch._GLOBAL_DEVICE_CONTEXT


def global_device_mode() -> object | None:
    """Returns the mode pushed on this thread by ``torch.set_default_device``; ``torch.get_default_device`` asks it."""
    return getattr(GLOBAL_DEVICE, "device_context", None)


def set_global_device_mode(mode: object | None) -> None:
    """Sets the mode of ``torch.set_default_device``, without a change of the stack. 2.11 to 2.15. Goes with a public way."""
    if mode is not global_device_mode():
        GLOBAL_DEVICE.device_context = mode


# The current device of CUDA, and number, device and kind of a device's current stream, without a look whether CUDA is
# initialised and without an object: 0.1 us each. None in builds without CUDA. 2.11 to 2.15. Goes when the public way is as
# quick.
cuda_device: Callable[[], int] | None = getattr(_c, "_cuda_getDevice", None)
cuda_stream_data: Callable[[int], tuple[int, int, int]] | None = getattr(_c, "_cuda_getCurrentStream", None)

# ``torch.set_grad_enabled`` without its object. 2.11 to 2.15. Goes when the public way is as quick.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

# The name under which a backend outside of torch has registered, ``"privateuseone"`` if none has. 2.11 to 2.15. Goes with a
# public way.
private_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name

# Whether a ``torch.func`` transform (grad, vjp, ...) is running. To ask for the innermost one makes a stack of them for this
# thread, be it empty, which autograd copies for each node of each later backward, at 0.1 us. 2.11 to 2.15. Goes with a public
# way.
is_any_transform_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Whether operators of this thread are traced into a graph (``make_fx``, and what compilers and exporters build on it). The
# tracer is a dispatch mode with a slot of its own; before dispatch it is a key instead, and function modes are active as well.
# The public way, ``torch.fx.experimental.proxy_tensor.get_proxy_mode``, imports sympy. 2.11 to 2.15. Goes when that does not.
_slot_of_mode, _TRACER = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_BEFORE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced() -> bool:
    """Whether operators of this thread are traced, in the presence of a dispatch mode or a function mode."""
    return _slot_of_mode(_TRACER) is not None or _is_included(_BEFORE_DISPATCH)


_innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
_pop_transform: Callable[[], object] = torch._C._functorch.pop_dynamic_layer_stack
_push_transform: Callable[[Any], int] = torch._C._functorch.push_dynamic_layer_stack


# ``is_grads_batched`` maps with a vmap of its own, which random operators refuse to run under and others do not mind where
# nothing is batched. Its level can only be read by moving it. 2.11 to 2.15. Goes with a public way.
_enter_batched_grads, _leave_batched_grads = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
_BATCHED_GRADS = torch._C._dispatch_key_parse("VmapMode")


def suspend_transforms() -> tuple[list[object], int] | None:
    """Takes every ``torch.func`` transform, and every map over gradients, off this thread.

    The rerun of a region runs outside of transforms, as forward did, although backward may run under a transform:
    ``torch.autograd.grad(..., is_grads_batched=True)`` maps over the gradients only.

    Returns:
        The argument of :func:`resume_transforms`; None without transforms.
    """
    if not (_is_included(_BATCHED_GRADS) or is_any_transform_active()):
        return None
    level = _enter_batched_grads() - 1
    for _ in range(level + 1):
        _leave_batched_grads()
    return [_pop_transform() for _ in iter(_innermost_transform, None)], level


def resume_transforms(suspended: tuple[list[object], int]) -> None:
    """Undoes :func:`suspend_transforms`."""
    transforms, level = suspended
    for transform in reversed(transforms):
        _push_transform(transform)
    for _ in range(level):
        _enter_batched_grads()


class SavedTensor(Protocol):
    """A tensor saved by autograd, by way of the saved-tensor hooks active at the time."""

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; runs the unpack hook, if hooks were active."""


class _SaveInput(torch.autograd.Function):
    """Saves its second argument for a backward which never runs; for the first argument autograd builds a node."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        output: torch.Tensor = _past_modes(functools.partial(torch.empty, 0, device=anchor.device))
        return output


class NodeSavedTensor:
    """:class:`SavedTensor` for torch 2.11, where an autograd node has to save the tensor."""

    __slots__ = ("output",)

    def __init__(self, tensor: torch.Tensor) -> None:
        anchor = _past_modes(functools.partial(torch.empty, 0, requires_grad=True, device="cpu"))
        # The output owns the node; the Python object of a node alone does not keep what it saved.
        self.output: Any = _SaveInput.apply(anchor, tensor)  # type: ignore[no-untyped-call]

    def unpack(self) -> torch.Tensor:
        tensor: torch.Tensor = self.output.grad_fn.saved_tensors[0]
        return tensor


class _SaveAll(torch.autograd.Function):
    """Saves tensors for a backward which never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")


def hold_versions(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor whose ``grad_fn.saved_tensors`` raises ``RuntimeError`` after a write to any of some tensors.

    Autograd compares the versions of many saved tensors in a fifth of the time of as many questions. Active saved-tensor hooks
    would get the tensors instead, so the hooks are off meanwhile. 2.11 to 2.15. Goes when the public way is as quick.
    """
    hooks: list[tuple[Hook, Hook]] = []
    grad_enabled = torch.is_grad_enabled()
    try:
        while (pair := top_saved_tensors_hooks(False)) is not None:
            pop_saved_tensors_hooks()
            hooks.append(pair)
        set_grad_enabled(True)
        with PastFunctionModes():
            anchor = _past_modes(functools.partial(torch.empty, 0, requires_grad=True, device="cpu"))
            owner: torch.Tensor = _past_modes(_SaveAll.apply, anchor, *tensors)
        return owner
    finally:
        set_grad_enabled(grad_enabled)
        for pair in reversed(hooks):
            push_saved_tensors_hooks(*pair)


# 2.12 added the way to make a ``SavedTensor`` from Python. Its own form here goes with torch 2.11, the other with a public way.
save_tensor: Callable[[torch.Tensor], SavedTensor] = (
    (lambda tensor: _autograd._make_saved_tensor(tensor, False))
    if hasattr(_autograd, "_make_saved_tensor")
    else NodeSavedTensor
)
