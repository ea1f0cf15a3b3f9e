"""What each process does for a test of models under ``fully_shard``."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import millstream as ms
from millstream._torch.distributed.fully_sharded import is_shard, whole_of
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.data_parallel.sharding import divide, unit_part
from millstream.graph import Free, Launch
from millstream.schedule import plan_graph
from millstream.testing import move_step
from tests.parallel import checks
from tests.parallel.checks import batches, fallbacks, interpreted, train


class Block(nn.Module):
    """Seven rows, which no number of processes divides; in a checkpointed region, if so asked."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.checkpoints = checkpoints

    def compute(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x)


class Net(nn.Module):
    def __init__(self, tied=False, checkpoints=False, around=False, reentrant=False):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList([Block(checkpoints), Block()])
        self.reentrant = reentrant
        self.middle, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.around = around
        if tied:
            self.middle.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.around else block(x)
        return self.last(self.middle(x))


@functools.cache
def mesh():
    return init_device_mesh(checks.DEVICE.type, (dist.get_world_size(),))


@functools.cache
def mesh_of_replicas(num_shards):
    shape = dist.get_world_size() // num_shards, num_shards
    return init_device_mesh(checks.DEVICE.type, shape, mesh_dim_names=("replicas", "shards"))


def shard(net, freezes=False, num_shards=0, **how):
    if freezes:
        net.blocks[0].requires_grad_(False)
        net.blocks[1].up.bias.requires_grad_(False)
    how["mesh"] = mesh_of_replicas(num_shards) if num_shards else mesh()
    for block in net.blocks:
        fully_shard(block, **how)
    return fully_shard(net, **how)


def plain(net, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def clipping(net, optimizer):
    def step(x, y):
        loss = F.mse_loss(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accumulating(net, optimizer):
    def step(x, y):
        loss = 0.0
        for number, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            net.set_requires_gradient_sync(number == 1)
            each = F.mse_loss(net(part), target) / 2
            each.backward()
            loss = loss + each.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def evaluating(net, optimizer):
    def step(x, y):
        with torch.no_grad():
            teacher = net(x)
        loss = F.mse_loss(net(x), y) + F.mse_loss(net(x * 2), teacher)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def reading(net, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y) + sum(each.detach().norm().full_tensor() for each in net.parameters())
        loss.backward()
        optimizer.step()
        return loss

    return step


class Norms(torch.optim.Optimizer):
    """Divides each gradient by its norm, which that of some rows is not."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each -= 0.01 * each.grad / each.grad.norm()


class OwnGather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

KINDS = {
    "sgd": (plain, checks.sgd, {}, {}),
    "adamw": (plain, checks.adamw, {}, {"reshard_after_forward": False}),
    "clipping": (clipping, checks.adamw, {}, {}),
    "accumulation": (accumulating, checks.sgd, {}, {}),
    "mixed precision": (plain, checks.sgd, {}, {"mp_policy": MIXED}),
    "frozen": (plain, checks.adamw, {}, {"freezes": True}),
    "tied": (plain, checks.sgd, {"tied": True}, {}),
    "checkpoint within": (plain, checks.sgd, {"checkpoints": True}, {}),
    "checkpoint around": (plain, checks.sgd, {"around": True}, {}),
    "reentrant checkpoint": (plain, checks.sgd, {"around": True, "reentrant": True}, {}),
    "several passes": (evaluating, checks.sgd, {}, {}),
    "replicas": (clipping, checks.adamw, {"tied": True}, {"num_shards": 1}),
    "replicas of shards": (clipping, checks.adamw, {"tied": True}, {"num_shards": 2}),
}

COMPILED = ("clipping", "tied")
APART = ("tied", "replicas")
"""Each of the root's parameters is gathered and reduced by itself."""
NUM_EXCHANGES = {"sgd": 3 * 2 + 2, "tied": 3 * 2 + 2 * 3, "replicas": 3 * 2 + 2 * 3 + 5}
"""Of a step: parameters of two blocks, twice, and their gradients; those of the root or its parts; sums of replicas."""


def make(kind, hows=None):
    make_step, make_optimizer, of_net, how = KINDS[kind]
    torch.manual_seed(0)
    net = shard(Net(**of_net).to(checks.DEVICE), **(how if hows is None else hows))
    optimizer = make_optimizer([each for each in net.parameters() if each.requires_grad])
    return net, optimizer, make_step(net, optimizer)


def whole(net):
    return {name: each.full_tensor() for name, each in net.state_dict().items()}


def assert_alike(ours, theirs, **tolerance):
    torch.testing.assert_close(whole(ours), whole(theirs), **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))
    for name, each in ours.named_parameters():
        assert type(each) is type(theirs.get_parameter(name)), name


# --- the checks -------------------------------------------------------------------------------------------------------


def same_as_eager(rank, kind, num_steps):
    """Our step and ``fully_shard``'s, eager: results, shards, and what is between steps."""
    theirs, _, their_step = make(kind)
    ours, _, our_step = make(kind)
    is_compiled = kind in COMPILED or checks.DEVICE.type == "cuda"
    captured = ms.step(our_step, strict=True) if is_compiled else interpreted(our_step)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if kind == "mixed precision" else {"rtol": 1e-4, "atol": 1e-5}
    own_part_bytes = 0 if kind in APART else unit_part.OWN_PART_BYTES
    with mock.patch.object(unit_part, "OWN_PART_BYTES", own_part_bytes):
        expected, results = (train(step, batches(rank, num_steps)) for step in (their_step, captured))
    torch.testing.assert_close(results, expected, **tolerance)
    assert_alike(ours, theirs, **tolerance)
    (graph,) = captured.graphs
    assert graph.num_runs == num_steps - 1
    return len(graph.gm.graph.find_nodes(op="call_function", target=torch.ops.millstream.exchange.default))


def of_one_process(rank, num_steps):
    """A model whose parameters a process divides between itself alone, beside one that all processes divide."""
    _, _, other = make("clipping")
    train(interpreted(other), batches(rank, num_steps))
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]

    def run(wrap):
        torch.manual_seed(0)
        net = Net().to(checks.DEVICE)
        fully_shard(net, mesh=DeviceMesh.from_group(alone, checks.DEVICE.type))
        step = wrap(clipping(net, torch.optim.SGD(net.parameters(), 0.1)))
        return train(step, batches(rank, num_steps)), net

    (expected, theirs), (results, ours) = run(lambda step: step), run(interpreted)
    torch.testing.assert_close(results, expected)
    assert_alike(ours, theirs)
    dist.destroy_process_group(alone)
    return True


