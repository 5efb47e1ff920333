"""Running a program and comparing two runs of it. Scripts get the source of every function here, so each stands on its own."""

from __future__ import annotations

import random
import sys
import threading
import warnings

import torch


def plain(function, *args, **kwargs):
    """Runs a function as no region at all: the program as it is without checkpointing."""
    return function(*args, **kwargs)


def see_gradients(what, leaves, see):
    """Shows the gradients that leaves have so far."""
    for leaf in leaves:
        see("gradient", what, leaf.grad)


def see_value(kind, name, value, see):
    """Shows a value with what containers hold, their keys in order; of any other object its type."""
    if isinstance(value, dict | list | tuple):
        places = list(value) if isinstance(value, dict) else range(len(value))
        see(kind, name, (type(value).__name__, repr(list(places))))
        for place in places:
            see_value(kind, f"{name}[{place!r}]", value[place], see)
    elif isinstance(value, set):
        see(kind, name, sorted(map(repr, value)))
    elif value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        see(kind, name, value)
        if isinstance(value, torch.Tensor) and value.is_leaf:
            see("gradient", name, value.grad)
    else:
        see(kind, name, type(value).__name__)


def attributes_of(module):
    """Returns the attributes of a module that are not the machinery of modules, or of what runs regions, by name."""
    machinery = vars(torch.nn.Module()).keys() - {"training"}
    names = [key for key in vars(module) if key not in machinery and not key.startswith(("_flat", "_ckpt_hooks"))]
    return {key: vars(module)[key] for key in sorted(names)}


def held_by(modules):
    """Returns the containers and tensors that attributes of modules are, and those in them, by where they are."""
    found = {}

    def look(place, value):
        if isinstance(value, dict | list | tuple | set | torch.Tensor):
            found[place] = value
        if isinstance(value, dict | list | tuple):
            for key in value if isinstance(value, dict) else range(len(value)):
                look((*place, key), value[key])

    for number, module in enumerate(modules):
        for path, part in module.named_modules():
            look((number, path), attributes_of(part))
            del found[number, path]
    return found


def see_identities(before, after, see):
    """Shows which things in modules are not the ones that were there before."""
    for place, value in after.items():
        see("identity", str(place), before.get(place) is value)


def see_variable(name, variables, see):
    """Shows a local or global variable, and what the function tells that is there to look at those of another one."""
    see_value("variable", name, variables.get(name), see)
    see_value("variable", f"global {name}", sys._getframe(1).f_globals.get(name), see)
    if f"{name}_look" in variables:
        see_value("variable", f"{name}_look()", variables[f"{name}_look"](), see)


def see_module(name, module, see):
    """Shows parameters, their gradients, buffers, and attributes."""
    for key, parameter in module.named_parameters():
        see("gradient", f"{name}.{key}", parameter.grad)
        see("parameter", f"{name}.{key}", parameter)
    for key, buffer in module.named_buffers():
        see("buffer", f"{name}.{key}", buffer)
    for path, part in module.named_modules():
        hooks = len(part._forward_hooks), len(part._forward_pre_hooks)
        see("attribute", f"class and hooks of {name}.{path}", (type(part).__name__, *hooks))
        for key, value in attributes_of(part).items():
            see_value("attribute", f"{name}.{path}.{key}", value, see)


def see_saved_fields(value, see):
    """Shows what the nodes of a graph have saved, which is to be had outside of backward too."""
    todo, met = [value.grad_fn], set()
    while todo:
        node = todo.pop(0)
        if node is None or node in met:
            continue
        met.add(node)
        for field in dir(node):
            if "running" in field:  # the buffers of batch norm, which it updates unnoticed and does not read in training
                continue
            if field.startswith("_saved_") and isinstance(getattr(node, field), torch.Tensor):
                see("saved", f"{node.name()}.{field}", getattr(node, field))
        for index, saved in enumerate(getattr(node, "saved_tensors", ())):
            see("saved", f"{node.name()}.saved_tensors[{index}]", saved)
        todo += [parent for parent, _ in node.next_functions]


def state_of(source):
    """Returns the state of a random generator: torch's, Python's or NumPy's."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.getstate() if isinstance(source, random.Random) else source.bit_generator.state


def in_thread(function):
    """Calls a function on a thread of its own, with as many threads for its operators as here."""
    errors = []
    number = torch.get_num_threads()

    def call():
        torch.set_num_threads(number)
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def on_thread(run, function, x):
    """Returns the result of a function on a thread of its own."""
    found = []
    in_thread(lambda: found.append(run(function, x)))
    return found[0]


def observe(program, run):
    """Returns what a program shows, as (kind, name, value), and the error that ended it or None."""
    seen = []

    def see(kind, name, value):
        if isinstance(value, torch.Tensor):
            seen.append((kind, f"{name}, requires grad", value.requires_grad))
            value = value.detach().clone()
        seen.append((kind, name, value))

    for_all = torch.nn.modules.module
    hooks = [for_all._global_forward_hooks, for_all._global_forward_pre_hooks]
    hooks += [for_all._global_forward_hooks_with_kwargs, for_all._global_forward_hooks_always_called]
    hooks_before = [(table, dict(table)) for table in hooks]
    error = None
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program(run, see)
        except Exception as found:
            error = (type(found).__name__, str(found))
    see("stream", "torch", torch.get_rng_state())
    see("stream", "Python", random.getstate())
    if "numpy" in sys.modules:
        see("stream", "NumPy", sys.modules["numpy"].random.get_state()[1].tolist())
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False)
    see("state", "modes", (torch.is_grad_enabled(), torch.get_default_dtype(), torch._C._len_torch_function_stack(), packing))
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    see("state", "autocast", autocast)
    kernels = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    flags = torch.backends.mkldnn.enabled, torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    see("state", "backends", (*kernels, *flags, torch.are_deterministic_algorithms_enabled(), torch.get_default_device()))
    see("state", "hooks for all modules", [len(table) for table in hooks])
    for table, contents in hooks_before:
        table.clear()
        table.update(contents)
    torch.set_grad_enabled(True)  # the next run is not to suffer from this one
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    return seen, error


def same(one, other):
    """Whether two values are equal bit for bit, NaN to NaN."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (torch.view_as_real(value) if value.is_complex() else value for value in (one, other))
    if one.dtype.is_floating_point:
        if not torch.equal(one.isnan(), other.isnan()):
            return False
        one, other = (torch.where(value.isnan(), 0, value) for value in (one, other))
        if not torch.equal(one.signbit(), other.signbit()):  # which tells one zero from the other
            return False
    return torch.equal(one, other)


def difference(expected, found):
    """Returns how a run differs from the plain one, as (kind, explanation), or None if it does not.

    The kind is that of the value that differs first, ``"raised"``, or ``"no error"`` where only the plain run raised.
    """
    (seen, error), (seen_too, error_too) = expected, found
    if error_too is not None and error is None:
        return "raised", f"raised {error_too[0]}: {error_too[1]}"
    if error is not None and error_too is None:
        return "no error", f"plain autograd raises {error[0]}: {error[1]}"
    for (kind, name, value), (kind_too, name_too, value_too) in zip(seen, seen_too, strict=False):
        if (kind, name) != (kind_too, name_too):
            # Where both raise, one may have come further than the other.
            return None if error is not None else ("output", f"{kind_too} {name_too} is shown, expected {kind} {name}")
        if not same(value, value_too):
            return kind, f"{kind} {name} is {value_too}, expected {value}"
    return None
