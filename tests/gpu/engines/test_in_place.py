"""On a GPU: batches that are read where a feed puts them give the numbers of batches that are copied."""

import copy

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.engine.cuda import in_place, replayer
from millstream.engine.cuda.captured import Captured
from tests import networks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


@pytest.fixture(autouse=True)
def _forced(monkeypatch):
    monkeypatch.setattr(in_place, "FORCED", True)


def num_in_place(compiled):
    return sum(executable.num_in_place for executable in executables(compiled))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.LazyLinear(10)
    )


def example(count=30):
    return [(torch.randn(8, 3, 40, 40), torch.randint(0, 10, (8,))) for _ in range(count)]


def initialised():
    torch.manual_seed(1)
    model = network()
    model(example(1)[0][0])
    return model.cuda()


def assert_identical(left, right):
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (left, right)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("depth", "streams"), [(2, 1), (3, 1), (2, 4)])
def test_a_fed_step_trains_alike(depth, streams, monkeypatch):
    batches = example()

    def train(forced):
        monkeypatch.setattr(in_place, "FORCED", forced)
        model = initialised()
        optimizer = torch.optim.Adam(model.parameters())

        @ms.step(strict=True, streams=streams)
        def step(x, y):
            return networks.train_once(model, optimizer, x, y)

        torch.manual_seed(2)
        feed = ms.feed(batches, "cuda", depth=depth)
        losses = [step(x, y) for x, y in feed]
        state = [losses, list(model.state_dict().values()), networks.optimizer_state(optimizer)]
        return num_in_place(step), feed.stats().num_kept, state

    (none, kept, before), (some, kept_after, after) = train(False), train(True)
    assert (none, some) == (0, depth)
    assert kept_after == kept  # a graph that held a batch would take it out of the pool
    assert_identical(before, after)


@pytest.mark.parametrize(("depth", "streams"), [(2, 1), (3, 1), (2, 4)])
def test_fed_inference_gives_the_same(depth, streams, monkeypatch):
    batches = [x for x, _ in example()]

    def predict(forced):
        monkeypatch.setattr(in_place, "FORCED", forced)
        model = initialised().eval()
        compiled = ms.compile(model, strict=True, streams=streams)
        with torch.no_grad():
            results = [compiled(x) for x in ms.feed(batches, "cuda", depth=depth)]
            networks.assert_close(results[-1], model(batches[-1].cuda()), 1e-4)
        return num_in_place(compiled), results

    (none, before), (some, after) = predict(False), predict(True)
    assert (none, some) == (0, depth)
    assert_identical(before, after)


def test_another_epoch_and_another_feed_go_on_being_right():
    model = initialised().eval()
    compiled = ms.compile(model, strict=True, streams=1)
    with torch.no_grad():
        for depth in (2, 2, 3, 4):
            batches = [x for x, _ in example(12)]
            for x, fed in zip(batches, ms.feed(batches, "cuda", depth=depth), strict=True):
                networks.assert_close(compiled(fed), model(x.cuda()), 1e-4)


def test_addresses_that_change_are_copied():
    compiled = ms.compile(lambda x: x.softmax(1) * 2, strict=True, streams=1)
    kept = []
    with torch.no_grad():
        for turn in range(100):
            kept.append(torch.randn(64, 300, device="cuda"))
            networks.assert_close(compiled(kept[-1]), kept[-1].softmax(1) * 2, 1e-4)
            if turn > 90:  # and in between some that stay
                networks.assert_close(compiled(kept[0]), kept[0].softmax(1) * 2, 1e-4)
    assert num_in_place(compiled) == 1


def test_a_batch_may_be_overwritten_as_soon_as_the_call_returns():
    model = initialised().eval()
    compiled = ms.compile(model, strict=True, streams=4)
    slots = [torch.empty(8, 3, 40, 40, device="cuda") for _ in range(2)]
    batches = torch.randn(100, *slots[0].shape, device="cuda")
    results = []
    with torch.no_grad():
        for turn, batch in enumerate(batches):
            x = slots[turn % 2]
            x.copy_(batch)
            results.append(compiled(x))
            x.fill_(float("nan"))
        for batch, result in zip(batches, results, strict=True):
            networks.assert_close(result, model(batch), 1e-4)
    assert num_in_place(compiled) == 2


