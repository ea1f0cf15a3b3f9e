"""The feed as its users see it, on the CPU and on a virtual device."""

import contextlib
import gc
import importlib
import itertools
import os
import threading
import traceback
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from millstream.data import feed
from millstream.device import Place, context
from millstream.errors import ArgumentError, DeviceError, FeedError
from tests.clocks import HANG_S
from tests.data.conftest import WAYS, WITH_WORKER, feed_threads, is_idle
from tests.data.test_tree import Frozen, Opaque, same, trees
from tests.interrupts import interrupt_everywhere
from tests.processes import output_of, run_python

DEPTHS = [1, 2, 5]


def numbers(n):
    return [torch.tensor([float(i)]) for i in range(n)]


def workers():
    return sum(thread.name == "millstream-feed" for thread in feed_threads())


def values(batches):
    return [batch.item() for batch in batches]


class Failing(Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == self.bad:
            raise LookupError(f"record {i} is broken")
        return torch.tensor(float(i))


# --- values, order, counts


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("offset", [None, -1, 0, 1, 2, 20])
def test_every_batch_arrives_once_and_in_order(make_feed, depth, offset):
    count = 0 if offset is None else depth + offset
    fed = make_feed(numbers(count), depth)
    assert values(fed) == list(range(count))
    assert len(fed) == count


@given(st.lists(trees(), max_size=5))
def test_nested_batches_arrive_equal_on_the_cpu(batches):
    got = list(feed(batches, "cpu"))
    assert all(a is b for a, b in zip(got, batches, strict=True))  # no copy: the loader's own objects


def test_nested_batches_arrive_equal_on_a_device(virtual_feed):
    @given(st.lists(trees(), max_size=6), st.sampled_from(["eager", "random"]), st.integers(0, 99))
    def check(batches, mood, seed):
        fed, device = virtual_feed(batches, 2, mood, seed)
        got = list(fed)
        device.synchronize()
        assert all(same(a, b) for a, b in zip(got, batches, strict=True))

    check()


def test_plain_values_stay_and_unknown_ones_are_named(make_feed):
    passing = iter(make_feed([{"x": torch.zeros(2), "s": "name"}, 7, None, {"o": [Opaque(torch.ones(1))]}]))
    assert next(passing)["s"] == "name"
    assert [next(passing), next(passing)] == [7, None]
    with pytest.raises(FeedError, match=r"batch\['o'\]\[0\] is a .*Opaque"):
        next(passing)


def test_all_kinds_of_iterables(make_feed):
    class Indexed:
        def __getitem__(self, i):
            if i == 3:
                raise IndexError
            return torch.tensor([float(i)])

    assert values(make_feed(Indexed())) == [0, 1, 2]
    assert values(make_feed(tuple(numbers(3)))) == [0, 1, 2]
    once = make_feed(iter(numbers(3)))
    assert values(once) == [0, 1, 2]
    assert values(once) == []  # an iterator ends once and for all
    with pytest.raises(TypeError):
        len(once)


def test_a_sequence_that_never_ends_does_not_exceed_its_length(make_feed):
    class Endless:
        def __getitem__(self, i):
            return torch.tensor([float(i)])

    class Bounded(Endless):
        def __len__(self):
            return 3

    assert values(itertools.islice(make_feed(Endless()), 5)) == [*range(5)]
    passing = iter(make_feed(Bounded()))
    assert [next(passing).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FeedError, match=r"Bounded has a len\(\) of 3, and still an item 3.*IndexError"):
        next(passing)
    assert list(passing) == []


def test_a_data_loader_epoch_by_epoch(make_feed):
    data = TensorDataset(torch.arange(10.0), torch.arange(10) % 3)
    loader = DataLoader(data, batch_size=4)
    fed = make_feed(loader)
    for _ in range(3):
        got = list(fed)
        assert [len(x) for x, _ in got] == [4, 4, 2]
        assert torch.equal(torch.cat([x for x, _ in got]), torch.arange(10.0))
        assert torch.equal(torch.cat([y for _, y in got]), torch.arange(10) % 3)
    assert len(fed) == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loader_with_worker_processes(make_feed, persistent):
    data = TensorDataset(torch.arange(12.0))
    loader = DataLoader(data, batch_size=3, num_workers=2, persistent_workers=persistent)
    fed = make_feed(loader)
    for _ in range(2):
        assert torch.equal(torch.cat([x for (x,) in fed]), torch.arange(12.0))
    for (x,) in fed:  # left early, then started again
        assert torch.equal(x, torch.arange(3.0))
        break
    assert torch.equal(torch.cat([x for (x,) in fed]), torch.arange(12.0))


def test_shuffling_repeats_with_the_seed_although_the_consumer_draws_too(make_feed):
    def run():
        torch.manual_seed(7)
        loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, shuffle=True)
        order = []
        for (x,) in make_feed(loader, 3):
            torch.rand(100)
            order += x.tolist()
        return order, torch.rand(1).item()

    first = run()
    assert sorted(first[0]) == list(range(40))
    assert all(run() == first for _ in range(5))


