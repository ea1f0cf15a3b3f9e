"""What each process of a group does for a test: trains in several ways, and compares."""

import contextlib
import copy
import dataclasses
import hashlib
import os
import warnings
import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import millstream as ms
from millstream._torch.distributed.collectives import EXCHANGE, exchange_of
from millstream._torch.distributed.group_copies import new_communicator
from millstream.capture import Step
from millstream.data_parallel import exchange
from millstream.data_parallel.roll_call import OverNetwork
from millstream.engine.parallel import agreed, lockstep
from tests.capture.worlds import interpret
from tests.clocks import HANG_S

DEVICE = torch.device("cpu")
"""Of this process."""


class Net(nn.Module):
    """Its bias before the normalisation is left out: its true gradient is zero."""

    def __init__(self, hidden=8, tied=False, unused=False):
        super().__init__()
        self.first = nn.Linear(4, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, hidden)
        if tied:
            self.third.weight = self.second.weight
        self.spare = nn.Linear(3, 3) if unused else None
        self.last = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def plain(ddp, optimizer):
    def step(x, y):
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clipping(ddp, optimizer):
    def step(x, y):
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def accumulating(ddp, optimizer):
    def step(x, y):
        with ddp.no_sync():
            F.mse_loss(ddp(x[:3]), y[:3]).backward()
        loss = F.mse_loss(ddp(x[3:]), y[3:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def scaled(ddp, optimizer):
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)

    def step(x, y):
        loss = F.mse_loss(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


KINDS = {
    "sgd": (plain, sgd, {}, {}),
    "clipping": (clipping, adamw, {}, {}),
    "accumulation": (accumulating, sgd, {}, {}),
    "tied": (plain, sgd, {"tied": True}, {"gradient_as_bucket_view": True, "broadcast_buffers": False}),
    "unused": (plain, adamw, {"unused": True}, {"static_graph": True}),
    "scaler": (scaled, sgd, {}, {}),
    "small buckets": (plain, sgd, {}, {"bucket_cap_mb": 1e-4}),
    "finds unused": (plain, adamw, {}, {"find_unused_parameters": True}),
}


COMPILED = ("sgd", "unused")
"""Others are interpreted: what is special of them is in the traced graph."""


def interpreted(step, *, strict=True, **how):
    """A captured step whose graphs run operator by operator, which takes no time to compile."""
    return Step(step, build=interpret, strict=strict, **how)


def batches(rank, count, rows=lambda rank, number: 6):
    generator = torch.Generator().manual_seed(100 + rank)
    for number in range(count):
        size = rows(rank, number)
        pair = torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
        yield tuple(each.to(DEVICE) for each in pair)


def make(make_step, make_optimizer, of_net, of_ddp, hook=None):
    torch.manual_seed(0)
    net = Net(**of_net).to(DEVICE)
    ddp = DistributedDataParallel(net, **of_ddp)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return net, make_step(ddp, make_optimizer(ddp.parameters()))


def train(step, data):
    return [tree_map(lambda each: each.detach().clone(), step(*batch)) for batch in data]


def assert_alike(ours, theirs, rtol=1e-4, atol=1e-5):
    """Parameters and buffers within a tolerance."""
    for (name, left), right in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda told, name=name: f"{name}: {told}")


def digest(net):
    content = b"".join(each.detach().cpu().contiguous().numpy().tobytes() for each in net.parameters())
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def fallbacks():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ms.FallbackWarning)
        told = []
        yield told
    told += [str(each.message) for each in caught if issubclass(each.category, ms.FallbackWarning)]


# --- the checks -------------------------------------------------------------------------------------------------------


def same_as_ddp(rank, kind, num_steps):
    """Our step and DDP's, eager: results, parameters and buffers."""
    theirs, their_step = make(*KINDS[kind])
    ours, our_step = make(*KINDS[kind])
    captured = ms.step(our_step, strict=True) if kind in COMPILED else interpreted(our_step)
    expected = train(their_step, batches(rank, num_steps))
    results = train(captured, batches(rank, num_steps))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    unused = [name for name, each in theirs.named_parameters() if each.grad is None]
    assert unused == [name for name, each in ours.named_parameters() if each.grad is None]
    assert len(captured.graphs) == 1
    return digest(ours)


