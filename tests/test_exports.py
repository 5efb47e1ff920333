"""The public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import pydoc
import subprocess
import sys

import pytest
import torch.utils.checkpoint

import ckpt_hooks

# What torch.utils.checkpoint exports and this package hands through: the reentrant engine.
REENTRANT = {"CheckpointFunction", "check_backward_validity", "detach_variable"}


def test_all_is_sorted_and_true():
    constants_first = sorted(ckpt_hooks.__all__, key=lambda name: (not name.isupper(), name))
    assert ckpt_hooks.__all__ == constants_first
    for name in ckpt_hooks.__all__:
        assert hasattr(ckpt_hooks, name)


def public_names_of_torch():
    """The names that the installed torch exports, and others that its module defines."""
    module = torch.utils.checkpoint
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return {*module.__all__, *(name for name in defined if not name.startswith("_"))}


def test_names_of_torch_are_there():
    """Code written for ``torch.utils.checkpoint`` finds its names."""
    names = public_names_of_torch()
    assert names - set(ckpt_hooks.__all__) == REENTRANT
    for name in names:
        assert getattr(ckpt_hooks, name) is not None
        assert name in dir(ckpt_hooks)
        assert (name in vars(ckpt_hooks)) is (name not in REENTRANT)


@pytest.mark.parametrize("name", sorted(REENTRANT))
def test_names_of_the_reentrant_engine_are_torchs_own(name):
    assert getattr(ckpt_hooks, name) is getattr(torch.utils.checkpoint, name)
    assert name not in ckpt_hooks.__all__


def test_the_reentrant_engine_in_a_program():
    from ckpt_hooks import CheckpointFunction, check_backward_validity, detach_variable

    x = torch.rand(3, requires_grad=True)
    check_backward_validity((x,))
    y = CheckpointFunction.apply(lambda x: x.sin().cos(), True, *detach_variable((x,)))
    y.sum().backward()
    assert x.grad is None  # which belongs to the detached one
    (expected,) = torch.autograd.grad(x.sin().cos().sum(), x)
    CheckpointFunction.apply(lambda x: x.sin().cos(), True, x).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.slow
def test_the_reentrant_engine_is_not_asked_for_on_import():
    program = (
        "import torch.utils.checkpoint as theirs\n"
        f"for name in {sorted(REENTRANT)}:\n"
        "    delattr(theirs, name)\n"
        "import ckpt_hooks\n"
        "assert 'CheckpointFunction' in dir(ckpt_hooks)\n"
        "assert not hasattr(ckpt_hooks, 'CheckpointFunction')\n"
        "from ckpt_hooks import *\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'ckpt_hooks' has no attribute 'nothing'"):
        _ = ckpt_hooks.nothing
    assert {"checkpoint", *REENTRANT, "__version__"} <= set(dir(ckpt_hooks))
    assert sorted(dir(ckpt_hooks)) == dir(ckpt_hooks)


@pytest.mark.parametrize("name", ckpt_hooks.__all__)
def test_public_names_are_documented(name):
    """Every public name has a docstring; functions that take something say what, and show it."""
    thing = getattr(ckpt_hooks, name)
    text = inspect.getdoc(thing)
    assert text or name.isupper()
    if inspect.isfunction(thing) and inspect.signature(thing).parameters:
        assert "Args:" in text


@pytest.mark.slow
def test_every_module_imports_alone_and_has_a_docstring():
    """No module relies on another one having been imported first."""
    modules = [name for _, name, _ in pkgutil.walk_packages(ckpt_hooks.__path__, "ckpt_hooks.")]
    for name in modules:
        assert importlib.import_module(name).__doc__
    program = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *reversed(modules)], check=True)


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("ckpt_hooks").joinpath("py.typed").is_file()


# Names found when asked for


def test_type_checkers_see_the_names_found_when_asked_for():
    """The block for type checkers and the table have the same names, from the same modules."""
    tree = ast.parse(inspect.getsource(ckpt_hooks))
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    seen = {}
    for node in block.body:
        for alias in node.names:
            start = ckpt_hooks.__name__ if node.level else ""
            seen[alias.asname or alias.name] = ".".join(filter(None, (start, node.module)))
    assert {*ckpt_hooks.__all__, *REENTRANT} <= {*seen}
    for name, module in seen.items():
        assert getattr(ckpt_hooks, name) is getattr(importlib.import_module(module), name)
        assert name in dir(ckpt_hooks)


def test_help_shows_names_found_when_asked_for():
    text = pydoc.plain(pydoc.render_doc(ckpt_hooks))
    for name in ckpt_hooks.__all__:
        assert name in text


def test_no_name_is_that_of_a_module_besides():
    """``import ckpt_hooks.report.debug`` and the like put modules into packages: these hide no function."""
    modules = {name for _, name, _ in pkgutil.walk_packages(ckpt_hooks.__path__, "ckpt_hooks.")}
    for package in (ckpt_hooks, ckpt_hooks.report, ckpt_hooks.policies, ckpt_hooks.modules, ckpt_hooks.planner):
        assert not modules & {f"{package.__name__}.{name}" for name in package.__all__}


# Run in a process of its own, where torch alone is imported: each line of a program in a fork. A program may use what follows.
PROCESS = '''
import json, marshal, os, sys, threading, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

before, seen = set(sys.modules), []

def region_step():
    with checkpoint_region():
        y = x.sin().cos()
    y.sum().backward()

class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))

class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))

class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        load()
        return grad

def load():
    exec(program, globals())

def within(block):
    with block:
        load()

def traced(x):
    load()
    return x.sin()

def compare():
    """Steps of a module with weights, buffers and random numbers are what they are without regions."""
    from ckpt_hooks import checkpoint, checkpoint_region
    from ckpt_hooks._ambient import random as sources
    from ckpt_hooks._ambient import switches
    from ckpt_hooks._torch.tensors import num_holders
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.BatchNorm1d(4))
    found = []
    for form in (module, lambda x: checkpoint(module, x), checkpoint_region()(module)):
        torch.manual_seed(0)
        x = torch.ones(4, 4, requires_grad=True)
        found.append([*torch.autograd.grad(form(x).pow(2).sum(), [x, *module.parameters()])])
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    assert sources.CPU.look is not None and num_holders(torch.empty(3)) == 1
    assert dict(zip(switches._TYPES, switches._OFF))["cpu"] == torch.bfloat16

def loaded():
    sizes = []
    for name in set(sys.modules) - before:
        file = sys.modules[name].__file__
        with open(file) as source:  # as in a file of bytecode, but for 16 bytes
            sizes.append(len(marshal.dumps(compile(source.read(), name, "exec"))) + 16)
    print(json.dumps([len(sizes), sum(sizes) / 1024]), flush=True)

for line in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(line, globals())
        except BaseException as error:
            print(f"{line}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, line
'''


def in_new_processes(*programs):
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", PROCESS, *programs], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_modules_loaded_by_a_first_step():
    """Few: nothing of other packages, and of this package what the step needs."""
    step = "x = torch.ones(4, requires_grad=True); "
    found = in_new_processes(
        "import ckpt_hooks; loaded()",
        "from ckpt_hooks import checkpoint; loaded()",
        f"from ckpt_hooks import checkpoint; {step}checkpoint(lambda x: x.sin().cos(), x).sum().backward(); loaded()",
        f"from ckpt_hooks import checkpoint_region; {step}region_step(); loaded()",
    )
    limits = [(10, 60), (60, 830), (60, 830), (70, 1100)]
    for line, (most_modules, most_kib) in zip(found, limits, strict=True):
        modules, kib = json.loads(line)
        assert modules <= most_modules
        assert kib <= most_kib


@pytest.mark.slow
def test_a_plain_step_loads_no_other_rooms():
    others = "_recorded planner integrations modules policies report selective offload region"
    in_new_processes(
        "from ckpt_hooks import checkpoint; x = torch.ones(4, requires_grad=True); module = torch.nn.Linear(4, 4); "
        "[checkpoint(module, x).sum().backward() for _ in range(2)]; "
        f"found = {{name.split('.')[1] for name in sys.modules if name.startswith('ckpt_hooks.')}} & {{*{others!r}.split()}}; "
        "assert not found, found; assert 'torch._dynamo' not in sys.modules"
    )


# What a program is under when it asks for names first.
SURROUNDINGS = {
    "dispatch mode": "within(DispatchMode())",
    "function mode": "within(FunctionMode())",
    "meta device": "within(torch.device('meta'))",
    "default device": "torch.set_default_device('meta'); load(); torch.set_default_device(None)",
    "fake tensors": "within(FakeTensorMode())",
    "inference mode": "within(torch.inference_mode())",
    "autocast": "within(torch.autocast('cpu', dtype=torch.float16))",
    "backward": "InBackward.apply(torch.ones(3, requires_grad=True)).sum().backward()",
    "vmap": "torch.func.vmap(traced)(torch.ones(3))",
    "make_fx": "assert len(make_fx(traced)(torch.ones(3)).graph.nodes) == 3",
    "make_fx before dispatch": "assert len(make_fx(traced, pre_dispatch=True)(torch.ones(3)).graph.nodes) == 3",
    "torch.jit.trace": "assert 'rand' not in str(torch.jit.trace(traced, torch.ones(3)).graph)",
}


LOADS = {
    "checkpoint": "from ckpt_hooks import checkpoint",
    "submodules": "import ckpt_hooks; ckpt_hooks.policies.dots_saveable; ckpt_hooks.errors.MutationError",
    "every module": "import ckpt_hooks, pkgutil; [__import__(found[1]) for found in pkgutil.walk_packages(ckpt_hooks.__path__, "
    "'ckpt_hooks.')]; exec('from ckpt_hooks import *', {})",
}


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_names_asked_for_first_under_something(load):
    """Nothing made on import is seen by a mode, lands on another device, in inference mode or in a trace."""
    in_new_processes(*(f"program = {load!r}; {run}; assert not seen, seen; compare()" for run in SURROUNDINGS.values()))


@pytest.mark.slow
def test_threads_that_ask_for_names_at_once():
    names = [
        "checkpoint",
        "checkpoint_region",
        "policies",
        "errors",
        "apply_checkpointing",
        "trace",
        "patch_torch",
        "plan_memory",
    ]
    in_new_processes(
        *8
        * [
            "sys.setswitchinterval(1e-6); import ckpt_hooks; failed = []; threading.excepthook = failed.append; "
            f"threads = [threading.Thread(target=getattr, args=(ckpt_hooks, name)) for name in {names!r}]; "
            "[thread.start() for thread in threads]; [thread.join() for thread in threads]; assert not failed, failed"
        ]
    )


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "return ckpt_hooks.checkpoint(name='a', policy=ckpt_hooks.policies.dots_saveable)(torch.sin)(x)",
        "from ckpt_hooks import checkpoint; return checkpoint(torch.sin, x)",
        "with ckpt_hooks.checkpoint_region(): return x.sin()",
    ],
)
def test_dynamo_asks_for_names_first(body):
    """The function is traced as a whole, and once."""
    in_new_processes(
        f"program = 'def function(x):\\n import ckpt_hooks; x = x + 0\\n ' + {body!r}; load(); "
        "graphs = []; count = lambda graph, _: graphs.append(graph) or graph; "
        "compiled = torch.compile(function, backend=count, fullgraph=True); "
        "x = torch.ones(3, requires_grad=True); [compiled(x).sum().backward() for _ in range(2)]; "
        "assert len(graphs) == 1, graphs; assert torch.equal(x.grad, 2 * torch.ones(3).cos()); compare()"
    )