def test_batches_that_are_kept_keep_their_values(make_feed):
    kept = list(make_feed(numbers(50), 2))
    assert values(kept) == list(range(50))


def test_a_loader_that_writes_every_batch_into_the_same_tensor(virtual_feed):
    def source():
        buffer = torch.zeros(3)
        for i in range(20):
            buffer.fill_(i)
            yield buffer

    fed, device = virtual_feed(source(), 3, "lazy")
    kept = list(fed)
    device.synchronize()
    assert [batch[0].item() for batch in kept] == list(range(20))


# --- errors


@pytest.mark.parametrize("bad", [0, 1, 3, 7])
def test_an_error_of_the_loader_comes_in_its_place_once_with_its_traceback(make_feed, bad):
    passing = iter(make_feed(DataLoader(Failing(bad), batch_size=1)))
    got = [next(passing).item() for _ in range(bad)]
    assert got == list(range(bad))
    with pytest.raises(LookupError, match=f"record {bad} is broken") as caught:
        next(passing)
    text = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in text
    assert "in _carry_out" not in text
    assert text.count("raise LookupError") == 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(passing)


def test_an_error_in_a_worker_process_names_the_cause():
    with pytest.raises(LookupError, match="record 5 is broken"):
        list(feed(DataLoader(Failing(5), num_workers=1), "cpu"))


def test_a_generator_that_fails(make_feed):
    def source():
        yield torch.tensor([1.0])
        raise ZeroDivisionError("source")

    fed = make_feed(source())
    got = []
    with pytest.raises(ZeroDivisionError, match="source"):
        got.extend(batch.item() for batch in fed)
    assert got == [1.0]


def test_an_error_of_iter_is_raised_at_once(make_feed):
    class Broken:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        iter(make_feed(Broken()))


def test_an_error_frees_the_callers_variables_without_a_collection(make_feed):
    class Big:
        pass

    fed = make_feed(DataLoader(Failing(1)))

    def train():
        big = Big()
        gone.append(weakref.ref(big))
        for _ in fed:
            pass

    gone = []
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            train()
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_a_tensor_on_a_third_device_is_named(device, virtual_feed):
    batches = [torch.ones(1), {"x": [1, Frozen(torch.ones(2, 3, device="meta"))]}]
    fed = feed(batches, "cpu") if device == "cpu" else virtual_feed(batches)[0]
    passing = iter(fed)
    next(passing)
    with pytest.raises(FeedError, match=r"batch\['x'\]\[1\]\.value \(torch.float32, size \(2, 3\)\) lives on meta"):
        next(passing)


@pytest.mark.parametrize("depth", [0, -1, 1.5, "2", None, True])
def test_a_depth_that_is_none(depth):
    with pytest.raises(ArgumentError, match="depth is"):
        feed([], "cpu", depth)


def test_a_loader_that_cannot_be_iterated():
    with pytest.raises(ArgumentError, match="int, which cannot be iterated"):
        feed(3, "cpu")


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="cuda:0"):
        feed([], "cuda:0")


# --- endings


class Endless:
    """Yields for ever, and knows whether its iterator is alive."""

    def __init__(self):
        self.alive = 0
        self.threads = set()

    def __iter__(self):
        self.alive += 1
        try:
            i = 0
            while True:
                self.threads.add(threading.current_thread().name)
                yield torch.tensor([float(i)])
                i += 1
        finally:
            self.alive -= 1