def remembering():
    """A step that keeps weights and averages from before it: some is read when gradients are there, some before."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2).to(DEVICE))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    before = [torch.zeros_like(each) for each in ddp.parameters()]
    mean, mean_before = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)

    def step(x, y):
        hidden = ddp(x)
        F.mse_loss(hidden, y).backward()
        with torch.no_grad():
            for each, old in zip(ddp.parameters(), before, strict=True):
                each.grad.add_(each - old, alpha=0.01)  # a proximal term
                old.copy_(each)
            ddp.module.bias.grad.add_(mean_before)
            mean_before.copy_(mean)
            mean.lerp_(hidden.mean(0), 0.5)  # known before there are gradients
        optimizer.step()
        optimizer.zero_grad()
        return [mean, mean_before, *before, *ddp.parameters()]

    return step


def copies_of_state(rank, num_steps):
    """State that is copied to state, cut at collectives, and what eager mode makes of it."""
    results = train(ms.step(remembering(), strict=True), batches(rank, num_steps))
    torch.testing.assert_close(results, train(remembering(), batches(rank, num_steps)))


def ranks_after(rank, num_steps, without=None):
    """Digest of the parameters after many steps; ``without``: the all-reduce of that bucket is taken out."""
    net, step = make(plain, adamw, {}, {"bucket_cap_mb": 1e-4})
    captured = ms.step(step, strict=True)
    train(captured, batches(rank, 2))
    (graph,) = captured.graphs
    if without is not None:
        runner = graph.executable._runner
        reduced = [each for each in runner.segmented.exchanges if each.label.startswith("bucket")]
        assert len(reduced) > 2
        reduced[without]._issue = lambda memory, **_: None
    train(captured, batches(rank, num_steps))
    return digest(net)


def runs_counted(step):
    """What is called in each call of a captured step, in the order of its calls."""
    seen = []
    for graph in step.graphs:
        runner = graph.executable._runner
        original = runner.segmented.__class__.__call__

        class Counted(runner.segmented.__class__):
            def __call__(self, inputs, original=original, **how):
                seen.append("segments")
                return original(self, inputs, **how)

        runner.segmented.__class__ = Counted
    return seen


def one_program(rank, num_steps):
    """Both ways to run a step, from the same state: bit for bit the same; how often each was taken."""
    nets = []
    for may_agree in (True, False):
        net, step = make(clipping, adamw, {}, {"bucket_cap_mb": 1e-4})
        captured = ms.step(step, strict=True)
        train(captured, batches(rank, 2))
        runner = captured.graphs[0].executable._runner
        if not may_agree:
            runner.notes.append("left out by the test")
        seen = runs_counted(captured)
        train(captured, batches(rank, num_steps))
        nets.append((digest(net), len(seen), runner.whole is not None))
    return nets


@contextlib.contextmanager
def groups_counted():
    """How often a sum was issued, by the number of its process group among those there are."""
    original, counts = c10d.all_reduce, {}

    def all_reduce(*args, group=None, **how):
        number = c10d._world.pg_names[group or dist.group.WORLD]
        counts[number] = counts.get(number, 0) + 1
        return original(*args, group=group, **how)

    with mock.patch.object(c10d, "all_reduce", all_reduce):
        yield counts


def on_own_communicator(rank, num_before=4):
    """A step of a group of its own, on the group's communicator and on one of ours: parameters, and who was used."""
    found = []
    for wanted in ("group", "4"):
        before = len(c10d._world.pg_map)
        group = dist.new_group()
        with mock.patch.dict(os.environ, MILLSTREAM_COMMUNICATOR=wanted), groups_counted() as counts:
            net, step = make(plain, sgd, {}, {"process_group": group})
            captured = ms.step(step, strict=True)
            train(captured, batches(rank, num_before))
            runner = captured.graphs[0].executable._runner
            assert runner.whole is not None
            told = runner.whole.notes[-1].partition("; ")[2]
            counts.clear()
            train(captured, batches(rank, 1))
            if rank == 1:
                runner.release()  # so that both run in segments
            train(captured, batches(rank, 1))
            found.append((digest(net), [*counts.values()], told))
        assert len(c10d._world.pg_map) == before + 1 + (wanted == "4")
        dist.destroy_process_group(group)
        assert len(c10d._world.pg_map) == before
    return found


def group_of_some(rank):
    """Why a group of some processes has no communicator of ours."""
    group = dist.new_group([rank], use_local_synchronization=True)
    try:
        new_communicator(group, DEVICE, None)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group(group)


