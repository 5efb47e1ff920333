"""The ingredients of programs by name, so that a run may leave some of them out."""

from __future__ import annotations

import ckpt_hooks

__all__ = ["ABSENT", "CORE", "FEATURES", "PATCHES", "holding", "parse"]

#: What a runtime must get right without being told anything.
CORE = frozenset(
    {
        "operators",  # some 250 expressions of torch
        "views",
        "in_place",  # writes to intermediate values and to views of them
        "custom_functions",
        "autocast",
        "no_grad",  # no_grad and detached parts, and regions within them
        "inference",  # and inference_mode, where there is no_grad
        "random",  # torch's default generator
        "forked_random",  # fork_rng blocks
        "seeds",  # manual_seed, set_rng_state, numbers drawn and not used
        "closures",  # values of outer functions read in regions
        "containers",  # lists, dicts, keywords, partials; several results, some of them not used
        "modules",
        "module_attributes",  # attributes that forward, or the caller, binds anew: numbers, strings, flags, None, tensors
        "module_containers",  # lists, dicts, sets and tuples that modules have, and that forward, or the caller, changes
        "counters",  # numbers that modules count in, and what depends on them: warm-ups, first calls
        "submodules",  # bound anew, added, taken out and put in another order, by forward or by the caller
        "hidden_state",  # states of recurrent modules, averages and caches, from one call to the next
        "training_flags",  # train() and eval(), of parts of modules too, at any time; modules that look at their flags
        "loop_closures",  # functions of regions that close over variables, and globals, which are others later on
        "places",  # containers and objects of several kinds that functions reach, and what they do there
        "sequential",  # functions in segments
        "chunks",  # functions on slices of a tensor
        "loops",  # a function called again and again
        "nesting",  # regions in regions, to depth 4; without it all regions are siblings
        "inner_backward",  # autograd.grad and backward inside forward
        "hooks",  # the user's own saved-tensor hooks
        "tensor_hooks",
        "backward_hooks",  # of nodes, of several tensors, of leaves after accumulation, of modules
        "handlers",  # exceptions caught inside regions
        "exceptions",  # regions that raise, and callers that go on
        "failures",  # a first step that raises, in forward, in a recompute or in backward, and is done again
        "optimizers",  # several steps of one
        "threads",  # functions on threads of their own, around regions and inside of them
        "wrappers",  # a subclass that holds another tensor
        "endings",  # every way of running backward; without it each program calls backward once
    }
)

#: What functions run and read is patched: by forward, by the caller before it, and between forward and backward.
PATCHES = frozenset(
    {
        "module_hooks",  # hooks and pre-hooks of forwards, of one module and of all, which come and go
        "forwards",  # ``module.forward = f``, and deleted again
        "classes",  # ``module.__class__ = other``, and of objects that are no modules
        "storages",  # ``t.data = other`` of whatever tensors forwards reach
        "swaps",  # torch.utils.swap_tensors of them
        "function_attributes",  # attributes of functions that they, or functions they call, read and write
    }
)

#: All features; those not in :data:`CORE` need what a function frame is not told, or cannot do.
FEATURES = CORE | {
    *PATCHES,
    "ambient",  # default dtype and device, context variables and backend flags that are others in backward
    "closure_mutation",  # writes to what regions close over and plain autograd has no need of
    "buffers",  # modules that update their own buffers
    "first_run_only",  # operators that do not run in a recompute, whose outputs nobody uses
    "generators",  # torch.Generator objects in closures and arguments
    "kernels",  # custom functions with kernels that write where no operator does
    "input_mutation",  # writes to a region's arguments
    "module_state",  # modules that update parameters and attributes of theirs
    "numpy_random",  # NumPy's global generator, with ckpt_hooks.track_rng
    "python_random",  # that of the random module, likewise
    "side_effects",  # a list that a region appends to, once
    "stale_saves",  # writes to what backward needs: plain autograd raises
    "tracked_sources",  # random generators of several kinds, likewise
    "step_in_backward",  # parameters updated as soon as their gradients are there
}

#: Those that there is nothing to test of yet.
ABSENT = frozenset() if hasattr(ckpt_hooks, "track_rng") else frozenset({"numpy_random", "python_random", "tracked_sources"})

#: Features that hold for some implementations alone, with their names; all others hold for all of them.
_AS_FUNCTIONS = {"ours", "ours-curried", "ours-to-the-end", "ours-debug", "ours-varied", "plain"}
_HOLDS_FOR = {"storages": _AS_FUNCTIONS, "swaps": _AS_FUNCTIONS}


def holding(implementation: str) -> frozenset[str]:
    """Returns the features that hold for an implementation."""
    return frozenset(name for name in FEATURES if implementation in _HOLDS_FOR.get(name, {implementation}))


def parse(text: str, implementation: str = "ours") -> frozenset[str]:
    """Returns the features that a text names: ``"core"``, ``"all"``, names, and names to leave out, as in ``core,-random``.

    Args:
        text: Of the command line.
        implementation: What runs regions; ``"all"`` leaves out what does not hold for it, unless it is named as well.

    Raises:
        ValueError: If there is no such feature.
    """
    chosen: set[str] = set()
    for word in text.split(","):
        name = word.strip().removeprefix("-")
        named = {"core": CORE, "all": holding(implementation)}.get(name) or ({name} & FEATURES)
        if not named:
            raise ValueError(f"there is no feature {name!r}; choose from core, all, {', '.join(sorted(FEATURES))}")
        chosen = chosen - named if word.strip().startswith("-") else chosen | named
    return frozenset(chosen)
