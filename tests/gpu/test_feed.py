import ctypes
import gc
import random
import textwrap
import threading
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import millstream.data
from millstream.data import feed
from millstream.device import context
from millstream.errors import FallbackWarning, FeedError
from tests.clocks import HANG_S
from tests.processes import run_python

pytestmark = pytest.mark.gpu

LONG = 5_000_000  # cycles: a few milliseconds


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-feed")]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    if feed_threads():
        gc.collect()
    for thread in feed_threads():  # its feed is gone, and it is about to end
        thread.join(HANG_S)
    assert feed_threads() == []
    context("cuda:0").close()


@pytest.fixture(params=[True, False], ids=["worker", "inline"])
def _both_ways(request, monkeypatch):
    """Passes with a worker, and without one."""
    monkeypatch.setitem(globals(), "feed", partial(millstream.data.feed, prefetch=request.param))


both_ways = pytest.mark.usefixtures("_both_ways")


def random_batches(num_batches, seed, *, steady):
    """Batches of random nesting sizes; ``steady``: all alike, so that their copies start ahead."""
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(3)]
    for i in range(num_batches):
        if not steady:
            shapes = [(rng.randint(0, 300), rng.randint(1, 300)) for _ in range(rng.randint(1, 5))]
        yield {"x": [torch.full(shape, float(i)) for shape in shapes], "i": torch.tensor([i]), "n": i}


def check_sums(batch):
    """A device flag: whether every element is what it has to be. Nothing waits for it."""
    number = batch["i"]
    wrong = sum(
        ((leaf != number).sum() for leaf in batch["x"]), torch.zeros((), dtype=torch.int64, device=number.device)
    )
    return wrong + (number != batch["n"]).sum()


@both_ways
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "shapes change"])
@pytest.mark.parametrize("consumer", ["fast", "slow device", "slow host"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_values_are_right(depth, consumer, steady):
    flags = []
    for batch in feed(random_batches(150, depth, steady=steady), "cuda:0", depth):
        if consumer == "slow device":
            torch.cuda._sleep(LONG // 20)
        flags.append(check_sums(batch))
        # What the user frees goes back to the allocator at once, and is written by what comes next.
        torch.empty(random.randint(1, 100_000), device="cuda:0").fill_(-1)
        if consumer == "slow host":
            torch.cuda.synchronize()
    assert len(flags) == 150
    assert int(torch.stack(flags).sum()) == 0


@both_ways
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "shapes change"])
def test_fifty_thousand_batches_under_a_consumer_of_changing_speed(steady):
    rng, kept = random.Random(0), None
    wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
    for i, batch in enumerate(feed(random_batches(50_000, 0, steady=steady), "cuda:0", 3)):
        chance = rng.random()
        if chance < 0.002:
            torch.cuda._sleep(LONG)  # the host runs ahead
        elif chance < 0.004:
            torch.cuda.synchronize()
        elif chance < 0.01:
            kept = batch  # for a while
        wrong += check_sums(batch)
        if i % 1000 == 0 and kept is not None:
            wrong += check_sums(kept)
    assert i == 49_999
    assert int(wrong) == 0


@pytest.mark.parametrize("offset", [-1, 0, 1, 20])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_counts(depth, offset):
    batches = [torch.tensor([float(i)]) for i in range(depth + offset)]
    assert [batch.item() for batch in feed(batches, "cuda:0", depth)] == list(range(depth + offset))


@both_ways
def test_batches_that_are_kept_keep_their_values():
    kept = []
    for batch in feed(random_batches(60, 0, steady=True), "cuda", 2):
        kept.append(batch)
        torch.cuda._sleep(LONG // 50)
    flags = [check_sums(batch) for batch in kept]
    assert int(torch.stack(flags).sum()) == 0


def test_one_leaf_that_is_kept_keeps_nothing_else():
    before = torch.cuda.memory_allocated()
    labels = [y for _, y in feed([(torch.zeros(1 << 20), torch.full((8,), float(i))) for i in range(20)], "cuda:0")]
    assert [float(label[0]) for label in labels] == list(range(20))
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 20 * 512
    assert len(labels) == 20


@both_ways
def test_a_loader_that_writes_every_batch_into_the_same_tensor():
    def source():
        buffer = torch.zeros(1 << 18)
        for i in range(50):
            buffer.fill_(i)
            yield buffer

    torch.cuda._sleep(LONG * 4)
    flags = [(batch != i).sum() for i, batch in enumerate(feed(source(), "cuda:0", 3))]
    assert int(torch.stack(flags).sum()) == 0


def test_memory_and_threads_stay_flat_over_fifty_epochs():
    loader = DataLoader(TensorDataset(torch.randn(64, 1000), torch.arange(64)), batch_size=8)
    fed = feed(loader, "cuda:0", 2)
    seen = []
    for epoch in range(50):
        for x, y in fed:
            (x * 2).sum(), y.float().mean()
            del x, y
            if epoch % 5 == 4:
                break
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), context("cuda:0").pinned_bytes))
    assert seen[10:] == seen[5:10] * 8
    assert len(feed_threads()) == 1