def alternating(rank, num_steps):
    """Calls of the step, and of the same code outside of it, whose hooks are FSDP's; and evaluation in between."""
    theirs, _, their_step = make("clipping")
    ours, _, our_step = make("clipping")
    captured = interpreted(our_step)
    for number, batch in enumerate(batches(rank, num_steps)):
        expected = their_step(*batch)
        result = our_step(*batch) if number % 3 == 2 else captured(*batch)
        torch.testing.assert_close(result, expected)
        with torch.no_grad():
            torch.testing.assert_close(ours(batch[0]), theirs(batch[0]))
        if number % 4 == 3:  # a forward pass that no backward pass follows leaves the root's parameters whole
            ours(batch[0])
    assert_alike(ours, theirs)
    return [len(captured.graphs), captured.graphs[0].num_runs]


def through_checkpoint(rank, folder):
    """What a captured step has trained is loaded into an eager one, and the other way round; both go on alike."""
    made = [make("adamw", {}) for _ in range(2)]
    steps = [interpreted(made[0][2]), made[1][2]]
    data = [*batches(rank, 12)]
    for batch in data[:4]:
        steps[0](*batch)
    for source, target in ((0, 1), (1, 0)):
        states = [{"net": net.state_dict(), "optimizer": optimizer.state_dict()} for net, optimizer, _ in made]
        if source == 0:  # which has none yet
            steps[1](*data[0])
            states[1] = {"net": made[1][0].state_dict(), "optimizer": made[1][1].state_dict()}
        dcp.save(states[source], checkpoint_id=f"{folder}/{source}")
        dcp.load(states[target], checkpoint_id=f"{folder}/{source}")
        made[target][0].load_state_dict(states[target]["net"])
        made[target][1].load_state_dict(states[target]["optimizer"])
        for batch in data[4:8]:
            results = [step(*batch) for step in steps]
            torch.testing.assert_close(*results)
        assert_alike(made[0][0], made[1][0])
        steps[1](*data[8])  # they part
    return len(steps[0].graphs)


