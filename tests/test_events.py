"""Events: everything that regions do is told, and adds up."""

from __future__ import annotations

import collections
import contextlib
import gc

import pytest
import torch

from ckpt_hooks import checkpoint, checkpoint_name, checkpoint_region
from ckpt_hooks._core.tensor_numbers import storage_and_size
from ckpt_hooks.policies import offload_ops, save_only_these_names, save_ops
from ckpt_hooks.report import Reason
from tests.behaviours.runs import same
from tests.measure import CountOps, Watch, allocated, leaf

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten


class Ledger(Watch):
    """What events tell, as one would want it in a report; nothing in it is asked of a frame."""

    wants_operators = True

    def __init__(self):
        self.regions = {}
        self.open = []
        self.failed = []
        self.tensors = collections.defaultdict(dict)  # by region: by position: fate, bytes, and whether it is there yet
        self.operators = collections.defaultdict(list)  # of forward, by region
        self.operators_again = collections.Counter()  # that ran in a recompute, those of regions inside included
        self.recomputes = []  # each with its region and operators
        self.running = []
        self.reasons = {}  # of each storage that is kept, and its size
        self.on_host = 0
        self.moved_bytes = collections.Counter()
        self.restored_tensors = []
        self.sites = collections.defaultdict(list)
        self.storages = set()

    def entered(self, region):
        self.regions[region.id] = region
        self.open.append(region.id)

    def exited(self, region, error):
        assert self.open.pop() == region.id
        if error is not None:
            self.failed.append((region.path, type(error)))

    def ran(self, region, operator):
        ran = self.running[-1][1] if self.running else self.operators[region.id]
        if region.id in self.open:
            ran = self.operators[region.id]
        assert operator.in_recompute or not self.running
        name = operator.name.removeprefix("aten.").partition(".")[0]
        ran.append(name)
        self.operators_again[name] += operator.in_recompute
        self.sites[region.id].append(operator.site)
        self.storages |= {tensor.storage for tensor in operator.inputs + operator.outputs}

    def saved(self, region, saved, tensor):
        assert saved.region == region.path
        assert saved.position not in self.tensors[region.id]
        self.tensors[region.id][saved.position] = [saved.fate, saved.nbytes, True]
        if saved.fate in (Reason.INPUT, Reason.NOT_REPLAYED, Reason.POLICY, Reason.NAME):
            self.reasons[tensor.storage] = (saved.fate, tensor.storage_nbytes)

    def settled(self, region, position, fate):
        self.tensors[region.id][position][0] = fate

    def let_go(self, region, position):
        assert self.tensors[region.id][position][2]
        self.tensors[region.id][position][2] = False

    def held(self, region, holdings):
        for holding in holdings:
            if holding.storage is not None:
                self.reasons[holding.storage] = (holding.reason, holding.storage_nbytes)
            elif holding.reason is Reason.OFFLOADED:
                self.on_host += holding.nbytes

    def freed(self, storage):
        self.reasons.pop(storage, None)
        self.storages.discard(storage)

    def moved(self, region, nbytes, *, to_host):
        self.moved_bytes[to_host] += nbytes

    def recomputing(self, region, *, in_order):
        self.running.append((region.path, []))

    def recomputed(self, region, error):
        path, ran = self.running.pop()
        assert path == region.path
        self.recomputes.append((path, ran) if error is None else (path, type(error)))

    def restored(self, region, position, tensor):
        assert self.tensors[region.id][position][2]
        self.restored_tensors.append((region.path[-1], position, tensor.nbytes))

    # What a report would say

    def tree(self, parent=None):
        """Returns the regions inside one, each with its kind, name and the regions inside."""
        return [(r.kind, r.path[-1], self.tree(r.id)) for r in self.regions.values() if r.parent == parent]

    def fates(self, name):
        """Returns how many tensors of regions of a name there are by fate, and their bytes."""
        count, size = collections.Counter(), collections.Counter()
        for region in self.regions.values():
            if region.path[-1] == name and not region.in_recompute:
                for fate, nbytes, _ in self.tensors[region.id].values():
                    count[fate] += 1
                    size[fate] += nbytes
        return {fate: (count[fate], size[fate]) for fate in count}

    def alive(self):
        """Returns how many saved tensors autograd has not let go of."""
        return sum(there for tensors in self.tensors.values() for _, _, there in tensors.values())

    def kept_bytes(self, *inputs, before=()):
        """Returns the bytes of all that regions keep, but for what the caller has and what was there before."""
        others = {*(storage_and_size(tensor)[0] for tensor in inputs), *before}
        return sum(nbytes for storage, (_, nbytes) in self.reasons.items() if storage not in others) + self.on_host

    def by_reason(self):
        """Returns the bytes of what regions keep, by reason."""
        found = collections.Counter()
        for reason, nbytes in self.reasons.values():
            found[reason.value] += nbytes
        return dict(found)