def memory_held(rank):
    """Bytes that a step of a process holds between calls: alone; among others as one program, and in segments."""

    def wide(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 2))
        model = wrap(net)
        return net, plain(model, sgd(model.parameters()))

    def arena_bytes(executables):
        return sum(each.arena.num_bytes for each in executables if hasattr(each, "arena"))

    generator = torch.Generator().manual_seed(rank)
    data = [(torch.randn(512, 96, generator=generator), torch.randn(512, 2, generator=generator)) for _ in range(4)]
    short = [(x[:500], y[:500]) if rank else (x, y) for x, y in data[:1]]
    alone = ms.step(wide(lambda net: net)[1], strict=True, engine="serial", options={"alternatives": False})
    train(alone, data)
    net, step = wide(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.03))
    captured = ms.step(step, strict=True, engine="serial", dynamic=False)
    found = {"alone": arena_bytes([alone.graphs[0].executable._runner])}
    train(captured, data[:2])
    runner = captured.graphs[0].executable._runner
    for rounds in (data, short + data):
        train(captured, rounds)
        assert runner.whole is not None
        found["one program"] = runner.whole._engine.arena.num_bytes
        found["segments"] = arena_bytes(each for each in runner.segmented.executables if each is not None)
        found["collectives"] = sum(each.held.held_bytes for each in runner.segmented.exchanges)
    found["bucket"] = max(each.num_bytes for each in runner.segmented.exchanges)
    found["state"] = 2 * sum(each.nbytes for each in net.parameters())
    return found, digest(net)


def ends_before_a_replay(rank):
    """On GPUs: one process ends when all have agreed to replay; the other's watchdog ends it."""
    captured = ms.step(make(plain, sgd, {}, {})[1], strict=True)
    train(captured, batches(rank, 8))
    runner = captured.graphs[0].executable._runner
    assert runner.whole is not None
    if rank == 1:
        runner.whole = lambda inputs: os._exit(3)
    train(captured, batches(rank, 1))
    torch.cuda.synchronize()


def in_any_schedule(rank):
    """The merged program on several streams; with a wait left out; what each collective waits for."""
    from millstream.check import find_races
    from millstream.cost import Roofline
    from millstream.graph import KernelKind, Launch, Wait
    from millstream.schedule import plan_graph

    _, step = make(plain, adamw, {}, {"bucket_cap_mb": 1e-4})
    captured = ms.step(step, strict=True)
    train(captured, batches(rank, 5))
    graph = captured.graphs[0].executable._runner.whole.lowered.program.graph
    plan = plan_graph(graph, Roofline().estimate(graph), 3, "list")
    races, unnoticed = find_races(plan), 0
    for position, wait in enumerate(plan.steps):
        if isinstance(wait, Wait):
            steps = plan.steps[:position] + plan.steps[position + 1 :]
            unnoticed += not find_races(dataclasses.replace(plan, steps=steps))
    launched = [each.kernel for each in plan.steps if isinstance(each, Launch)]
    collectives = [kernel.id for kernel in graph.kernels if kernel.kind is KernelKind.COLLECTIVE]
    order = [kernel for kernel in launched if kernel in collectives]
    first = launched.index(collectives[1])  # of the gradients; buffers come before
    return len(races), unnoticed, order == collectives, len(collectives), len(launched) - first


def other_sizes_at_times(rank, num_steps):
    """One process has a smaller batch in some steps: then all run in segments."""

    def rows(rank, number):
        return 5 if rank == 1 and number in (8, 9, 12) else 6

    theirs, their_step = make(*KINDS["sgd"])
    ours, our_step = make(*KINDS["sgd"])
    captured = ms.step(our_step, strict=True)
    expected = train(their_step, batches(rank, num_steps, rows))
    data = list(batches(rank, num_steps, rows))
    results = train(captured, data[:6])
    seen = runs_counted(captured)
    results += train(captured, data[6:])
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return len(seen)


def released_on_one(rank, num_steps):
    """One process gives its memory back; in the end both run as one program again."""
    net, step = make(*KINDS["sgd"])
    captured = ms.step(step, strict=True)
    train(captured, batches(rank, 6))
    runner = captured.graphs[0].executable._runner
    before = runner._number
    if rank == 1:
        runner.release()
    train(captured, batches(rank, num_steps))
    return digest(net), runner.whole is not None, runner._number - before