def test_leaving_a_loop_ends_the_source_at_once(make_feed):
    source = Endless()
    fed = make_feed(source, 3)
    for batch in fed:
        assert bool(feed_threads()) != make_feed.inline
        if batch.item() == 4:
            break
    assert is_idle(fed)
    assert source.alive == 0  # the source's iterator is gone too, and with it its worker processes
    assert source.threads == {"MainThread" if make_feed.inline else "millstream-feed"}


def test_an_exception_in_the_loop_ends_the_source(make_feed):
    source = Endless()
    fed = make_feed(source)

    def train():
        for _ in fed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert source.alive == 0


def test_a_hundred_early_ends(make_feed):
    source = Endless()
    fed = make_feed(source, 4)
    for i in range(100):
        for batch in fed:
            if batch.item() == i % 5:
                break
        assert source.alive == 0
    assert len(feed_threads()) == (not make_feed.inline)  # one for life


def test_close_ends_a_loop_and_the_thread(make_feed):
    got = []
    with make_feed(Endless()) as fed:
        for batch in fed:
            got.append(batch.item())
            if len(got) == 3:
                fed.close()
    assert got == [0, 1, 2]
    fed.close()
    assert feed_threads() == []
    with pytest.raises(FeedError, match="closed"):
        iter(fed)


def test_an_exhausted_or_closed_pass_stays_so(make_feed):
    fed = make_feed(numbers(2))
    first = iter(fed)
    assert values(first) == [0, 1]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(first)
    second = iter(fed)
    fed.close()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(second)


def test_a_new_pass_ends_the_last_and_says_so(make_feed):
    fed = make_feed(Endless())
    first = iter(fed)
    assert next(first).item() == 0
    second = iter(fed)
    assert workers() == (not make_feed.inline)
    with pytest.raises(FeedError, match="iterated again"):
        next(first)
    assert next(second).item() == 0


def test_a_pass_whose_context_is_closed_does_not_end_as_if_it_were_complete():
    passing = iter(feed(Endless(), "cpu"))
    next(passing)
    context("cpu").close()
    assert feed_threads() == []
    with pytest.raises(FeedError, match="context was closed"):
        next(passing)


def test_a_feed_that_was_never_iterated_or_never_asked(make_feed):
    make_feed(numbers(3)).close()
    passing = iter(make_feed(Endless()))
    assert workers() == (not make_feed.inline)
    del passing


def test_a_pass_in_a_reference_cycle_is_ended_by_the_collector(make_feed):
    source = Endless()
    passing = iter(make_feed(source))
    next(passing)
    cycle = [passing]
    cycle.append(cycle)
    del passing, cycle
    gc.collect()
    assert source.alive == 0


class Gate:
    """Yields two batches; the second one when it is opened."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __iter__(self):
        yield torch.tensor([0.0])
        self.entered.set()
        self.open.wait()
        yield torch.tensor([1.0])


@WITH_WORKER
def test_leaving_does_not_wait_for_a_source_that_does_not_return(make_feed):
    gate = Gate()
    fed = make_feed(gate)
    passing = iter(fed)
    assert next(passing).item() == 0
    consumer = threading.Thread(target=lambda: [*passing])
    consumer.start()
    gate.entered.wait()
    fed.close()
    consumer.join(HANG_S)
    assert not consumer.is_alive()
    (thread,) = (each for each in feed_threads() if each.name == "millstream-feed")
    gate.open.set()
    thread.join(HANG_S)
    assert feed_threads() == []


@WITH_WORKER
def test_a_new_pass_waits_until_the_last_has_left_the_source(make_feed):
    opened = threading.Event()

    class Slow:
        entered, inside = threading.Event(), 0

        def __iter__(self):
            for i in range(4):
                self.inside += 1
                assert self.inside == 1
                if i == 2 and not opened.is_set():
                    self.entered.set()
                    while not opened.is_set():  # not in a lock, from which it would be called away
                        pass
                self.inside -= 1
                yield torch.tensor([float(i)])

    source = Slow()
    fed = make_feed(source)
    passing = iter(fed)
    next(passing), next(passing)  # the third is pulled ahead
    source.entered.wait()
    del passing
    again = iter(fed)
    timer = threading.Timer(0.05, opened.set)
    timer.start()
    assert values(again) == [0, 1, 2, 3]
    assert opened.is_set()
    timer.join()


@WITH_WORKER
def test_the_source_is_begun_and_asked_in_the_feeds_thread(make_feed):
    class Where:
        def __iter__(self):
            self.begun = threading.current_thread()
            return self

        def __next__(self):
            self.run = threading.current_thread()
            raise StopIteration

    source = Where()
    assert list(make_feed(source)) == []
    assert source.begun is source.run is not threading.current_thread()
    assert source.run.daemon


def test_no_more_is_pulled_ahead_than_promised(make_feed):
    pulled = []

    def source():
        for i in range(100):
            pulled.append(i)
            yield torch.tensor([float(i)])

    for depth in DEPTHS:
        pulled.clear()
        passing = iter(make_feed(source(), depth))
        for i in range(10):
            next(passing)
            assert len(pulled) - (i + 1) <= depth + 1
        del passing


@WITH_WORKER
def test_a_thread_that_cannot_be_started(make_feed, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(make_feed(numbers(3)))


def test_repr():
    fed = feed([1], "cpu", 3)
    assert repr(fed) == "<Feed of list to cpu, depth 3>"
    fed.close()
    assert repr(fed).endswith("depth 3, closed>")
    assert fed.place == Place("cpu")


# --- the end of the process


BEGIN = """
    import itertools, os, signal, sys, threading, torch
    from millstream.data import feed
    def source():
        for i in itertools.count():
            yield torch.tensor([float(i)])
    passing = iter(feed(source(), "cpu"))
    print(next(passing).item())
