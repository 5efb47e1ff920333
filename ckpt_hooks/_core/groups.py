"""Groups of backwards with one recompute, for schedules which split a backward in parts."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from ckpt_hooks._torch.autograd import graph_exec_group, set_graph_exec_group

from .scopes import Scope, new_group_scope

__all__ = ["GraphExecGroup", "group_scope"]


class GraphExecGroup:
    """Several backwards which together recompute each region at most once.

    Pipeline schedules run the backward of a stage in parts: gradients of the inputs first, gradients of the weights later. Each
    part is a graph task and would recompute the stage's regions again. Inside one group the parts share the values. The same
    instance may be entered again for a later part. The group keeps unused values until the group or the graph is
    deleted, so keep the object no longer than the schedule needs.

    The parts must be disjoint: two backwards in one group which need the same saved tensor raise, also under
    ``retain_graph=True``, since a value goes with its use. Groups do not nest. ``torch.utils.checkpoint`` has groups of the
    same name, and each package honours the other's.

    Raises:
        RuntimeError: On entering a group inside another one.

    Example:
        >>> import torch
        >>> from ckpt_hooks import GraphExecGroup, checkpoint
        >>> x = torch.ones(2, requires_grad=True)
        >>> first, second = checkpoint(lambda x: (x.sin(), x.cos()), x)
        >>> with GraphExecGroup():  # one recompute serves both
        ...     first.sum().backward(retain_graph=True)
        ...     second.sum().backward()
    """

    def __enter__(self) -> Self:
        current = graph_exec_group()
        if current is not None:
            raise RuntimeError(
                f"GraphExecGroup contexts cannot be nested: already inside group {current}. Leave it first, or run this "
                "backward in the outer group."
            )
        set_graph_exec_group(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        set_graph_exec_group(None)


def group_scope(group: Any) -> Scope:
    """Returns the scope of a group, ours or torch's, and makes it on first use."""
    # An attribute of the group, so that the scope ends when the group is deleted.
    try:
        scope: Scope = group._ckpt_hooks_scope
    except AttributeError:
        # Two threads may both come here; ``setdefault`` lets one of them win.
        scope = vars(group).setdefault("_ckpt_hooks_scope", new_group_scope())
    return scope