def cannot_be_one(rank, num_steps):
    """One process fails where all capture; all go on in segments, and say why."""
    _, step = make(*KINDS["sgd"])
    captured = ms.step(step, strict=True)
    train(captured, batches(rank, 2))
    runner = captured.graphs[0].executable._runner

    def fails(agreement, inputs):
        try:
            lockstep.together(agreement, lambda: _raise(rank == 1))
        except lockstep.NotTogetherError as error:
            runner.notes.append(str(error))

    runner._try_together = fails
    train(captured, batches(rank, num_steps))
    return runner.notes


def _raise(is_wanted):
    if is_wanted:
        raise torch.OutOfMemoryError("no memory")


def mean_of_two_devices(rank):
    """Whether gradients are, bit by bit, the mean of those of two runs on one device each."""
    torch.manual_seed(0)
    net = Net()
    alone, ddp = copy.deepcopy(net), DistributedDataParallel(net)

    def gradients_of(model):
        def step(x, y):
            model.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return ms.step(step, strict=True)

    ours, single = gradients_of(ddp), gradients_of(alone)
    for number, (x, y) in enumerate(batches(rank, 5)):
        ours(x, y)
        single(x, y)
        if not ours.graphs:  # the first call, by eager kernels
            assert number == 0
            continue
        for reduced, own in zip(net.parameters(), alone.parameters(), strict=True):
            parts = [torch.empty_like(own.grad) for _ in range(2)]
            dist.all_gather(parts, own.grad)
            assert torch.equal(reduced.grad, parts[0] / 2 + parts[1] / 2)
    assert ours.graphs
    assert single.graphs