"""


def test_the_interpreter_ends_while_passes_are_open():
    done = run_python(
        BEGIN
        + """
    import gc
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.arange(1000.0)), num_workers=1)
    other = iter(feed(loader, "cpu"))
    print(next(other)[0].item())
    gc.disable()
    keep = [passing]
    keep.append(keep)  # dies, if at all, when the interpreter does
    del passing
    sys.exit(0)
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0.0\n0.0\n", "", 0)


def test_ctrl_c_while_waiting_for_a_batch():
    done = run_python("""
        import os, signal, threading, torch
        from millstream.data import feed
        from tests.clocks import is_in, until
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
        release = threading.Event()
        def source():
            yield torch.tensor([0.0])
            main = threading.main_thread()  # must wait by then: Python drops an interrupt that comes in a finalizer
            until(lambda: threading.current_thread() is main or is_in(main, "_wait_for_item"))
            os.kill(os.getpid(), signal.SIGINT)
            release.wait()
        try:
            for batch in feed(source(), "cpu"):
                pass
        except KeyboardInterrupt:
            release.set()
            print("interrupted")
    """)
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize("make_feed", [WAYS[0], WAYS[2]], indirect=True)
@pytest.mark.parametrize("when", ["another pass begins", "a batch is asked for", "a pass ends", "it is closed"])
def test_an_interrupt_at_any_moment_does_not_lock_a_feed(make_feed, when, monkeypatch):
    """Ctrl-C is one, and a DataLoader's news of a killed worker."""
    monkeypatch.setattr(
        importlib.import_module("millstream.data.passes.pass_life"), "JOIN_S", 0.1
    )  # for a lock that Ctrl-C has met
    loader = DataLoader(torch.arange(6.0), batch_size=None)

    def run(interrupter):
        fed = make_feed(loader)
        passing = iter(fed)
        next(passing)
        acts = {
            "another pass begins": lambda: iter(fed),
            "a batch is asked for": lambda: next(passing),
            "a pass ends": lambda: list(passing),
            "it is closed": fed.close,
        }
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.run(acts[when])
        got = []
        others = [threading.Thread(target=fed.close, daemon=True)]
        if when != "it is closed":
            others.insert(0, threading.Thread(target=lambda: got.extend(values(fed)), daemon=True))
        for thread in others:  # this one would never come back
            thread.start()
            thread.join(HANG_S)
            assert not thread.is_alive(), interrupter.where
        assert got == ([] if when == "it is closed" else list(range(6)))

    # Not Python's own start of a thread, which can be left locked.
    assert interrupt_everywhere(
        run,
        "/threading.py",
        "/data/passes/worker.py",
        "/data/passes/run.py",
        "/data/passes/pass_life.py",
        "/data/feed_engine.py",
        "/data/feeding.py",
    )