def test_calls_on_other_streams_are_ordered():
    compiled = ms.compile(lambda x: (x * 2).sum(1), strict=True, streams=1)
    slots = [torch.empty(256, 4096, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    with torch.no_grad():
        for turn in range(60):
            x, stream = slots[turn % 2], streams[turn % 3]
            stream.wait_stream(streams[(turn - 1) % 3])
            with torch.cuda.stream(stream):
                x.fill_(turn)
                results.append(compiled(x))
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert torch.equal(result, torch.full((256,), 8192.0 * turn, device="cuda"))
    assert num_in_place(compiled) == 2


def test_mutated_inputs_are_never_read_in_place():
    def function(x, y):
        y.mul_(0.5).add_(x)
        return x - y

    compiled = ms.compile(function, strict=True, streams=1)
    slots = [(torch.empty(500, 500, device="cuda"), torch.empty(500, 500, device="cuda")) for _ in range(2)]
    with torch.no_grad():
        for turn in range(30):
            x, y = slots[turn % 2]
            x.normal_(), y.normal_()
            other = y.clone()
            expected = function(x, other)
            networks.assert_close(compiled(x, y), expected)
            networks.assert_close(y, other)
    (executable,) = executables(compiled)
    assert executable.num_in_place == 2
    assert len(executable._replayer._in_place.positions) == 1


def test_results_that_are_fed_back_from_the_memory_of_the_graph():
    """With ``copy_outputs=False`` an input may lie where this graph, or another of the same plan, writes."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
    compiled = ms.compile(model, strict=True, copy_outputs=False, streams=1)
    with torch.no_grad():
        ours = theirs = torch.randn(128, 256, device="cuda")
        for _ in range(40):
            ours, theirs = compiled(ours), model(theirs)
            networks.assert_close(ours, theirs, 1e-4)


def test_graphs_in_place_share_the_memory_of_temporaries():
    layers = [nn.Linear(1024, 1024) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(1024, 16)).cuda()
    compiled = ms.compile(model, strict=True, streams=1)
    slots = [torch.randn(16384, 1024, device="cuda") for _ in range(4)]
    with torch.no_grad():
        compiled(slots[0]), compiled(slots[1])  # captured by now
        (executable,) = executables(compiled)
        before = torch.cuda.memory_reserved()
        for turn in range(5 * len(slots)):
            compiled(slots[turn % len(slots)])
    assert executable.num_in_place == 4
    outputs = 16384 * 16 * 4
    assert executable.peak_bytes > 100 << 20
    assert torch.cuda.memory_reserved() - before <= 4 * outputs + (24 << 20)  # PyTorch takes 2 or 20 MiB at a time


def test_a_capture_that_fails_leaves_the_copies(monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Captured, "read_in_place", fail)
    model = initialised().eval()
    compiled = ms.compile(model, strict=True, streams=1)
    x = torch.randn(8, 3, 40, 40, device="cuda")
    with torch.no_grad():
        for _ in range(10):
            networks.assert_close(compiled(x), model(x), 1e-4)
    torch.randn(3, device="cuda")  # the generator works on
    assert num_in_place(compiled) == 0
    assert "no memory" in str(ms.explain(compiled))


def test_training_with_a_compiled_model_copies():
    """A forward graph's memory is what its backward graph reads: there is one of it."""
    model = initialised().eval()  # no dropout
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True, streams=1)
    batches = [x for x, _ in example(12)]
    for x, fed in zip(batches, ms.feed(batches, "cuda", depth=2), strict=True):
        for each, batch in ((compiled, fed), (twin, x.cuda())):
            each.zero_grad()
            each(batch).square().mean().backward()
        networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], 1e-4)
    assert num_in_place(compiled) == 0


# --- decided by time -------------------------------------------------------------------------------------------------
# Decided by time, which tells nothing where tests share a device: so here it is told what is decided.


def test_a_copy_that_takes_much_of_a_call_is_avoided(monkeypatch):
    class Decided(in_place.CopyTrial):
        def add(self, copy_ms, replay_ms, *, in_place):
            super().add(0.5, 0.1 if in_place else 1.0, in_place=in_place)

    monkeypatch.setattr(in_place, "FORCED", None)
    monkeypatch.setattr(replayer, "CopyTrial", Decided)
    compiled = ms.compile(lambda x: x.sum(1), strict=True, streams=1)
    slots = [torch.randn(64, 16384, device="cuda") for _ in range(2)]
    with torch.no_grad():
        for turn in range(6 * in_place.SAMPLES):
            x = slots[turn % 2]
            result = compiled(x)
            torch.cuda.synchronize()  # so that times are known
            networks.assert_close(result, x.sum(1), 1e-3)
    (executable,) = executables(compiled)
    assert executable.num_in_place == 2
    assert executable._replayer._comparison is None  # settled


def test_a_copy_that_is_nothing_beside_the_rest_stays(monkeypatch):
    monkeypatch.setattr(in_place, "FORCED", None)
    monkeypatch.setattr(in_place, "LEAST_SHARE", 2.0)  # of a call; whatever it takes, that is less
    compiled = ms.compile(lambda x: x.sum(), strict=True, streams=1)
    slots = [torch.ones(1 << 18, device="cuda") for _ in range(2)]
    with torch.no_grad():
        for turn in range(2 * in_place.SAMPLES + 4):
            result = compiled(slots[turn % 2])
            torch.cuda.synchronize()
            assert result.item() == 1 << 18
    (executable,) = executables(compiled)
    assert executable._replayer is not None
    assert executable._replayer._in_place is None  # settled: calls copy