def warmed_up(run, *args):
    """Runs a region whose graph stays for as long as the result; returns the storages that it keeps, too."""
    ledger = Ledger()
    with ledger:
        y = run(*args)
    return y, set(ledger.reasons)


def function_region(function, name, policy=None):
    return checkpoint(policy=policy, name=name)(function)


def recorded_region(function, name, policy=None):
    def run(*args):
        with checkpoint_region(policy=policy, name=name):
            return function(*args)

    return run


REGIONS = pytest.mark.parametrize("region", [function_region, recorded_region])


def parameters():
    return [leaf(32, 32) for _ in range(3)]


@REGIONS
def test_a_region(region):
    """Tree, fates, who ran what, and bytes."""
    x, w, v = parameters()

    def block(h):
        return ((h @ w).sin() @ v).exp()

    run = region(block, "block")
    other, before = warmed_up(run, x.sin())  # the states of generators that it holds are those of the next one
    ledger = Ledger()
    with ledger:
        y, nbytes = allocated(lambda: run(x.sin()))
    assert ledger.tree() == [("function" if region is function_region else "recorded", "block", [])]
    assert ledger.operators[min(ledger.regions)] == ["mm", "sin", "mm", "exp"]
    size = 32 * 32 * 8
    kept = {} if region is function_region else {Reason.INPUT: (1, size)}
    dropped = 4 - len(kept)
    # h, then what sin, the second product and exp save: their inputs, or the result.
    assert ledger.fates("block") == {Reason.PARAMETER: (2, 2 * size), Reason.DROPPED: (dropped, dropped * size), **kept}
    assert ledger.kept_bytes(x, w, v, before=before) + y.nbytes == nbytes
    assert ledger.alive() == 6
    (cos,) = {storage for storage, (_, nbytes) in ledger.reasons.items() if nbytes == size}
    assert cos in ledger.storages
    with CountOps() as backward:
        y.sum().backward(retain_graph=True)
    assert ledger.alive() == 6
    names = ["mm", "sin", "mm", "exp"]
    assert [(path, collections.Counter(ran)) for path, ran in ledger.recomputes] == [(("block",), collections.Counter(names))]
    assert backward.counts["sin"] == backward.counts["exp"] == 1
    y.sum().backward()
    assert len(ledger.recomputes) == 2
    del y, other
    assert ledger.alive() == 0
    assert ledger.kept_bytes(x, w, v, before=before) == 0


@REGIONS
@pytest.mark.parametrize("inner", [function_region, recorded_region])
@pytest.mark.parametrize("policy", [None, save_ops(aten.mm.default)])
def test_nested_regions(region, inner, policy):
    """With a policy inside. The region around drops what the policy of a function frame keeps there, and brings it back."""
    x, w, v = parameters()
    inside = inner(lambda h: (h @ v).cosh().tanh(), "inner", policy)

    def block(h):
        return inside((h @ w).sin()).cos()

    run = region(block, "outer")
    other, before = warmed_up(run, x.sin())
    ledger = Ledger()
    with ledger:
        y, nbytes = allocated(lambda: run(x.sin()))
    kinds = ["function" if each is function_region else "recorded" for each in (region, inner)]
    assert ledger.tree() == [(kinds[0], "outer", [(kinds[1], "inner", [])])]
    outer, within = ledger.regions
    assert [region.path for region in ledger.regions.values()] == [("outer",), ("outer", "inner")]
    assert ledger.operators[outer] == ["mm", "sin", "cos"]
    assert ledger.operators[within] == ["mm", "cosh", "tanh"]
    assert ledger.kept_bytes(x, w, v, before=before) + y.nbytes == nbytes
    with CountOps() as backward:
        y.sum().backward()
    # Backward itself runs products too, and the formulas of gradients.
    ran = ledger.operators_again
    assert {name: ran[name] for name in ("cosh", "tanh")} == {name: backward.counts[name] for name in ("cosh", "tanh")}
    assert backward.counts["mm"] == ran["mm"] + 2 * 2
    is_kept = policy is not None and inner is not function_region
    assert is_kept == any(fate is Reason.POLICY for fate in ledger.fates("inner"))
    del y, other
    assert ledger.alive() == 0
    assert ledger.kept_bytes(x, w, v, before=before) == 0
    expected = [leaf.grad for leaf in (x, w, v)]
    for each in (x, w, v):
        each.grad = None
    block(x.sin()).sum().backward()
    assert all(same(one.grad, other) for one, other in zip((x, w, v), expected, strict=True))