def other_lengths(rank, num_steps):
    """Each process has batches of its own sizes, and captures when it likes."""

    def rows(rank, number):
        return (5, 6, 7)[(number // 2 + rank) % 3] + rank

    theirs, their_step = make(*KINDS["sgd"])
    ours, our_step = make(*KINDS["sgd"])
    captured = ms.step(our_step, strict=True, dynamic=True)
    expected = train(their_step, batches(rank, num_steps, rows))
    torch.testing.assert_close(train(captured, batches(rank, num_steps, rows)), expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return len(captured.graphs)


class Reader(nn.Module):
    """A transformer over tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.last(self.layers(self.embed(tokens)))


def ragged_lengths(rank, num_steps, num_compared):
    """Sequences of other lengths in each process and step: graphs early on and in the end, and how often they ran."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(5, 29, (num_steps,), generator=generator).tolist()
    data = [torch.randint(11, (2, length + 1), generator=generator).to(DEVICE) for length in lengths]

    def run(wrap, tokens):
        torch.manual_seed(0)
        model = Reader().to(DEVICE)
        ddp = DistributedDataParallel(model)
        optimizer = sgd(ddp.parameters())  # the true gradient of some biases is zero

        def step(x):
            loss = F.cross_entropy(ddp(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = wrap(step)
        return model, train(step, [(x,) for x in tokens]), step

    theirs, expected, _ = run(lambda step: step, data[:num_compared])
    ours, results, step = run(lambda step: ms.step(step, strict=True, dynamic=True), data[:num_compared])
    torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-4)
    assert_alike(ours, theirs, rtol=1e-3, atol=1e-4)
    before = len(step.graphs)
    train(step, [(x,) for x in data[num_compared:]])
    return digest(ours), before, len(step.graphs), sum(graph.num_runs for graph in step.graphs)


def fallback_on_one(rank, num_steps):
    """One process cannot capture."""

    def branching(ddp, optimizer):
        step = plain(ddp, optimizer)

        def on_one(x, y):
            if rank == 1 and bool((x.sum() > 1e9).item()):
                return x
            return step(x, y)

        return on_one

    theirs, their_step = make(branching, sgd, {}, {"bucket_cap_mb": 1e-4})
    ours, our_step = make(branching, sgd, {}, {"bucket_cap_mb": 1e-4})
    captured = ms.step(our_step)
    expected = train(their_step, batches(rank, num_steps))
    with fallbacks() as told:
        torch.testing.assert_close(train(captured, batches(rank, num_steps)), expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return bool(captured.graphs), len(told)


def other_settings(rank):
    """The error that tells that processes differ."""
    net, step = make(plain, sgd, {}, {"bucket_cap_mb": 25 + rank})
    before = copy.deepcopy(net.state_dict())
    try:
        train(ms.step(step), batches(rank, 1))
    except ms.errors.DataParallelError as error:
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name])
        return str(error)
    return ""


def other_hyperparameters(rank):
    """What is told where optimizers differ; nothing has been trained."""

    def ends_with_another(parameters):
        *most, last = parameters
        return torch.optim.SGD([{"params": most}, {"params": [last], "momentum": 0.5 + 0.25 * rank}], 0.1)

    def reversed_on_one(parameters):
        return sgd([*parameters][:: 1 - 2 * rank])

    makers = [
        lambda parameters: torch.optim.SGD(parameters, 0.1 + rank / 2),
        lambda parameters: (sgd if rank else adamw)(parameters),
        ends_with_another,
        reversed_on_one,
    ]
    told = []
    for number, make_optimizer in enumerate(makers):
        net = Net()
        before = copy.deepcopy(net.state_dict())
        wraps = number != 1
        model = DistributedDataParallel(net) if wraps else net
        step = ms.step(plain(model, make_optimizer(net.parameters())), data_parallel=not wraps)
        try:
            train(step, batches(rank, 1))
        except ms.errors.DataParallelError as error:
            told.append(str(error))
        assert not wraps or all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    return told


def told_within(captured, rank, num_steps):
    """What is told in one of so many steps, and in which."""
    for number, batch in enumerate(batches(rank, num_steps)):
        try:
            captured(*batch)
        except ms.errors.DataParallelError as error:
            return str(error), number
    return "", num_steps


def rate_changes_on_one(rank, num_steps=1):
    """What is told where one process sets another learning rate later; then both go on."""
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    ddp = DistributedDataParallel(net)
    optimizer = sgd(ddp.parameters())
    captured = ms.step(plain(ddp, optimizer), strict=True)
    train(captured, batches(rank, 6))
    before = digest(net)
    optimizer.param_groups[0]["lr"] = 0.05 + 0.01 * rank
    told = told_within(captured, rank, num_steps)
    assert told[1] > 0 or digest(net) == before
    optimizer.param_groups[0]["lr"] = 0.02
    train(captured, batches(rank, 6))
    return *told, digest(net), captured.graphs[0].executable._runner.whole is not None


def clips_otherwise_on_one(rank, num_steps):
    """What is told where one process clips gradients at another norm, and how soon."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net().to(DEVICE))
    optimizer = sgd(ddp.parameters())

    def step(x, y):
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5 if rank == 1 else 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return told_within(ms.step(step, strict=True), rank, num_steps)


def unused_without_notice(rank):
    """The error about parameters without gradients."""
    _, step = make(plain, sgd, {"unused": True}, {})
    try:
        train(ms.step(step), batches(rank, 1))
    except ms.errors.DataParallelError as error:
        return str(error)
    return ""


def sometimes_unused(rank, num_steps):
    """A parameter that one process uses, and none in other steps: left to Python, where nobody else is hindered."""

    class Sometimes(Net):
        def forward(self, x):
            result = super().forward(x)
            return result + self.spare(x[:, :3]).sum() if self.is_used else result

    def run(wrap):
        torch.manual_seed(0)
        net = Sometimes(unused=True)
        net.is_used = False
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        step = wrap(plain(ddp, adamw(ddp.parameters())))
        for number, batch in enumerate(batches(rank, num_steps)):
            net.is_used = number > 2 and number % 3 == rank
            step(*batch)
        return net

    theirs = run(lambda step: step)
    with fallbacks() as told:
        ours = run(ms.step)
    assert_alike(ours, theirs)
    return told[0]


def two_models(rank, num_steps):
    """A step in which one model's gradients are reduced after each of two backward passes, and another's after one."""

    def run(wrap):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Linear(4, 1)]
        maker, judge = map(DistributedDataParallel, nets)
        first, second = sgd(maker.parameters()), sgd(judge.parameters())

        def step(x, _):
            made = maker(x)
            loss = judge(x).mean() - judge(made.detach()).mean()
            loss.backward()
            second.step()
            second.zero_grad()
            score = judge(made).pow(2).mean()
            score.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            return loss, score

        step = wrap(step)
        return nn.ModuleList(nets), train(step, batches(rank, num_steps)), step

    theirs, expected, _ = run(lambda step: step)
    ours, results, step = run(interpreted)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return len(step.graphs)


def no_sync_outside(rank, num_steps):
    """``no_sync`` around whole calls of the step."""

    def run(wrap):
        torch.manual_seed(0)
        net = Net()
        ddp = DistributedDataParallel(net)
        optimizer = sgd(ddp.parameters())

        def accumulate(x, y):
            loss = F.mse_loss(ddp(x), y)
            loss.backward()
            return loss

        def finish(x, y):
            loss = F.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        accumulate, finish = wrap(accumulate), wrap(finish)
        results = []
        for number, batch in enumerate(batches(rank, num_steps)):
            if number % 3 < 2:
                with ddp.no_sync():
                    results.append(accumulate(*batch).detach().clone())
            else:
                results.append(finish(*batch).detach().clone())
        return net, results, (accumulate, finish)

    theirs, expected, _ = run(lambda step: step)
    ours, results, steps = run(interpreted)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return [len(step.graphs) for step in steps]


def reduced_in_some_calls(rank, num_steps):
    """One step that reduces in every third call, as an argument says: a trace is the first to reduce."""

    def run(wrap):
        torch.manual_seed(0)
        net = Net()
        ddp = DistributedDataParallel(net)
        optimizer = adamw(ddp.parameters())

        def step(x, y, is_last):
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = F.mse_loss(ddp(x), y)
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        step = wrap(step)
        return net, train(step, ((*batch, i % 3 == 2) for i, batch in enumerate(batches(rank, num_steps))))

    theirs, expected = run(lambda step: step)
    ours, results = run(interpreted)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return digest(ours)


def wrapper_between(rank, num_steps, compresses):
    """The wrapper itself, by DDP's own ways, between steps: evaluation, a forward pass alone, and training.

    Its reducer, with its buckets, is there only where it is used.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    hook = fp16_compress_hook if compresses else None

    def run(wrap):
        net, plain_step = make(plain, sgd, {}, {}, hook)
        ddp = plain_step.__closure__[0].cell_contents
        step, seen, reducer = wrap(plain_step), [], weakref.ref(ddp.reducer)
        for number, batch in enumerate(batches(rank, num_steps)):
            step(*batch)
            if step is not plain_step and number == 2:
                assert reducer() is None
            if number > 3:
                plain_step(*batch)
            if number % 3 == 1:
                ddp.eval()
                with torch.no_grad():
                    seen.append(ddp(batch[0]))
                ddp.train()
                ddp(batch[0])
        return net, seen

    theirs, expected = run(lambda step: step)
    ours, seen = run(interpreted)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)


def compressed(rank, num_steps, dtype="float16"):
    """Gradients travel in half precision."""
    hook = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}[dtype]
    with mock.patch.object(DistributedDataParallel, "_check_comm_hook"):  # which wants NCCL for bfloat16
        theirs, their_step = make(plain, sgd, {}, {}, hook)
        ours, our_step = make(plain, sgd, {}, {}, hook)
    captured = ms.step(our_step, strict=True) if dtype == "float16" else interpreted(our_step)
    train(their_step, batches(rank, num_steps))
    train(captured, batches(rank, num_steps))
    precision = torch.finfo(getattr(torch, dtype)).eps
    assert_alike(ours, theirs, rtol=20 * precision, atol=2 * precision)
    nodes = captured.graphs[0].gm.graph.find_nodes(op="call_function", target=EXCHANGE)
    assert getattr(torch, dtype) in {exchange_of(node.args[1]).memory.dtype for node in nodes}


def own_hook(rank, num_steps):
    """A communication hook of the user's: DDP's own reducer runs it, in all processes."""

    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer().mul_(0.25), async_op=True).get_future()
        return future.then(lambda each: each.value()[0])

    theirs, their_step = make(plain, sgd, {}, {}, hook)
    ours, our_step = make(plain, sgd, {}, {}, hook)
    train(their_step, batches(rank, num_steps))
    with fallbacks() as told:
        train(ms.step(our_step), batches(rank, num_steps))
    assert_alike(ours, theirs)
    return told