def one_rank_apart(rank, num_steps):
    """Where one process has a batch of another size, it runs eagerly or captures while the other replays."""
    theirs, _, their_step = make("clipping")
    ours, _, our_step = make("clipping")
    captured = interpreted(our_step)
    sizes = [*batches(rank, num_steps, lambda rank, number: 4 if number > 4 and number % 3 == rank else 6)]
    torch.testing.assert_close(train(captured, sizes), train(their_step, sizes), rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    return len(captured.graphs)


def plant_faults(plan):
    """A gather after its use, and its memory freed early, are refused before anything runs."""
    check_plan(plan)
    kernels = plan.graph.kernels
    launches = {step.kernel: number for number, step in enumerate(plan.steps) if isinstance(step, Launch)}
    gather = next(each for each in kernels if each.ops == ("gather",))
    (memory,) = {plan.graph.storage(name) for name in gather.writes} - {"communicator"}
    readers = [each.id for each in kernels[gather.id + 1 :] if memory in map(plan.graph.storage, each.reads)]
    last = max(launches[each] for each in readers)
    freed = next(i for i, step in enumerate(plan.steps) if isinstance(step, Free) and step.buffer == memory)
    for faulty in (move_step(plan, launches[gather.id], last), move_step(plan, freed, launches[readers[0]])):
        with pytest.raises(ms.errors.PlanError):
            check_plan(faulty)


def one_program(rank, num_steps, kind="clipping"):
    """Compiled, with the collectives among its kernels."""
    theirs, _, their_step = make(kind)
    ours, _, our_step = make(kind)
    captured = ms.step(our_step, strict=True)
    expected, results = (train(step, batches(rank, num_steps)) for step in (their_step, captured))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)
    graph = captured.graphs[0].executable._runner.whole.lowered.program.graph
    plant_faults(plan_graph(graph, Roofline().estimate(graph), 2, "list"))
    told = str(ms.explain(captured))
    return ["all_gather parameters of" in told, "reduce_scatter gradients of" in told, "in one graph" in told]


def refused(rank, kind):
    """A step that is not captured trains as plain Python does, in all processes; what was told."""
    torch.manual_seed(0)
    net, hows = Net(), {}
    if kind == "placement":
        hows["shard_placement_fn"] = lambda each: Shard(each.dim() - 1) if each.shape[-1] == 4 else None
    if kind == "mesh":
        names = "stages", "replicas", "shards"
        hows["mesh"] = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=names)[names[1:]]
    if kind == "offload":
        hows["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "group":
        fully_shard([net.first, net.last], mesh=mesh())
    if kind == "block":
        net.blocks[0].compile(backend="eager")
    hows.setdefault("mesh", mesh())
    fully_shard(net, **hows)
    if kind == "hook":
        net.set_custom_all_gather(OwnGather())
    make_optimizer = {"norm": Norms}.get(kind, checks.sgd)
    optimizer = make_optimizer(net.parameters())
    make_step = {"reads": reading, "scaler": checks.scaled}.get(kind, plain)
    step = interpreted(make_step(net, optimizer), strict=False)
    with fallbacks() as told:
        train(step, batches(rank, 3))
    assert not step.graphs
    return told


class Mixed(nn.Module):
    """Blocks, and parameters that cannot be divided."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = Net(tied=True), nn.Parameter(torch.ones(()))
        self.other = nn.Parameter(torch.ones(3, 2).t())

    def forward(self, x):
        return self.scale * self.net(x) @ self.other @ self.other.t()


def without_wrapper(rank, num_steps):
    """``shard_parameters`` against the same step with whole parameters; states of optimizers are for both."""

    def trained(shards, state, number):
        torch.manual_seed(rank)  # the first process's parameters count
        net = Mixed().to(checks.DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        step = interpreted(clipping(net, optimizer), data_parallel=True, shard_parameters=shards)
        with mock.patch.object(divide, "SMALLEST_BYTES", 0):
            results = train(step, batches(rank, number))
        values = {name: whole_of(each.detach()) for name, each in net.named_parameters()}
        whole_state = ms.full_state_dict(optimizer)
        if shards:
            assert all(each.device.type == "cpu" for each in tree_leaves(whole_state) if isinstance(each, torch.Tensor))
        return net, results, values, tree_map_only(torch.Tensor, torch.Tensor.cpu, whole_state), len(step.graphs)

    _, _, _, state, _ = trained(False, None, 1)
    _, *expected = trained(False, state, num_steps)
    net, *results = trained(True, state, num_steps)
    for _, _, each, _ in (expected, results):
        del each["param_groups"][0]["foreach"]  # False where PyTorch has no lists of shards and whole tensors
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    return [name for name, each in net.named_parameters() if not is_shard(each)]


def cannot_be_divided(rank):
    """What is refused, in all processes alike, before anything is changed."""
    net = Net()
    held = [*net.parameters()]

    def refusal(optimizer, step):
        try:
            ms.step(step(net, optimizer), data_parallel=True, shard_parameters=True)(torch.ones(2, 4), torch.ones(2, 2))
        except ms.ArgumentError as error:
            assert [*map(id, net.parameters())] == [*map(id, held)]
            return str(error)

    def holding(net, optimizer):
        def step(x, y):
            net(x).sum().backward()
            nn.utils.clip_grad_norm_(held, 1.0)
            optimizer.step()

        return step

    return [refusal(checks.sgd(net.parameters()), holding), refusal(Norms(net.parameters()), plain)]
