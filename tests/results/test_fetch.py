"""Results on their way to the host, on the CPU and on virtual devices, quick ones and such as take their time."""

import asyncio
import sys
import threading
import time
import types
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.data import register
from millstream.data.transfer.batch_layout import view_leaf
from millstream.device import Place, StreamMarker
from millstream.errors import ArgumentError, DeviceError, FeedError
from millstream.results import fetch, fetch_each
from millstream.results import fetcher as fetcher_module
from millstream.results.fetcher import LARGE_BYTES, POOL_BYTES, Fetcher
from millstream.results.pool import ResultPool, Stretch
from millstream.results.result import Fetched, Result, fail
from millstream.tree import batches
from tests.device.virtual_device import make_virtual_context
from tests.interrupts import interrupt_everywhere

DEADLINE_S = 20


class Pair(NamedTuple):
    loss: object
    scores: object


@pytest.fixture(params=["eager", "lazy", "random"])
def fetcher(request):
    ctx, device = make_virtual_context(request.param)
    made = Fetcher(ctx)
    ctx.attach(made)
    made.device = device
    yield made
    ctx.close()
    assert not any(thread.name == "millstream-fetch" for thread in threading.enumerate())


def test_numbers_and_trees_on_the_cpu():
    assert fetch(torch.tensor(2.5)).result() == 2.5
    x = torch.ones(2, requires_grad=True)
    got = fetch({"x": x * 2, "n": 3, "pair": Pair(torch.tensor(1), np.ones(1))}, step=4)
    assert got.step == 4
    value = got.result()
    assert value["x"].tolist() == [2.0, 2.0]
    assert not value["x"].requires_grad
    assert (value["n"], value["pair"].loss) == (3, 1)
    y = torch.zeros(2)
    later = fetch(y)
    y.add_(1)
    assert later.result().tolist() == [0.0, 0.0]


class Boxes(torch.Tensor):
    """A subclass as those of torchvision."""


@pytest.mark.filterwarnings("ignore:.*(Quantized|quantization|deprecated)")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_mkldnn,
        lambda x: x.as_subclass(Boxes),
        lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8),
    ],
    ids=["sparse", "mkldnn", "subclass", "quantized"],
)
def test_tensors_that_are_more_than_bytes_come_back_as_they_are(fetcher, make):
    value = make(torch.eye(3))
    for got in (fetcher.put([value]).result(DEADLINE_S), fetch([value]).result(DEADLINE_S)):
        assert type(got[0]) is type(value)
        assert got[0] is not value
        assert (got[0].layout, got[0].is_quantized) == (value.layout, value.is_quantized)
        dense = got[0] if got[0].layout is torch.strided else got[0].to_dense()
        assert (dense.dequantize() if dense.is_quantized else dense).tolist() == torch.eye(3).tolist()


class Graph:
    place = "device"

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.place = device
        return self


def test_objects_that_move_in_place_stay_where_they_are(fetcher):
    graph = Graph(torch.ones(2))
    grown = Graph(torch.ones(2, requires_grad=True) * 2)  # cannot be copied deeply
    got, other = fetcher.put([graph, grown]).result(DEADLINE_S)
    graph.x.fill_(7)
    assert (graph.place, grown.place, got.place, other.place) == ("device", "device", "cpu", "cpu")
    assert got.x.tolist() == [1, 1]
    assert other.x.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_tensors_that_wrap_others_come_back_whole(fetcher):
    masked = torch.masked.masked_tensor(torch.arange(4.0), torch.arange(4) > 1)
    got = fetcher.put(masked).result(DEADLINE_S)
    assert type(got) is type(masked)
    assert got.get_mask().tolist() == [False, False, True, True]