@REGIONS
def test_policies_and_random_draws(region):
    """A product is kept; a mask is drawn, for which a state of the generator is held."""
    x, w, v = parameters()

    def block(h):
        return ((torch.nn.functional.dropout(h @ w, 0.5).sin()) @ v).exp()

    run = region(block, "block", save_ops(aten.mm.default))
    before = run(x.sin())  # holds its random state, or that would be freed below
    before.sum().backward(retain_graph=True)
    torch.manual_seed(1)
    ledger = Ledger()
    with ledger:
        y, nbytes = allocated(lambda: run(x.sin()))
    size = 32 * 32 * 8
    reasons = ledger.by_reason()
    assert reasons.pop("random state") == torch.get_rng_state().nbytes
    assert reasons.pop("policy") == 2 * size
    assert list(reasons.values()) == [size]  # h
    assert nbytes == 3 * size + y.nbytes + torch.get_rng_state().nbytes
    y.sum().backward()
    ((_, ran),) = ledger.recomputes
    assert "mm" not in ran
    assert "bernoulli_" in ran
    del y, before
    assert ledger.alive() == 0
    assert set(ledger.by_reason()) <= {"random state"}  # which is the latest one of the process


@REGIONS
def test_state_of_modules(region):
    """Arguments and buffers are told with their reasons. A recorded region has no state but what it reads."""
    norm = torch.nn.BatchNorm1d(32, dtype=torch.float64)
    x = leaf(32, 32)
    run = region(norm, "norm")
    for _ in range(3):
        _, before = warmed_up(run, x.sin())
    ledger = Ledger()
    with ledger:
        y, nbytes = allocated(lambda: run(x.sin()))
    inputs = [x, *norm.parameters(), *norm.buffers()]
    assert ledger.kept_bytes(*inputs, before=before) + y.nbytes == nbytes
    if region is function_region:
        assert ledger.by_reason()["state"] > 0
    y.sum().backward()
    del y
    assert ledger.alive() == 0


@REGIONS
def test_offloading(region, transfers):
    """Bytes to the host and back, and the fate of what is there."""
    x, w, v = parameters()

    def block(h):
        return ((h @ w).sin() @ v).exp()

    run = region(block, "block", offload_ops(aten.mm.default))
    _, before = warmed_up(run, x.sin())
    others = transfers.in_flight()
    ledger = Ledger()
    with ledger:
        y, nbytes = allocated(lambda: run(x.sin()))
    size = 32 * 32 * 8
    # The last few that were sent are on the device as well.
    on_device = (transfers.in_flight() - others) * size
    assert ledger.kept_bytes(x, w, v, before=before) + on_device + y.nbytes == nbytes
    assert ledger.moved_bytes == {True: 2 * size}
    assert ledger.on_host == 2 * size
    # The second product is read by nobody that saves it: exp saves its result.
    assert ledger.fates("block")[Reason.OFFLOADED] == (1, size)
    y.sum().backward()
    assert ledger.moved_bytes[False] == 2 * size
    del y
    assert ledger.alive() == 0


def test_an_output_that_is_overwritten_is_not_kept_by_the_policy():
    """Its fate is told again when the region ends."""
    x, w, _ = parameters()

    def block(h):
        product = h @ w
        kept = product.sin()
        product.mul_(w)
        return kept.exp()

    ledger = Ledger()
    with ledger:
        function_region(block, "block", save_ops(aten.mm.default))(x)
    assert Reason.POLICY not in ledger.fates("block")
    ledger = Ledger()
    with ledger:
        y = recorded_region(block, "block")(x)
    assert ledger.fates("block")[Reason.LOST][0] == 1
    del y