def joined(rank, num_steps):
    """A step within Join, which lets a process take fewer steps than the other: what is told, and parameters."""

    def run(capture):
        torch.manual_seed(0)
        net = Net()
        ddp = DistributedDataParallel(net)
        step = capture(plain(ddp, sgd(ddp.parameters())))
        train(step, batches(rank, 3))
        with Join([ddp]), fallbacks() as told:
            train(step, batches(rank, num_steps - 2 * rank))
        return net, told

    theirs, _ = run(lambda step: step)
    ours, told = run(lambda step: interpreted(step, strict=False))
    assert_alike(ours, theirs)
    return digest(ours), told


def overlapped(rank, num_steps):
    """Gradients are sent off after several segments, as on a GPU."""
    theirs, their_step = make(*KINDS["small buckets"])
    ours, our_step = make(*KINDS["small buckets"])
    captured = ms.step(our_step, strict=True)
    expected = train(their_step, batches(rank, num_steps))
    os.environ["MILLSTREAM_CUTS"] = "4"
    try:
        results = train(captured, batches(rank, num_steps))
    finally:
        del os.environ["MILLSTREAM_CUTS"]
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return sum(bool(each.starts) for each in captured.graphs[0].executable._runner.segmented.segments.segments)


def without_wrapper(rank, num_steps):
    """``data_parallel=True`` and DDP: the model begins otherwise in each process."""

    def run(wraps, capture):
        torch.manual_seed(rank)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        net.spare = nn.Parameter(torch.ones(3))
        model = DistributedDataParallel(net, static_graph=True) if wraps else net
        optimizer = adamw(net.parameters())

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = capture(step)
        return net, train(step, batches(rank, num_steps)), step

    theirs, expected, _ = run(True, lambda step: step)
    ours, results, step = run(False, lambda step: interpreted(step, data_parallel=True))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    assert ours.spare.grad is None
    assert len(step.graphs) == 1
    return digest(ours)


