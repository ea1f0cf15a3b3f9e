"""What each process does for a test of optimizers that are divided."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.capture import Step
from tests.capture.worlds import interpret
from tests.parallel import checks
from tests.parallel.checks import assert_alike, batches, digest, fallbacks, interpreted, train

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 1e-2, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2),
}


class Net(nn.Module):
    """Some parameters go whole to one process, and some are divided; one is not laid out as it is counted."""

    def __init__(self, hidden=64):
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.middle.weight = nn.Parameter(self.middle.weight.detach().t().contiguous().t())
        self.last = nn.Linear(hidden, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.spare = nn.Parameter(torch.ones(70))

    def forward(self, x):
        return self.scale * self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(kind, *, clips=None, with_schedule=False):
    torch.manual_seed(0)
    net = Net().to(checks.DEVICE)
    vectors = [each for each in net.parameters() if each.dim() < 2]
    matrices = [each for each in net.parameters() if each.dim() > 1]
    optimizer = OPTIMIZERS[kind]([{"params": matrices}, {"params": vectors, "lr": 2e-3}])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) if with_schedule else None

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3, clips) if clips is not None else loss
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss, norm

    return net, optimizer, step


def state_bytes(optimizer):
    states = optimizer.state.values()
    return sum(each.nbytes for state in states for each in state.values() if isinstance(each, torch.Tensor))


def as_unsharded(rank, kind, num_steps, clips=None):
    """A divided optimizer and one that is not: bits of the parameters, and bytes of state."""
    made = []
    for shards in (False, True):
        net, optimizer, step = make(kind, clips=clips, with_schedule=True)
        step = interpreted(step, data_parallel=True, shard_optimizer=shards)
        results = train(step, batches(rank, num_steps))
        assert len(step.graphs) == 1
        made.append((net, optimizer, results))
    (theirs, whole, expected), (ours, divided, results) = made
    is_exact = clips is None and dist.get_world_size() == 2  # sums of two numbers, in any order
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(results, expected, **tolerance)
    assert_alike(ours, theirs, **tolerance)
    return digest(ours), state_bytes(divided) / state_bytes(whole)


def one_program(rank, num_steps):
    """The step as one program, in segments, and with a whole optimizer, from the same state."""
    nets = []
    for shards, may_agree in ((True, True), (True, False), (False, False)):
        net, _, step = make("adamw")
        captured = ms.step(step, strict=True, data_parallel=True, shard_optimizer=shards)
        train(captured, batches(rank, 2))
        runner = captured.graphs[0].executable._runner
        if not may_agree:
            runner.notes.append("left out by the test")
        train(captured, batches(rank, num_steps))
        nets.append((net, runner.whole is not None))
    assert_alike(nets[0][0], nets[-1][0])
    return [(digest(net), is_whole) for net, is_whole in nets]


def fallback_on_one(rank, num_steps):
    """One process cannot capture; the other has batches of other sizes at times."""

    def run(wrap):
        net, _, step = make("adamw", clips=2.0)

        def on_one(x, y):
            if rank == 1 and bool((x.sum() > 1e9).item()):
                return x
            return step(x, y)

        step_of = wrap(on_one)
        results = train(step_of, batches(rank, num_steps, lambda rank, number: 6 - (rank == 0 and number % 3 == 2)))
        return net, results, step_of

    theirs, expected, _ = run(lambda step: Step(step, build=interpret, data_parallel=True))
    with fallbacks() as told:
        ours, results, captured = run(
            lambda step: Step(step, build=interpret, data_parallel=True, shard_optimizer=True)
        )
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return digest(ours), bool(captured.graphs), len(told)


def accumulating(rank, num_steps):
    """Several backward passes before the optimizer, in one call; an average of the parameters is kept in the step."""

    def run(shards):
        net, optimizer, _ = make("adamw")
        average = copy.deepcopy(net)

        def step(x, y):
            for start in (0, 2, 4):
                loss = F.mse_loss(net(x[start : start + 2]), y[start : start + 2]) / 3
                loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3, float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_([*average.parameters()], [*net.parameters()], 0.1)
            return loss, norm

        captured = interpreted(step, data_parallel=True, shard_optimizer=shards)
        results = train(captured, batches(rank, num_steps))
        assert len(captured.graphs) == 1
        return nn.ModuleList([net, average]), results

    theirs, expected = run(False)
    ours, results = run(True)
    torch.testing.assert_close(results, expected)
    assert_alike(ours, theirs)
    return digest(ours)


def saved_and_loaded(rank, folder):
    """State saved whole, and as shards, and loaded in new processes' places; what is said where it does not fit."""
    how = {"data_parallel": True, "shard_optimizer": True}
    net, optimizer, step = make("adamw")
    step = interpreted(step, **how)
    data = [*batches(rank, 12)]
    train(step, data[:4])
    weights, shard, whole = copy.deepcopy((net.state_dict(), optimizer.state_dict(), ms.full_state_dict(optimizer)))
    train(step, data[4:8])
    expected = copy.deepcopy(net)

    net.load_state_dict(weights)  # back in the same place
    optimizer.load_state_dict(copy.deepcopy(shard))
    train(step, data[4:8])
    assert digest(net) == digest(expected)
    for saved in (shard, whole):  # in a new one, before it is divided
        net, optimizer, step = make("adamw")
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        train(interpreted(step, **how), data[4:8])
        assert_alike(net, expected)  # the first call is not captured

    alone, optimizer, step = make("adamw")  # without being divided
    alone.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(whole))
    train(interpreted(step, data_parallel=True), data[4:8])
    assert_alike(alone, expected)
    for key, value in ms.full_state_dict(optimizer)["state"][0].items():
        assert torch.equal(value, optimizer.state_dict()["state"][0][key])

    net, optimizer, step = make("adamw")
    torch.save(shard, f"{folder}/{rank}.pt")
    dist.barrier()
    other = torch.load(f"{folder}/{1 - rank}.pt")
    told = []
    optimizer.load_state_dict(other)
    for shards in (True, False):  # the latter as any optimizer that knows nothing of shards
        try:
            train(interpreted(step, data_parallel=True, shard_optimizer=shards), data[:1])
        except RuntimeError as error:
            told.append(str(error))
    net, optimizer, step = make("adamw")
    train(interpreted(step, **how), data[:1])
    try:
        optimizer.load_state_dict(other)
    except ms.errors.DataParallelError as error:
        told.append(str(error))
    try:
        optimizer.step()
    except ms.errors.DataParallelError as error:
        told.append(str(error))
    return told