def test_a_name_changes_the_fate_of_what_was_saved():
    x = leaf(4)
    ledger = Ledger()
    with ledger, checkpoint_region(policy=save_only_these_names("h")):
        h = x.sin()
        y = h.cos()
        checkpoint_name(h, "h")
    assert ledger.fates("region")[Reason.NAME] == (1, 32)
    del y


@REGIONS
def test_failures(region):
    def fails(h):
        h.sin()
        raise KeyError

    x, ledger = leaf(4), Ledger()
    with ledger, pytest.raises(KeyError):
        region(fails, "block")(x)
    assert ledger.failed == [(("block",), KeyError)]
    assert ledger.open == []
    gc.collect()  # the traceback
    assert ledger.alive() == 0


def test_a_context_that_fails_as_its_region_begins():
    class Fails(contextlib.nullcontext):
        def __enter__(self):
            raise KeyError

    ledger = Ledger()
    with ledger, pytest.raises(KeyError):
        checkpoint(name="block", context_fn=lambda: (Fails(), contextlib.nullcontext()))(torch.sin)(leaf(4))
    assert ledger.failed == [(("block",), KeyError)]
    assert ledger.open == []


@REGIONS
def test_where_regions_are(region):
    """The user's line, and the module by its name in the one that was called."""

    class Block(torch.nn.Module):
        def __init__(self, run):
            super().__init__()
            self.run = run
            self.inner = torch.nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, h):
            return self.run(self.inner if region is function_region else lambda h: self.inner(h), "block")(h)

    model = torch.nn.Sequential(Block(region), torch.nn.ReLU(), Block(region))
    ledger = Ledger()
    with ledger:
        y = model(leaf(2, 4))
    suffix = ".inner" if region is function_region else ""
    assert [entered.module for entered in ledger.regions.values()] == [f"0{suffix}", f"2{suffix}"]
    assert {entered.site.partition(":")[0] for entered in ledger.regions.values()} == {"test_events.py"}
    assert {site.partition(":")[0] for sites in ledger.sites.values() for site in sites} == {"test_events.py"}
    y.sum().backward()
    del y


def test_observers_that_do_not_ask_hear_of_no_operators():
    """And run under no dispatch mode."""
    x, log = leaf(4), []

    class Quiet(Watch):
        def ran(self, region, operator):
            log.append(operator)

    class Asks(Ledger):
        pass

    quiet, asks = Quiet(), Asks()
    with quiet:
        checkpoint(lambda x: log.append(torch._C._len_torch_dispatch_stack()) or x.sin(), x)
        assert log == [0]
        log.clear()
        with asks:
            checkpoint(torch.sin, x)
        checkpoint(torch.sin, x)
    assert len(log) == 1  # a mode was there for the other one
    assert list(asks.operators.values()) == [["sin"]]


@REGIONS
@pytest.mark.parametrize("inner", [function_region, recorded_region])
def test_an_observer_inside_a_region_hears_of_the_regions_in_its_block_alone(region, inner):
    x, within = leaf(4), Ledger()

    def block(h):
        with within:
            h = inner(lambda h: h.sin().exp(), "inner")(h)
        return h.cos()

    y = region(block, "outer")(x)
    assert within.tree() == [("function" if inner is function_region else "recorded", "inner", [])]
    assert list(within.operators.values()) == [["sin", "exp"]]
    y.sum().backward()
    del y
    assert within.alive() == 0


@REGIONS
def test_observing_changes_nothing(region):
    """Gradients, and what is drawn."""
    x, w, v = parameters()

    def block(h):
        return (torch.nn.functional.dropout(h @ w, 0.5).sin() @ v).exp()

    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        with Ledger() if watched else Watch():
            y = region(block, "block", save_ops(aten.mm.default))(x.sin())
        y.sum().backward()
        found.append([y.detach(), torch.rand(3), *(each.grad for each in (x, w, v))])
        for each in (x, w, v):
            each.grad = None
    assert all(same(one, other) for one, other in zip(*found, strict=True))