def synchronized_norms(rank, num_steps):
    """SyncBatchNorm in both processes, against one that has the batches of both."""

    def run(convert, capture, data):
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5, bias=False)),
            nn.BatchNorm1d(5, momentum=None),
        )
        net = convert(net)
        optimizer = adamw(net.parameters())

        def step(x, y):
            loss = net(x).mul(y[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = capture(step)
        return net, train(step, data), step

    data = [[*batches(each, num_steps)] for each in range(2)]
    both = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(*data, strict=True)]
    theirs, expected, _ = run(lambda net: net, lambda step: step, both)
    ours, results, step = run(
        nn.SyncBatchNorm.convert_sync_batchnorm, lambda step: ms.step(step, strict=True, data_parallel=True), data[rank]
    )
    for mine, loss in zip(results, expected, strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine / 2, loss, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    assert len(step.graphs) == 1
    return digest(ours), step.graphs[0].executable._runner.whole is not None


def other_model(rank):
    """``data_parallel=True`` where the processes have other models; what each is told."""
    net = nn.Linear(4, 2 + rank)
    before = copy.deepcopy(net.state_dict())

    def step(x):
        net(x).sum().backward()

    try:
        ms.step(step, data_parallel=True)(torch.ones(3, 4))
    except ms.errors.DataParallelError as error:
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        return str(error)
    return ""


def accumulating_without_wrapper(rank):
    """Two backward passes, each reduced: the mean of the sum."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    alone = copy.deepcopy(net)

    def step(x, y):
        F.mse_loss(net(x[:3]), y[:3]).backward()
        F.mse_loss(net(x[3:]), y[3:]).backward()

    captured = interpreted(step, data_parallel=True)
    for x, y in batches(rank, 4):
        net.zero_grad()
        alone.zero_grad()
        captured(x, y)
        (F.mse_loss(alone(x[:3]), y[:3]) + F.mse_loss(alone(x[3:]), y[3:])).backward()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            mean = theirs.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(ours.grad, mean / 2)
    assert captured.graphs


def own_collectives(rank, num_steps):
    """``all_reduce`` and ``broadcast`` in the step, of its own tensors; ``all_gather`` is left to Python."""

    def run(capture, gathers):
        net, train_on = make(plain, sgd, {}, {})

        def step(x, y):
            loss = train_on(x, y).detach().clone()
            dist.all_reduce(loss)
            first = x.sum(0)
            dist.broadcast(first, src=1)
            greatest = y.amax()
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
            parts = [torch.empty_like(loss) for _ in range(2)]
            if gathers:
                dist.all_gather(parts, loss)
            return (loss / 2, first, greatest, *parts) if gathers else (loss / 2, first, greatest)

        step = capture(step)
        return net, train(step, batches(rank, num_steps)), step

    for gathers in (False, True):
        theirs, expected, _ = run(lambda step: step, gathers)
        with fallbacks() as told:
            ours, results, step = run(lambda step: ms.step(step, check=2), gathers)
        torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
        assert_alike(ours, theirs)
        assert bool(step.graphs) is not gathers, told
    return told[0]


def asynchronous_collective(rank):
    """A collective that is waited for later: left to Python."""
    _, train_on = make(plain, sgd, {}, {})

    def step(x, y):
        loss = train_on(x, y).detach().clone()
        dist.all_reduce(loss, async_op=True).wait()
        return loss

    with fallbacks() as told:
        captured = ms.step(step)
        results = train(captured, batches(rank, 3))
    return results[-1].item(), told


def eager_region_between(rank, num_steps):
    """A step in parts, with a region that reads values."""

    def run(capture):
        torch.manual_seed(0)
        net = Net()
        ddp = DistributedDataParallel(net)
        optimizer = sgd(ddp.parameters())
        norms = []

        def step(x, y):
            loss = F.mse_loss(ddp(x), y)
            loss.backward()
            with ms.eager_region():
                norms.append(float(net.last.weight.grad.norm()))
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = capture(step)
        return net, train(step, batches(rank, num_steps)), norms, step

    theirs, expected, their_norms, _ = run(lambda step: step)
    ours, results, norms, step = run(ms.step)
    torch.testing.assert_close((results, norms), (expected, their_norms), rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    assert step.graphs


_training = {}


def begin_training(rank):
    """Capture a step, for the next check."""
    _training["step"] = captured = interpreted(make(plain, sgd, {}, {})[1])
    train(captured, batches(rank, 3))


def until_another_dies(rank):
    """Train for ever; what ends it."""
    try:
        while True:
            train(_training["step"], batches(rank, 50))
    except ms.errors.DataParallelError as error:
        assert exchange.PROGRESS.last
        return str(error)


def explained(rank, num_steps):
    """What is told of a step's communication, predicted and measured; parameters after it goes on."""
    net, step = make(*KINDS["small buckets"])
    captured = ms.step(step, strict=True)
    train(captured, batches(rank, num_steps))
    before = digest(net)
    with mock.patch.object(agreed, "PATIENCE_S", 0.2):
        alone = ms.explain(captured, measure=True).communication[0].obstacle if rank == 0 else ""
    dist.barrier()
    with mock.patch.object(agreed, "PATIENCE_S", HANG_S):
        (report,) = ms.explain(captured, measure=True).communication
    assert digest(net) == before
    assert report.obstacle == ""
    assert "did not all ask for it" in alone or rank
    collectives = {
        kind: [(each.operation, each.num_bytes) for each in transfers] for kind, transfers in report.transfers.items()
    }
    measured, expected = collectives.values()
    assert measured == expected
    assert all(each.took_ns > 0 for each in report.transfers["measured"])
    train(captured, batches(rank, 2))
    return report.num_processes, report.is_one_graph, report.arrivals.num_steps, measured, digest(net)


def uneven_feed(rank, how, over_network):
    """Two passes over other numbers of batches in each process; how far each came, and what was said."""
    source = [torch.full((2,), 10.0 * rank + number) for number in range(3 + 2 * rank)]
    feed = ms.feed(source, "cpu", uneven=how)
    if over_network:
        group = dist.new_group()
        feed._roll_call = OverNetwork(group)
    passes, told = [], []
    for _ in range(2):
        seen, valid = [], []
        try:
            for batch in feed:
                seen.append(batch[0].item())
                valid.append(feed.num_valid)
                if how == "drop" and len(seen) == 2 and not passes:
                    break  # all leave at the same batch
        except ms.errors.FeedError as error:
            told.append(str(error))
        passes.append(seen)
    return passes, valid, told, feed.state_dict()["position"]


def feed_that_fails_on_one(rank):
    """A loader raises in one process; what the other is told."""

    def loader():
        yield torch.ones(2)
        if rank:
            raise ValueError("the file is gone")
        yield torch.ones(2)

    try:
        return len([*ms.feed(loader(), "cpu", uneven="drop")])
    except (ValueError, ms.errors.FeedError) as error:
        return f"{type(error).__name__}: {error}"