def test_a_hundred_early_ends_while_copies_are_under_way():
    fed = feed([torch.full((1 << 20,), float(i)) for i in range(6)], "cuda:0", 4)
    wrong = []
    for i in range(100):
        torch.cuda._sleep(LONG // 20)
        for batch in fed:
            wrong.append((batch != 0).sum())
            break
        del batch
        # Memory of undelivered batches comes back to the allocator: nothing may still be written to it.
        mine = [torch.full((1 << 20,), -5.0, device="cuda:0") for _ in range(6)]
        torch.cuda._sleep(LONG // 20)
        wrong += [(tensor != -5).sum() for tensor in mine]
        del mine
        assert len(feed_threads()) == 1, i
    assert int(torch.stack(wrong).sum()) == 0


@both_ways
def test_device_and_streams_of_the_consumer_are_untouched():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in feed([torch.ones(10)] * 5, "cuda:0"):
            assert torch.cuda.current_stream() == side
            assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@both_ways
def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for batch in feed([torch.ones(10)] * 5, "cuda:1"):
        assert batch.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert bool((batch == 1).all())
    context("cuda:1").close()


@both_ways
def test_a_consumer_that_changes_streams():
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    rng = random.Random(0)
    flags, passing = [], iter(feed(random_batches(200, 1, steady=True), "cuda:0", 3))
    for _ in range(200):
        with torch.cuda.stream(rng.choice(streams)):
            batch = next(passing)
            torch.cuda._sleep(LONG // 50)
            flags.append(check_sums(batch))
            del batch
            torch.empty(rng.randint(1, 100_000), device="cuda:0").fill_(-1)
    torch.cuda.synchronize()
    assert int(torch.stack(flags).sum()) == 0


def test_the_consumer_never_waits_for_the_device():
    batches = [(torch.ones(100, 100), {"y": torch.zeros(10)}) for _ in range(20)]
    list(feed(batches, "cuda:0"))  # warm
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        got = list(feed(batches, "cuda:0"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(got) == 20


@both_ways
def test_tensors_that_the_loader_makes_on_the_device():
    def source():
        for i in range(100):
            x = torch.empty(1 << 18, device="cuda:0")
            torch.cuda._sleep(LONG // 50)
            x.fill_(i)
            yield x, torch.full((4,), float(i))

    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        flags = []
        with torch.cuda.stream(stream):
            for i, (x, y) in enumerate(feed(source(), "cuda:0")):
                flags += [(x != i).sum(), (y != i).sum()]
                torch.empty(1 << 18, device="cuda:0").fill_(-1)
            assert int(torch.stack(flags).sum()) == 0


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_data_loader_with_worker_processes(pin_memory):
    data = TensorDataset(torch.arange(200.0).view(100, 2), torch.arange(100))
    loader = DataLoader(data, batch_size=7, num_workers=2, pin_memory=pin_memory)
    fed = feed(loader, "cuda:0")
    for _ in range(2):
        got = list(fed)
        assert torch.equal(torch.cat([x for x, _ in got]).cpu(), torch.arange(200.0).view(100, 2))
        assert torch.equal(torch.cat([y for _, y in got]).cpu(), torch.arange(100))


class Collecting(Dataset):
    """Collects garbage for each sample."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(float(index))


def test_workers_do_not_collect_garbage_that_holds_cuda_objects():
    loader = DataLoader(Collecting(), batch_size=5, num_workers=2)
    fed = feed(loader, "cuda:0")
    garbage = [torch.zeros(1 << 20).pin_memory(), torch.cuda.Event(), torch.zeros(4, device="cuda:0")]
    garbage[0].to("cuda:0", non_blocking=True)
    garbage[1].record()
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        assert torch.equal(torch.cat([*fed]).cpu(), torch.arange(20.0))
    finally:
        gc.enable()


def test_tensors_of_all_sorts():
    leaves = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3).view(3, 1).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "small": [torch.tensor([i]) for i in range(50)],
    }
    (batch,) = feed([leaves], "cuda:0")
    for name, leaf in leaves.items():
        if name == "small":
            assert [int(x) for x in batch[name]] == list(range(50))
            continue
        expected = leaf.to("cuda:0")
        got = batch[name]
        assert got.device == expected.device
        if leaf.layout is torch.strided:
            assert got.stride() == leaf.stride()
            assert torch.equal(got, expected)
        else:
            assert torch.equal(got.to_dense(), expected.to_dense())


def test_training_with_batches_made_under_inference_mode():
    passing = iter(feed([torch.ones(4, 4)] * 8, "cuda:0"))
    weight = torch.ones(4, 4, device="cuda:0", requires_grad=True)
    with torch.inference_mode():
        for _ in range(3):
            next(passing)
    for batch in passing:
        (batch @ weight).sum().backward()
    assert bool((weight.grad == 20).all())


@both_ways
def test_captures_elsewhere_survive_the_feed():
    """In CUDA's global mode, PyTorch's default, one unsafe call of any other thread destroys a capture."""
    done, totals = threading.Event(), []

    def consume():
        with context("cuda:0").driver.in_thread(), torch.cuda.stream(torch.cuda.Stream()):
            flags = [check_sums(batch) for batch in feed(random_batches(400, 0, steady=False), "cuda:0", 2)]
            totals.append(int(torch.stack(flags).sum()))
            del flags
        done.set()

    thread = threading.Thread(target=consume)
    thread.start()
    x, num_captures = torch.ones(1000, device="cuda:0"), 0
    while num_captures < 5 or not done.is_set():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(200):
                y = y + 1
        graph.replay()
        assert bool((y == 201).all())
        num_captures += 1
    thread.join()
    assert totals == [0]


def test_asking_for_a_batch_inside_a_capture_is_refused():
    passing = iter(feed([torch.ones(3)] * 3, "cuda:0"))
    x = torch.ones(3, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(FeedError, match="being captured"):
            next(passing)
    graph.replay()
    assert bool((y == 2).all())
    assert len(list(passing)) == 3


def test_when_pinning_is_refused(monkeypatch):
    def refuse(num_bytes):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(context("cuda:0")._arena, "_pin", refuse)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        flags = [check_sums(batch) for batch in feed(random_batches(30, 0, steady=True), "cuda:0")]
    assert [w.category for w in seen] == [FallbackWarning]
    assert int(torch.stack(flags).sum()) == 0


@both_ways
def test_errors_come_after_good_batches():
    def source():
        yield torch.zeros(3)
        yield torch.ones(3)
        raise LookupError("third")

    got = []
    with pytest.raises(LookupError, match="third"):
        got.extend(feed(source(), "cuda:0"))
    assert [float(x[0]) for x in got] == [0.0, 1.0]


# --- slots, once they are warm


@both_ways
def test_after_warm_up_nothing_is_allocated_and_addresses_repeat():
    def count():
        return torch.cuda.memory_stats()["allocation.all.allocated"], context("cuda:0").pinned_bytes

    fed = feed([(torch.randn(64, 1000), torch.arange(64)) for _ in range(60)], "cuda:0", 2)
    addresses, before = set(), None
    for i, (x, y) in enumerate(fed):
        if i == 2:
            torch.cuda._sleep(50_000_000)  # the host runs ahead, as far as there may be pinned slots for
        x.mul_(2)
        addresses.add((x.data_ptr(), y.data_ptr()))
        if i == 20:
            before = count()
    assert count() == before
    assert len(addresses) == 2
    assert fed.stats().num_kept == 0


@both_ways
def test_device_memory_is_depth_times_a_batch():
    x = torch.zeros(4 << 20)  # 16 MiB
    torch.cuda.synchronize()
    before, most = torch.cuda.memory_allocated(), 0
    for batch in feed([x] * 20, "cuda:0", 3):
        most = max(most, torch.cuda.memory_allocated() - before)
        del batch
    assert most <= 3 * x.nbytes + (1 << 20)


@contextmanager
def held(stream):
    """Let a stream wait until the block is left, however long the host takes."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2  # here: until it is at least so much
    end = threading.Timer(HANG_S, flag.fill_, (1,))
    end.start()
    stop = ctypes.c_uint32(1), ctypes.c_uint(0)
    assert wait(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(flag.data_ptr()), *stop) == 0
    try:
        yield
    finally:
        end.cancel()
        flag.fill_(1)


def test_a_copy_runs_beside_the_step_before():
    """The next batch is there while the step before is still under way."""
    fed = feed([torch.full((32 << 20,), float(i)) for i in range(3)], "cuda:0", 2)
    passing, other = iter(fed), torch.cuda.Stream()
    first = next(passing)
    with held(torch.cuda.current_stream()):
        end = torch.cuda.Event()
        end.record()
        with torch.cuda.stream(other):
            second = next(passing)
            last = second[-1].clone()
        other.synchronize()
        assert not end.query()
    torch.cuda.synchronize()
    assert float(last) == 1.0
    assert float(first[-1]) == 0.0
    fed.close()


def test_the_shares_of_a_loop_sum_to_one():
    fed = feed([torch.zeros(1 << 20)] * 40, "cuda:0", 2)
    for batch in fed:
        torch.cuda._sleep(2 * LONG)
        del batch
    torch.cuda.synchronize()
    stats = fed.stats()
    assert sum(stats.shares.values()) == pytest.approx(1)
    assert stats.shares["compute"] > 0
    assert stats.copy_s > 0


@both_ways
def test_dropping_a_batch_inside_a_capture():
    passing = iter(feed([torch.full((100,), float(i)) for i in range(20)], "cuda:0", 2))
    batch, x = next(passing), torch.ones(3, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del batch
    graph.replay()
    assert bool((y == 2).all())
    assert [float(batch[0]) for batch in passing] == list(range(1, 20))


@both_ways
def test_transforms_run_beside_the_step_and_may_be_kept():
    def transform(batch):
        return {"x": [leaf * 2 for leaf in batch["x"]], "i": batch["i"] * 2, "n": batch["n"] * 2}

    kept, flags = [], []
    for i, batch in enumerate(feed(random_batches(200, 5, steady=True), "cuda:0", 2, transform=transform)):
        torch.cuda._sleep(LONG // 50)
        flags.append(check_sums(batch))
        torch.empty(random.randint(1, 100_000), device="cuda:0").fill_(-1)
        if i % 7 == 0:
            kept.append(batch)
    flags += [check_sums(batch) for batch in kept]
    assert int(torch.stack(flags).sum()) == 0


def test_casting_and_channels_last():
    batch = {"image": torch.randn(8, 3, 16, 16), "label": torch.arange(8)}
    for got in feed([batch] * 6, "cuda:0", cast=torch.bfloat16, channels_last=True):
        assert got["image"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got["image"].cpu(), batch["image"].bfloat16())
        assert got["label"].dtype == torch.int64


def test_large_pageable_batches_staged_by_several_threads():
    rng = random.Random(0)
    arrays = [torch.randint(0, 255, (rng.randint(5, 20) << 20,), dtype=torch.uint8).numpy() for _ in range(6)]
    for got, array in zip(feed(arrays * 3, "cuda:0", 2), arrays * 3, strict=True):
        assert torch.equal(got.cpu(), torch.from_numpy(array))


def test_arrays_packed_sequences_and_jagged_tensors():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.zeros(4)], layout=torch.jagged)
    wide = torch.arange(4.0).view(4, 1).expand(4, 100)
    for got in feed([{"p": packed, "j": jagged, "w": wide, "again": wide}] * 5, "cuda:0"):
        assert got["p"].batch_sizes.device.type == "cpu"
        assert torch.equal(got["p"].data.cpu(), packed.data)
        assert [len(row) for row in got["j"].unbind()] == [1, 4]
        assert got["w"].stride() == (1, 0)
        assert got["w"].data_ptr() == got["again"].data_ptr()


ENDINGS = {
    "an open pass": ("", 0),
    "an exit in the loop": ("sys.exit(0)", 0),
    "a device in an error state": (
        "import contextlib\n"
        "with contextlib.suppress(RuntimeError):\n"
        "    torch.zeros(1, device='cuda:0')[torch.tensor([5], device='cuda:0')].cpu()",
        None,  # what PyTorch itself then makes of the end is its own affair, as long as it comes
    ),
}


@pytest.mark.parametrize(("ending", "code"), ENDINGS.values(), ids=ENDINGS)
def test_the_process_ends(ending, code):
    program = """
        import itertools, sys, torch
        from millstream.data import feed
        passing = iter(feed((torch.full((1 << 20,), float(i)) for i in itertools.count()), "cuda:0", 3))
        next(passing)
        torch.cuda._sleep(20_000_000)
        next(passing)
        print("under way", flush=True)
    """
    done = run_python(textwrap.dedent(program) + ending)
    assert done.stdout == "under way\n", done.stderr
    assert code is None or done.returncode == code, done.stderr