@pytest.mark.parametrize("make_feed", WAYS, indirect=True)
def test_after_an_interrupt_in_next_an_iterator_goes_on_in_the_next_pass(make_feed, monkeypatch):
    """In batches that are pulled in step, in a later one, and where there is no more."""
    monkeypatch.setattr(
        importlib.import_module("millstream.data.passes.pass_life"), "JOIN_S", 0.1
    )  # for a lock that Ctrl-C has met

    class Counting:
        """Unlike a generator, an iterator of one's own continues after an interrupt."""

        def __init__(self):
            self.numbers = iter(range(5))

        def __iter__(self):
            return self

        def __next__(self):
            return torch.tensor(float(next(self.numbers)))

    def run(interrupter, num_before, transform):
        fed, got, errors = make_feed(Counting(), transform=transform), [], []
        passing = iter(fed)
        held = [next(passing) for _ in range(num_before)]
        before = [abs(int(batch)) for batch in held]
        del held[:-1]  # as a loop does

        def go_on():
            try:
                got.extend(abs(number) for number in values(fed))
            except BaseException as error:  # noqa: BLE001 - in a thread nobody would see it
                errors.append(error)

        with contextlib.suppress(KeyboardInterrupt, StopIteration):
            before.append(abs(int(interrupter.run(lambda: next(passing)))))
        assert num_before == 5 or fed.state_dict()["position"] == len(before)
        other = threading.Thread(target=go_on, daemon=True)
        other.start()
        other.join(HANG_S)
        assert not other.is_alive(), interrupter.where
        assert not errors, (interrupter.where, errors)
        # Without a worker the batch that was being made may be lost, as in a plain loop.
        expected = list(range(5))
        is_lost = make_feed.inline and before + got != expected
        del expected[len(before) : len(before) + is_lost]
        assert before + got == expected, interrupter.where
        fed.close()

    names = (
        "run.py",
        "pass_life.py",
        "feed_engine.py",
        "feeding.py",
        "pipeline.py",
        "source.py",
        "position.py",
        "generators.py",
    )
    names += ("transfer/transfer.py", "transfer/to_gpu.py", "transfer/buffers.py")
    files = [f"/data/{name}" for name in names]
    for num_before, transform in ((0, torch.neg), (1, torch.neg), (1, None), (3, torch.neg), (5, torch.neg)):
        assert interrupt_everywhere(partial(run, num_before=num_before, transform=transform), *files)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_hangs_nor_feeds_from_the_parents_pass():
    done = run_python(
        BEGIN
        + """
    import gc, warnings
    from millstream.errors import FeedError
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(passing)
        except FeedError as error:
            code = 7 if "forked" in str(error) else 2
        del passing
        gc.collect()
        mine = iter(feed([torch.tensor([5.0])], "cpu"))
        code = code if next(mine).item() == 5 else 3
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(next(passing).item())
"""
    )
    assert (done.stdout, done.stderr) == ("0.0\n7\n1.0\n", "")


@pytest.mark.parametrize("stop", ["break", "error", "close"])
def test_a_hundred_ends_leave_nothing(make_feed, stop):
    def train(fed):
        for batch in fed:
            if batch.item() == 1:
                if stop == "break":
                    break
                if stop == "error":
                    raise LookupError
                fed.close()

    for _ in range(100):
        with contextlib.suppress(LookupError):
            train(make_feed(Endless()))
        assert feed_threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals")
def test_a_worker_process_that_is_killed_is_reported_and_leaves_nothing():
    # In a process of its own: PyTorch's signal handler raises wherever the main thread happens to be.
    done = run_python("""
        import gc, multiprocessing, os, signal, threading, time, torch
        from torch.utils.data import DataLoader, Dataset
        from millstream.data import feed
        from tests.clocks import until
        class Murderous(Dataset):
            def __len__(self):
                return 40
            def __getitem__(self, i):
                if i == 17:
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.tensor([float(i)])
        fed, got = feed(DataLoader(Murderous(), num_workers=2), "cpu"), []
        def train():
            for batch in fed:
                got.append(batch.item())
                time.sleep(0.01)
        try:
            train()
        except RuntimeError as error:
            print("killed by signal" in str(error) or "exited unexpectedly" in str(error))
        print(got == list(range(len(got))) and len(got) <= 17)
        fed.close()
        gc.collect()
        until(lambda: threading.active_count() == 1)  # PyTorch takes some seconds to notice that its worker is dead
        print(threading.active_count(), multiprocessing.active_children())
    """)
    assert done.stdout == "True\nTrue\n1 []\n", done.stderr
    assert done.returncode == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0).split(1))