def refused(rank):
    """Optimizers that cannot be divided, in one process or in all; what all are told. Nothing has been trained."""
    told = []
    for maker in (
        lambda of: torch.optim.NAdam(of) if rank else torch.optim.Adam(of),
        torch.optim.Adafactor,
        lambda of: type("Own", (torch.optim.SGD,), {})(of, 0.1),
    ):
        net = nn.Linear(4, 2)
        before = copy.deepcopy(net.state_dict())
        optimizer = maker(net.parameters())

        def step(x, y, net=net, optimizer=optimizer):
            F.mse_loss(net(x), y).backward()
            optimizer.step()

        try:
            train(ms.step(step, data_parallel=True, shard_optimizer=True), batches(rank, 1))
        except ms.ArgumentError as error:
            told.append(str(error))
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    return told


def gathers_alone(rank):
    """One process asks for the whole state, the other does not."""
    group = dist.new_group()  # that is of no use any more
    _, optimizer, step = make("sgd")
    train(interpreted(step, data_parallel=group, shard_optimizer=True), batches(rank, 1))
    if rank:
        return ""
    try:
        ms.full_state_dict(optimizer, timeout=0.5)
    except ms.errors.DataParallelError as error:
        return str(error)
    return None


def through_distributed_checkpoint(rank, folder):
    """Model and optimizer saved by ``torch.distributed.checkpoint``, and loaded into new ones that have run once."""
    from torch.distributed import checkpoint

    how = {"data_parallel": True, "shard_optimizer": True}
    net, optimizer, step = make("adamw", with_schedule=True)
    step = interpreted(step, **how)
    data = [*batches(rank, 8)]
    train(step, data[:4])
    checkpoint.save({"model": net.state_dict(), "optimizer": ms.full_state_dict(optimizer)}, checkpoint_id=folder)
    train(step, data[4:])

    for shards in (True, False):
        again, optimizer, step = make("adamw", with_schedule=True)
        step = interpreted(step, data_parallel=True, shard_optimizer=shards)
        train(step, data[:1])
        state = {"model": again.state_dict(), "optimizer": ms.full_state_dict(optimizer)}
        checkpoint.load(state, checkpoint_id=folder)
        again.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(step, data[4:])
        assert_alike(again, net, rtol=1e-6, atol=1e-7)
    return digest(again)


def without_one(rank, which):
    """Digest of the parameters where one collective of that kind does nothing; ``None``: all do."""
    net, _, step = make("adamw", clips=2.0)
    step = interpreted(step, data_parallel=True, shard_optimizer=True)
    train(step, batches(rank, 2))
    reducer = step._plain.replica
    (gathers,) = reducer._gathers.values()
    kinds = {"reduce": reducer._rounds[0], "norm": list(reducer._norms._exchanges.values()), "gather": gathers}
    if which is not None:
        kinds[which][0]._issue = lambda memory, **_: None
    train(step, batches(rank, 4))
    return digest(net)


def with_closure(rank, num_steps):
    """The optimizer calls the model."""

    def run(shards):
        net, optimizer, _ = make("adam")

        def step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure)

        captured = interpreted(step, data_parallel=True, shard_optimizer=shards)
        return net, train(captured, batches(rank, num_steps))

    theirs, expected = run(False)
    ours, results = run(True)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    assert_alike(ours, theirs, rtol=0, atol=0)