def test_a_result_is_as_it_was_when_it_was_asked_for(fetcher):
    loss = torch.zeros(())
    futures = []
    for i in range(100):
        loss.fill_(i)
        futures.append(fetcher.put(loss, step=i))
    assert [future.result(DEADLINE_S) for future in futures] == list(range(100))


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=20))
def test_trees_of_all_sizes_come_back_in_order(sizes):
    ctx, _ = make_virtual_context("eager")
    fetcher, order = Fetcher(ctx), []
    ctx.attach(fetcher)
    values = [[torch.arange(float(size)) for size in each] for each in sizes]
    futures = [fetcher.put(value, callback=lambda _, i=i: order.append(i)) for i, value in enumerate(values)]
    for future, value in zip(futures, values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(future.result(DEADLINE_S), value, strict=True))
    ctx.close()
    assert sorted(order) == list(range(len(values)))
    on_device = [i for i, value in enumerate(values) if value]
    assert [i for i in order if i in on_device] == on_device


def test_large_results_and_a_full_pool_wait_their_turn(fetcher):
    small = [torch.full((LARGE_BYTES // 8,), float(i)) for i in range(40)]  # half of what is large: the pool is passed
    large = [torch.full((POOL_BYTES,), float(i)) for i in range(3)]
    futures = [fetcher.put([a]) for a in small[:20]] + [fetcher.put([a]) for a in large]
    futures += [fetcher.put([a]) for a in small[20:]]
    for future, tensor in zip(futures, small[:20] + large + small[20:], strict=True):
        assert torch.equal(future.result(DEADLINE_S)[0], tensor)
    assert not fetcher._stretches._taken
    assert fetcher.context._arena.num_lent == 1  # the pool's own


def test_what_is_asked_for_while_a_copy_is_under_way_travels_together(fetcher):
    gate = threading.Event()
    fetcher.put(torch.zeros(1), callback=lambda _: gate.wait(DEADLINE_S)).add_done_callback(lambda _: None)
    futures = [fetcher.put(torch.tensor(float(i))) for i in range(50)]
    gate.set()
    assert [future.result(DEADLINE_S) for future in futures] == list(range(50))
    assert fetcher.num_copies <= 4


def test_results_of_steps_to_come_do_not_hold_up_the_first(fetcher, monkeypatch):
    monkeypatch.setattr(fetcher, "_is_ready", lambda _: False)
    gate, done = threading.Event(), []
    fetcher.put(torch.zeros(()), callback=lambda _: gate.wait(DEADLINE_S))
    futures = [fetcher.put(torch.tensor(i), callback=done.append) for i in range(5)]
    gate.set()
    assert [future.result(DEADLINE_S) for future in futures] == list(range(5))
    assert fetcher.num_copies == 6
    assert done == list(range(5))


def test_who_asks_for_too_much_waits():
    ctx, _ = make_virtual_context("eager")
    fetcher = Fetcher(ctx, depth=2)
    ctx.attach(fetcher)
    gate, put = threading.Event(), []
    fetcher.put(torch.zeros(()), callback=lambda _: gate.wait(DEADLINE_S))

    def ask():
        put.extend(fetcher.put(torch.tensor(i)) for i in range(5))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.1)
    assert len(put) <= 2
    gate.set()
    thread.join(DEADLINE_S)
    assert [future.result(DEADLINE_S) for future in put] == list(range(5))
    ctx.close()


def test_an_error_of_the_device_is_raised_with_its_step(fetcher):
    good = fetcher.put(torch.tensor(1.0), step=0)
    assert good.result(DEADLINE_S) == 1
    copy = fetcher.device.copy

    def fail(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fetcher.device.copy = fail
    futures = [fetcher.put(torch.tensor(1.0), step=i) for i in (7, 8)]
    for future in futures:
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            future.result(DEADLINE_S)
        assert caught.value.__notes__ == [f"Raised while the result of step {future.step} was fetched."]
    fetcher.device.copy = copy
    assert fetcher.put(torch.tensor(2.0)).result(DEADLINE_S) == 2


def test_who_does_not_want_a_result_any_more_does_not_hold_up_others(fetcher):
    gate = threading.Event()
    fetcher.put(torch.zeros(()), callback=lambda _: gate.wait(DEADLINE_S))
    unwanted, wanted = fetcher.put(torch.tensor(1)), fetcher.put(torch.tensor(2))

    async def give_up():
        await asyncio.wait_for(unwanted, 0.01)

    assert not unwanted.cancel()
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    gate.set()
    assert (wanted.result(DEADLINE_S), unwanted.result(DEADLINE_S)) == (2, 1)


class UncopyableError(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what} {why}")


class Odd:
    """Cannot be made again."""


def make_odd(parts):
    raise UncopyableError("no", "way")


@pytest.fixture
def odd():
    register(Odd, lambda odd: ([torch.zeros(())], make_odd))
    yield Odd()
    batches._registered.pop(Odd)
    batches._sorts.clear()


def test_nor_does_an_error_that_cannot_be_copied(fetcher, odd):
    failed, wanted = fetcher.put(odd, step=3), fetcher.put(torch.tensor(2))
    assert wanted.result(DEADLINE_S) == 2
    with pytest.raises(UncopyableError, match="no way") as caught:
        failed.result(DEADLINE_S)
    assert "step 3" in caught.value.__notes__[0]
    with pytest.raises(UncopyableError, match="no way"):
        fetch(odd).result()


def test_a_callback_may_fetch_when_all_places_are_taken():
    ctx, _ = make_virtual_context("eager")
    fetcher = Fetcher(ctx, depth=2)
    ctx.attach(fetcher)
    gate, later = threading.Event(), []

    def fetch_more(_):
        gate.wait(DEADLINE_S)
        later.extend(fetcher.put(torch.tensor(10 + i)) for i in range(5))

    first = fetcher.put(torch.tensor(0), callback=fetch_more)
    callers = [threading.Thread(target=fetcher.put, args=(torch.zeros(LARGE_BYTES // 8),)) for _ in range(20)]
    for caller in callers:
        caller.start()
    gate.set()
    for caller in callers:
        caller.join(DEADLINE_S)
        assert not caller.is_alive()
    assert first.result(DEADLINE_S) == 0
    last = fetcher.put(torch.tensor(1))  # after those of the callback
    assert last.result(DEADLINE_S) == 1
    assert [future.result(DEADLINE_S) for future in later] == [10, 11, 12, 13, 14]
    ctx.close()
    assert ctx.pinned_bytes == 0


@pytest.mark.parametrize("make", [lambda x: (x[0], x), lambda x: (x[:4], x[2:8]), lambda x: {"all": x, "even": x[::2]}])
def test_results_that_share_memory(fetcher, make):
    torch.testing.assert_close(fetcher.put(make(torch.arange(8.0))).result(DEADLINE_S), make_plain(make))


def make_plain(make):
    made = make(torch.arange(8.0))
    return (0.0, made[1]) if isinstance(made, tuple) and made[0].dim() == 0 else made


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_nor_does_a_callback_that_raises_anything(fetcher, error, caplog):
    def fail(_):
        raise error

    assert fetcher.put(torch.tensor(1), callback=fail).result(DEADLINE_S) == 1
    assert fetcher.put(torch.tensor(2)).result(DEADLINE_S) == 2
    assert "callback" in caplog.text


def test_nor_does_a_result_that_cannot_be_read(fetcher, monkeypatch):
    def view(memory, start, spec):
        if spec.size == (3,) and threading.current_thread() is fetcher._thread:
            raise MemoryError("no memory for three")
        return view_leaf(memory, start, spec)

    monkeypatch.setattr(sys.modules[Result.__module__], "view_leaf", view)
    gate = threading.Event()
    fetcher.put(torch.zeros(()), callback=lambda _: gate.wait(DEADLINE_S))
    unreadable, wanted = fetcher.put(torch.zeros(3), step=7), fetcher.put(torch.tensor(2))
    gate.set()
    assert wanted.result(DEADLINE_S) == 2
    with pytest.raises(MemoryError, match="three") as caught:
        unreadable.result(DEADLINE_S)
    assert "step 7" in caught.value.__notes__[0]


def test_bad_requests(fetcher):
    with pytest.raises(FeedError, match="do not know"):
        fetch(object())
    fetcher.device.capturing = True
    with pytest.raises(FeedError, match="being captured"):
        fetcher.put(torch.ones(1))
    fetcher.device.capturing = False
    fetcher.close()
    fetcher.close()
    with pytest.raises(DeviceError, match="closed"):
        fetcher.put(torch.ones(1))
    with pytest.raises(ArgumentError, match="ahead is 0"):
        fetch_each([], ahead=0)


@pytest.mark.parametrize("num_values", [0, 1, 3, 4, 20])
def test_results_in_a_loop_come_some_steps_behind(num_values):
    made = []

    def steps():
        for i in range(num_values):
            made.append(i)
            yield torch.tensor(i)

    for i, value in enumerate(fetch_each(steps(), ahead=3)):
        assert value == i
        assert len(made) <= i + 4
    assert len(made) == num_values


def test_an_error_in_a_loop_comes_behind_the_results_before():
    def steps():
        yield from (torch.tensor(i) for i in range(5))
        raise LookupError("no more")

    got = []
    with pytest.raises(LookupError, match="no more"):
        got.extend(fetch_each(steps()))
    assert got == list(range(5))


def test_a_result_that_is_asked_for_while_the_fetcher_is_closed_has_an_end(fetcher, monkeypatch):
    fetcher.put(torch.tensor(0.0)).result(DEADLINE_S)
    snapshot, is_in, may_go_on, ends = fetcher._snapshot, threading.Event(), threading.Event(), []

    def wait_and_snapshot(*arguments, **options):
        is_in.set()
        may_go_on.wait(DEADLINE_S)
        snapshot(*arguments, **options)

    monkeypatch.setattr(fetcher, "_snapshot", wait_and_snapshot)
    caller = threading.Thread(target=lambda: ends.append(fetcher.put(torch.tensor(1.0))))
    caller.start()
    is_in.wait(DEADLINE_S)
    closer = threading.Thread(target=fetcher.close)
    closer.start()
    while not fetcher._stopped.is_set():
        pass
    may_go_on.set()
    caller.join(DEADLINE_S)
    closer.join(DEADLINE_S)
    with pytest.raises(DeviceError, match="closed"):
        ends[0].result(DEADLINE_S)


def test_closing_in_a_callback_ends_the_thread(fetcher):
    fetcher.put(torch.tensor(1.0), callback=lambda _: fetcher.close())
    fetcher._thread.join(DEADLINE_S)
    assert not fetcher._thread.is_alive()
    with pytest.raises(DeviceError, match="closed"):
        fetcher.put(torch.tensor(2.0))


def test_what_is_expanded_to_no_rows_overwrites_nothing(fetcher):
    scores, row = torch.arange(20_000.0), torch.full((1000,), 7.0)
    found, nothing = fetcher.put((scores, row[None].expand(0, 1000))).result(DEADLINE_S)
    assert torch.equal(found, scores)
    assert nothing.shape == (0, 1000)


def test_a_thread_that_the_system_refuses_is_an_error(fetcher, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            fetcher.put(torch.ones(2))
    assert fetcher.put(torch.ones(2)).result(DEADLINE_S).sum() == 2


def test_awaiting():
    async def run():
        got = [value async for value in fetch_each((torch.tensor(i) for i in range(5)), ahead=2)]
        return [*got, await fetch(torch.tensor(9))]

    assert asyncio.run(run()) == [0, 1, 2, 3, 4, 9]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_stretches_of_the_pool_never_overlap(moves):
    pool, model = ResultPool(32, 4), []
    for give_back, size in moves:
        if give_back:
            if model:
                given_back = model.pop(size % len(model))  # not only the oldest
                pool.give_back(given_back)
                pool.give_back(given_back)
            assert not [each for each in model if each not in pool._taken]
            continue
        stretch = Stretch()
        if not pool._place(stretch, size):
            assert model  # an empty pool has room for anything that fits into it
            continue
        assert stretch.start >= 0
        assert stretch.end == stretch.start + size <= 32
        assert all(stretch.end <= other.start or other.end <= stretch.start for other in model)
        model.append(stretch)
    for stretch in model:
        pool.give_back(stretch)
    assert not pool._taken


def test_ctrl_c_at_any_moment_loses_no_place_and_no_space():
    """Each run fetches a result that is interrupted, and then more of them than there are places."""

    def run(interrupter):
        ctx, _ = make_virtual_context("eager")
        fetcher = Fetcher(ctx, depth=2)
        ctx.attach(fetcher)
        assert fetcher.put(torch.tensor(0.0)).result(DEADLINE_S) == 0
        with suppress(KeyboardInterrupt):
            interrupter.run(lambda: fetcher.put(torch.tensor(1.0)))
        futures = []
        thread = threading.Thread(
            target=lambda: futures.extend(fetcher.put(torch.tensor(float(i))) for i in range(2, 8)), daemon=True
        )
        thread.start()
        thread.join(DEADLINE_S)
        assert [future.result(DEADLINE_S) for future in futures] == list(range(2, 8))
        for _ in range(2000):  # the last one's place comes back after its result
            if not (fetcher._stretches._num_counted or fetcher._stretches._taken):
                break
            time.sleep(0.005)
        assert not fetcher._stretches._num_counted
        assert not fetcher._stretches._taken
        ctx.close()

    assert len(interrupt_everywhere(run, "/results/fetcher.py", "/results/pool.py")) > 20


def test_space_of_a_call_that_ctrl_c_ended_is_free_when_its_stream_is_through_and_not_before(monkeypatch):
    ctx, _ = make_virtual_context("eager")
    fetcher, marks = Fetcher(ctx), []
    ctx.attach(fetcher)
    reached, asked = threading.Event(), threading.Event()

    def wait(context, event, stopped):
        asked.set()
        return reached.wait(DEADLINE_S)

    def mark(*arguments, **options):
        marks.append(arguments)
        if len(marks) == 2:  # the first is of the pool itself; this one stands after the copy into it
            raise KeyboardInterrupt
        return StreamMarker(*arguments, **options)

    module = sys.modules[Fetcher.__module__]  # whose name in its package is that of the function
    monkeypatch.setattr(module, "wait_until_reached", wait)
    monkeypatch.setattr(module, "StreamMarker", mark)
    with pytest.raises(KeyboardInterrupt):
        fetcher.put(torch.tensor(1.0))
    assert asked.wait(DEADLINE_S)
    assert len(fetcher._stretches._taken) == 1
    reached.set()
    ctx.close()
    assert not fetcher._stretches._taken


def test_ctrl_c_in_the_first_call_leaves_a_fetcher_that_works():
    def run(interrupter):
        ctx, _ = make_virtual_context("eager")
        fetcher = Fetcher(ctx, depth=2)
        ctx.attach(fetcher)
        with suppress(KeyboardInterrupt):
            interrupter.run(lambda: fetcher.put(torch.tensor(1.0)))
        assert [fetcher.put(torch.tensor(float(i))).result(DEADLINE_S) for i in range(5)] == list(range(5))
        ctx.close()

    assert len(interrupt_everywhere(run, "/results/fetcher.py")) > 5


def test_one_fetcher_per_device():
    from millstream.results.fetching import _find_fetcher

    assert fetch(torch.tensor(1)).result() == 1
    first = _find_fetcher(Place("cpu"))
    assert _find_fetcher(Place("cpu")) is first
    first.context.close()
    assert _find_fetcher(Place("cpu")) is not first


class Failing:
    def __init__(self, value):
        self.value = value


def make_badly(parts):
    try:
        raise KeyError("inner")
    except KeyError as inner:
        error = ValueError("outer")
        error.add_note("the user's own note")
        raise error from inner


def test_an_error_keeps_where_it_came_from_and_has_the_note_of_its_step_only():
    register(Failing, lambda node: ([node.value], make_badly))
    for step in (1, 2):
        with pytest.raises(ValueError, match="outer") as caught:
            fetch(Failing(torch.ones(3)), step=step).result()
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.traceback[-1].name == "make_badly"
        assert not any(entry.name in ("put", "_bring_all") for entry in caught.traceback)
        assert caught.value.__notes__ == [
            "the user's own note", f"Raised while the result of step {step} was fetched."
        ]  # fmt: skip


def test_one_error_of_several_results_has_a_note_for_each():
    error, results = make_error(), [types.SimpleNamespace(future=Fetched(step)) for step in (1, 2)]
    for result in results:
        fail(result, error)
    notes = [result.future.exception().__notes__ for result in results]
    assert [len(each) for each in notes] == [2, 2]
    assert error.__notes__ == ["first"]


def make_error():
    error = RuntimeError("of the device")
    error.add_note("first")
    return error


def test_the_event_that_is_waited_for_is_lent_to_nobody_else(fetcher, monkeypatch):
    wait, seen = fetcher_module.wait_until_reached, []

    def look(context, event, stopped):
        seen.append(any(event is idle for idle in context.events._idle[False]))
        return wait(context, event, stopped)

    monkeypatch.setattr(fetcher_module, "wait_until_reached", look)
    for i in range(20):
        assert fetcher.put(torch.full((1000,), float(i))).result(DEADLINE_S)[0] == i
    assert seen == [False] * 20


class Boxed:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        raise StopIteration


def stop(_):
    raise StopIteration


@pytest.mark.parametrize("where", ["take apart", "put together", "move"])
def test_a_type_that_raises_stop_iteration_ends_nothing(monkeypatch, where):
    take_apart = stop if where == "take apart" else lambda box: ([box.tensor], stop)
    monkeypatch.setattr(batches, "_registered", dict(batches._registered))
    if where != "move":
        register(Boxed, take_apart)
    results = iter(fetch_each([1, Boxed(torch.ones(1)), 3]))
    assert next(results) == 1
    with pytest.raises(FeedError, match="StopIteration"):
        next(results)

    async def get():
        await asyncio.wait_for(asyncio.wrap_future(fetch(Boxed(torch.ones(1)))), DEADLINE_S)

    with pytest.raises(FeedError, match="StopIteration"):
        asyncio.run(get())


def test_a_callback_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(ArgumentError, match="callback is 3"):
        fetch(torch.ones(1), callback=3)


def test_pinned_memory_that_a_late_copy_still_writes_is_lent_to_nobody(monkeypatch):
    monkeypatch.setattr(fetcher_module, "JOIN_S", 0.1)
    ctx, device = make_virtual_context("lazy")
    monkeypatch.setattr(device, "run_some", lambda: None)  # it makes no progress while it is asked
    fetcher = Fetcher(ctx)
    value = ctx.driver.allocate(LARGE_BYTES * 2)
    raw = device.raw(value)
    ctx.current_stream().enqueue(lambda: raw.fill(7))
    result = fetcher.put(value)
    deadline = time.monotonic() + DEADLINE_S
    while not fetcher.num_copies and time.monotonic() < deadline:
        time.sleep(0.01)
    fetcher.close()
    with pytest.raises(DeviceError, match="before the result had come"):
        result.result(DEADLINE_S)
    block = ctx.pinned(LARGE_BYTES * 2).fill_(1)
    device.synchronize()
    assert bool((block == 1).all())
    ctx.close()