def test_an_iterable_dataset(make_feed):
    assert values(make_feed(DataLoader(Stream(), batch_size=None))) == [0, 1, 2, 3, 4, 5]


@WITH_WORKER
def test_who_waits_for_the_first_batch_is_woken_by_close(make_feed):
    may_go_on, ends = threading.Event(), []

    def source():
        may_go_on.wait(HANG_S)
        yield torch.zeros(1)

    fed = make_feed(source())
    consumer = threading.Thread(target=lambda: ends.append(len(list(fed))))
    consumer.start()
    while fed._engine.run is None:
        pass
    closer = threading.Thread(target=fed.close)
    closer.start()
    consumer.join(HANG_S)
    assert ends == [0]
    may_go_on.set()
    closer.join(HANG_S)


def test_a_device_that_is_none():
    for device in (-1, None, 1.5):
        with pytest.raises(DeviceError, match="named by a string"):
            feed([], device)


@pytest.mark.parametrize("ending", ["", "break"], ids=["to its end", "left"])
def test_a_profiler_works_after_a_pass(ending):
    """In Python 3.11 one hangs where the signal of an exception for another thread was left set."""
    said = output_of(
        f"""
        import queue, sys, threading
        import millstream as ms

        waiting = queue.Queue()
        def source():
            while (item := waiting.get()) is not None:
                yield item
        for item in ([1, 2, None] if not {ending!r} else [1]):
            waiting.put(item)
        for item in ms.feed(source(), "cpu"):
            {ending or "pass"}
        calls = []
        sys.setprofile(lambda *event: calls.append(event))
        def function():
            return 1
        function()
        sys.setprofile(None)
        print(len(calls) > 0)
        """
    )
    assert said.strip() == "True"


@WITH_WORKER
def test_an_error_that_nobody_asks_for_any_more_keeps_nothing_alive(make_feed):
    """As where a loader's worker was killed: its error leads to the loader's iterator, and to the other workers."""
    is_inside, lock, seen = threading.Event(), threading.Lock(), []

    class Held:
        pass

    class Loader:
        def __iter__(self):
            held = Held()
            seen.append(weakref.ref(held))
            yield from (torch.ones(2) for _ in range(3))
            is_inside.set()
            with lock:
                raise ValueError(held)

    fed = make_feed(Loader())
    lock.acquire()
    passing = iter(fed)
    next(passing), next(passing)  # from here on it is read ahead
    assert is_inside.wait(HANG_S)
    del passing
    lock.release()
    is_over = threading.Event()
    fed._engine._worker.submit(is_over.set)  # the thread's next job, when the pass has ended
    assert is_over.wait(HANG_S)
    gc.collect()
    assert seen[0]() is None


def test_a_generators_batches_are_freed_once_they_are_used(make_feed):
    def source():
        for number in range(8):
            batch = torch.full((2,), float(number))
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    seen = []
    passing = iter(make_feed(source()))
    for number in range(7):
        assert next(passing)[0] == number
    assert seen[0]() is None
    assert seen[1]() is None


def test_a_second_thread_that_asks_a_pass_is_refused_and_takes_nothing(make_feed):
    def source():
        yield torch.tensor(0)
        is_inside.set()
        assert may_go_on.wait(HANG_S)
        yield from map(torch.tensor, range(1, 4))

    is_inside, may_go_on, got = threading.Event(), threading.Event(), []
    passing = iter(make_feed(source()))
    got.append(next(passing).item())
    other = threading.Thread(target=lambda: got.append(next(passing).item()))
    other.start()
    assert is_inside.wait(HANG_S)
    with pytest.raises(FeedError, match="by another thread"):
        next(passing)
    may_go_on.set()
    other.join(HANG_S)
    got += [batch.item() for batch in passing]
    assert got == [*range(4)]


def test_a_source_that_asks_its_own_pass_is_told_so(make_feed):
    def source():
        yield torch.tensor(0)
        with pytest.raises(FeedError, match="by the source itself"):
            next(passing)
        yield torch.tensor(1)

    passing = iter(make_feed(source()))
    assert [batch.item() for batch in passing] == [0, 1]
