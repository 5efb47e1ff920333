"""Regions in functions that ``torch.compile`` traces: they call torch's own ``checkpoint``, which Dynamo knows by identity.

The compiler decides how to recompute, and draws the random numbers of forward again by itself. Dynamo must not compile the code
of this package that runs regions eagerly, after a graph break or in a rerun.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])

_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def skipped(function: F) -> F:
    """Makes Dynamo skip a function, the functions in its body, and their callees, when it is called eagerly."""
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        set_code_exec_strategy(code, _SKIP)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return function


def while_tracing(function: F) -> F:
    """Marks a function for Dynamo to call while it traces; the result is a constant of the graph."""
    # ``torch.compiler.assume_constant_result`` does the same, but imports Dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def run_traced(function: Callable[..., Any], args: Any, kwargs: Any, context_fn: Callable[[], Any] | None) -> Any:
    if torch.compiler.is_exporting():  # an exported graph keeps no activations
        return function(*args, **kwargs)
    if context_fn is None:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


#: The prefix of the names of modules that Inductor generates (``torch/_inductor/codecache.py``).
_GENERATED = "torch._inductor.runtime.compile_tasks."


def graph_of(compiled: Any) -> Any:
    """Returns the graph of code that the operator ``inductor_compiled_code`` runs since 2.12; None if unknown."""
    graph = getattr(getattr(compiled, "original_gm", None), "graph", None)
    return graph if graph is not None and _is_generated(compiled.compiled_callable) else None


def _is_generated(call: Any) -> bool:
    # False for code that runs as a CUDA graph, since the next run overwrites its results. Such code, or each partition, is
    # wrapped in functions of other modules. The wrapper that copies unaligned inputs does no harm, and only its name tells it.
    if getattr(call, "__qualname__", "") == "align_inputs_from_check_idxs.<locals>.run":
        call = call.__closure__[call.__code__.co_freevars.index("model")].cell_contents
    parts = getattr(getattr(call, "__self__", None), "partitions", ())
    return all(str(getattr(part, "__module__", "")).startswith(_GENERATED) for part in (call, *parts))


def num_traced_nodes() -> int:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return len(InstructionTranslator.current_tx().output.graph.nodes)


def set_compile_configs(joint_pass: Callable[[Any, Any], Any] | None, tag: str) -> tuple[Any, str]:
    """Sets the pass on joint graphs, and the tag in the key of the compile cache; returns the previous pass and tag."""
    # Remove once torch has a public way to tell the partitioner about blocks.
    functorch: Any = torch._functorch.config
    before = functorch.joint_custom_pass, torch.compiler.config.cache_key_tag
    functorch.joint_custom_pass, torch.compiler.config.cache_key_tag = joint_pass, tag
    return before


def at_end_of_compilation(callback: Callable[[], None]) -> None:
    from torch._dynamo.callback import callback_handler

    def end(_: Any) -> None:
        callback_handler.remove_end_callback(end)
        callback()

    callback_handler.register_end_callback(end)
