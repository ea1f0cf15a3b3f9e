"""Which inputs are read where they lie: the decisions alone, and with captured programs on a pretended device."""

import math
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.api import executables
from millstream.device import DeviceContext
from millstream.engine.cuda import captured, cuda_graph, in_place
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.cuda.in_place import (
    LARGE_BYTES,
    LEAST_BYTES,
    LEAST_RETURNS,
    LEAST_SHARE,
    MOST_GRAPHS,
    PATIENCE,
    SAMPLES,
    CopyTrial,
    InPlaceCache,
)
from millstream.engine.cuda.replayer import Replayer, are_apart, bytes_in_place
from millstream.errors import CaptureError, DeviceError, PlanError
from millstream.lower import Phase
from millstream.schedule import Scheduling, plan_serial
from tests import networks
from tests.engines.become import become

MIB = 1 << 20


def call(in_place, addresses):
    """Make a call as ``Replayer`` does; a graph is named for its addresses."""
    graph = in_place.find(addresses)
    if graph is None and in_place.miss(addresses):
        graph = f"graph at {addresses}"
        in_place.keep(addresses, graph)
    return graph


def slot(number):
    return (number << 20,)


# --- in_place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, MOST_GRAPHS])
def test_a_pool_gets_a_graph_per_buffer_once_it_has_come_round_twice(depth):
    in_place = InPlaceCache({0: MIB})
    graphs = [call(in_place, slot(1 + turn % depth)) for turn in range(5 * depth)]
    assert graphs[: LEAST_RETURNS * depth] == [None] * LEAST_RETURNS * depth
    assert graphs[LEAST_RETURNS * depth :] == [f"graph at {slot(1 + i)}" for i in range(depth)] * (5 - LEAST_RETURNS)
    assert len(in_place) == depth


def test_addresses_that_never_come_back_get_no_graph():
    in_place = InPlaceCache({0: MIB})
    assert all(call(in_place, slot(number)) is None for number in range(1, 200))
    assert len(in_place) == 0


def test_of_more_addresses_than_graphs_some_are_copied_for_good():
    """Were a graph taken from one that serves for one that would, each call would capture."""
    in_place = InPlaceCache({0: MIB})
    depth = MOST_GRAPHS + 4
    first = [call(in_place, slot(1 + turn % depth)) for turn in range(10 * depth)]
    assert [graph is not None for graph in first[-depth:]] == [True] * MOST_GRAPHS + [False] * 4


def test_another_pool_takes_the_place_of_one_that_serves_no_more():
    in_place = InPlaceCache({0: MIB})
    for turn in range(10 * MOST_GRAPHS):
        call(in_place, slot(1 + turn % MOST_GRAPHS))
    late = [call(in_place, slot(100 + turn % 2)) for turn in range(3 * PATIENCE)]
    assert late[-2:] == [f"graph at {slot(100)}", f"graph at {slot(101)}"]
    assert len(in_place) == MOST_GRAPHS


def test_each_graph_that_had_to_go_makes_the_next_one_harder_to_get():
    """Pools that come and go: the captures become few against the calls."""
    in_place = InPlaceCache({0: MIB})
    captures = []
    for generation in range(40):
        for turn in range(4 * PATIENCE):
            addresses = slot(1 + 10 * generation + turn % 2)
            captures.append(in_place.find(addresses) is None and in_place.miss(addresses))
            if captures[-1]:
                in_place.keep(addresses, "graph")
    assert sum(captures[: len(captures) // 2]) > 1.2 * sum(captures[len(captures) // 2 :])
    assert sum(captures) < len(captures) / 50


def test_unaligned_inputs_are_copied():
    in_place = InPlaceCache({0: MIB, 1: MIB})
    assert all(call(in_place, (MIB, MIB + 128)) is None for _ in range(20))
    assert call(in_place, (MIB, 2 * MIB)) is None
    assert [call(in_place, (MIB, 2 * MIB)) is None for _ in range(2)] == [True, False]


def test_where_small_inputs_wander_the_large_ones_get_their_graphs():
    in_place = InPlaceCache({3: MIB, 5: LARGE_BYTES - 1, 7: LARGE_BYTES})
    assert in_place.positions == (3, 5, 7)
    for turn in range(PATIENCE + 1):
        call(in_place, (MIB << turn % 2, 256 * turn, 8 * MIB))
    assert in_place.positions == (3, 7)
    graphs = [call(in_place, (MIB << turn % 2, 8 * MIB)) for turn in range(8)]
    assert all(graphs[-2:])


@pytest.mark.parametrize("sizes", [{0: MIB, 1: LARGE_BYTES}, {0: LARGE_BYTES - 1, 1: 8}])
def test_where_all_inputs_are_alike_in_size_all_are_watched(sizes):
    in_place = InPlaceCache(sizes)
    for turn in range(3 * PATIENCE):
        call(in_place, (256 * turn, MIB))
    assert in_place.positions == (0, 1)


def test_refused_addresses_are_not_asked_about_again():
    in_place = InPlaceCache({0: MIB})
    asked = 0
    for _ in range(50):
        if in_place.find(slot(1)) is None and in_place.miss(slot(1)):
            asked += 1
            in_place.refuse(slot(1))
    assert asked == 1


@given(st.lists(st.integers(0, 20), max_size=400))
def test_whatever_comes_a_graph_serves_its_own_addresses_only_and_there_are_few(numbers):
    in_place = InPlaceCache({0: MIB})
    captures = 0
    for number in numbers:
        before = in_place.find(slot(number))
        graph = before
        if before is None and in_place.miss(slot(number)):
            captures += 1
            graph = f"graph at {slot(number)}"
            in_place.keep(slot(number), graph)
        assert graph in (None, f"graph at {slot(number)}")
        assert len(in_place) <= MOST_GRAPHS
    assert captures <= len(numbers) / (LEAST_RETURNS + 1)


# --- comparison ------------------------------------------------------------------------------------------------------


def test_the_share_of_copies_says_whether_a_capture_is_worth_it():
    for share in (0.5 * LEAST_SHARE, 2 * LEAST_SHARE):
        comparison = CopyTrial()
        for index in range(SAMPLES):
            assert comparison.promising is None
            noise = 30.0 if index % 3 == 0 else 0.0  # a slow call now and then decides nothing
            comparison.add(share, 1 - share + noise, in_place=False)
        assert comparison.promising is (share > LEAST_SHARE)


@pytest.mark.parametrize(("gain", "faster"), [(0.02, True), (0.0, False), (-0.02, False)])
def test_calls_in_turn_say_whether_it_was(gain, faster):
    comparison = CopyTrial()
    for _ in range(SAMPLES):
        comparison.add(0.1, 0.9, in_place=False)
    for turn in range(2 * SAMPLES):
        assert comparison.faster is None
        in_place_now = comparison.take_turn()
        drift = 1.0 + 0.001 * turn  # a device that gets slower
        comparison.add(0.0 if in_place_now else 0.1, drift * (1 - gain if in_place_now else 0.9), in_place=in_place_now)
    assert comparison.faster is faster


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_inputs_over_the_same_bytes_are_found():
    memory = torch.zeros(1000)
    rows = memory[:900].view(30, 30)
    assert are_apart([memory[:10], memory[10:20], None, 3, torch.zeros(5)], [0, 1, 4])
    assert not are_apart([memory[:11], memory[10:20]], [0])
    assert not are_apart([memory[:11], memory[10:20]], [1])
    assert not are_apart([memory, memory[3:4], memory[500:501]], [2])
    assert are_apart([memory, memory[3:4], torch.zeros(3)], [2])  # what others share is their own affair
    assert not are_apart([rows[:, :2], rows[:, 2:4]], [0])  # careful: they interleave, which is not looked into
    assert are_apart([memory[5:5], memory[:10]], [1])
    assert not are_apart([memory[:1].expand(50), memory[0]], [0])


# --- captured programs -----------------------------------------------------------------------------------------------


def on_graphs(compiled):
    """Let the one program of a compiled function run as on a GPU; return its engine."""
    (executable,) = executables(compiled)
    lowered = executable.lowered
    on_graphs = cuda_graph.CudaGraphEngine(
        lowered,
        plan_serial(lowered.program.graph),
        copy_outputs=True,
        family=ProgramPair(),
        scheduling=Scheduling(1),
        warn=pytest.fail,
    )
    return become(executable, on_graphs)


class BufferPool:
    """Buffers of a feeder: batches at so many addresses in turn, aligned as on a device."""

    def __init__(self, depth, *like):
        self._slots = [[aligned(tensor.shape, tensor.dtype) for tensor in like] for _ in range(depth)]
        self._turn = 0

    def next(self, *values):
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        return [tensor.detach().copy_(value) for tensor, value in zip(slot, values, strict=True)]


def aligned(shape, dtype=torch.float32):
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(num_bytes + in_place.ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % in_place.ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)


@pytest.mark.parametrize(
    ("refuses", "by_graph", "by_pytorch"),
    [(set(), True, False), ({"set"}, False, False), ({"set", "copy"}, False, True)],
    ids=["graph", "driver", "pytorch"],
)
def test_inputs_and_results_are_copied_by_the_graph_or_else_the_driver_or_else_pytorch(
    device, monkeypatch, refuses, by_graph, by_pytorch
):
    monkeypatch.setattr(in_place, "FORCED", False)
    copied = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, come_from: copied.append(to) or copy(to, come_from))
    model = networks.Mlp().eval()
    compiled = ms.compile(lambda x, y: model(x) + y, strict=True)
    shape = networks.example(networks.Mlp)[0].shape
    with torch.no_grad():
        arguments = [(torch.randn(shape), torch.randn(1)) for _ in range(5)]
        compiled(*arguments[0])
        on_graphs(compiled)
        for each in arguments[:3]:
            compiled(*each)
        copied.clear()
        device.driver.num_set, device.driver.refuses = 0, refuses
        results = [compiled(*each) for each in arguments]
    assert (device.driver.num_set >= 5) == by_graph
    assert len(copied) == 2 * 5 * by_pytorch  # in and out
    for (x, y), result in zip(arguments, results, strict=True):
        networks.assert_close(result, model(x) + y)


@pytest.mark.parametrize("refuses", ["capture", "enable"])
def test_where_the_driver_refuses_a_captured_copy_there_is_a_graph_all_the_same(device, monkeypatch, refuses):
    monkeypatch.setattr(in_place, "FORCED", False)
    compiled = ms.compile(lambda x: x * 2, strict=True)
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        device.driver.refuses = {refuses}
        for i in range(4):
            assert torch.equal(compiled(torch.full((3,), float(i))), torch.full((3,), 2.0 * i))
    assert engine.is_captured
    assert engine._captured._graph_io is None


def test_within_a_capture_of_the_callers_no_graph_is_launched(device, monkeypatch):
    compiled = ms.compile(lambda x: x * 2, strict=True)
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        for is_within in (True, False, False, True, False):
            monkeypatch.setattr(DeviceContext, "is_capturing", lambda _, is_within=is_within: is_within)
            before = engine._captured.graph.num_replays if engine.is_captured else 0
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
            after = engine._captured.graph.num_replays if engine.is_captured else 0
            assert (after > before) == (not is_within and engine.is_captured)
        assert engine.is_captured


def test_a_thread_captures_only_what_it_has_run(device):
    """Libraries make a handle for each thread when it first runs something, and cannot while a graph is captured."""
    compiled = ms.compile(lambda x: x * 2, strict=True)
    elsewhere, x = ThreadPoolExecutor(1), aligned((1000,)).fill_(1)

    def call():
        with torch.no_grad():
            assert torch.equal(compiled(x), 2 * x)
        return engine.is_captured, engine.num_in_place

    with torch.no_grad():
        compiled(torch.ones(1000))
    engine = on_graphs(compiled)
    assert call() == (False, 0)
    assert elsewhere.submit(call).result() == (False, 0)
    assert call() == (True, 0)
    for _ in range(10):
        assert ThreadPoolExecutor(1).submit(call).result() == (True, 0)
    for _ in range(10):
        call()
    assert engine.num_in_place == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_inference_reads_the_buffers_of_a_pool(device, depth):
    model = networks.Mlp().eval()
    compiled = ms.compile(model, strict=True)
    shape = networks.example(networks.Mlp)[0].shape
    pool = BufferPool(depth, torch.empty(shape))
    with torch.no_grad():
        compiled(torch.randn(shape))
        engine = on_graphs(compiled)
        for _ in range(10 * depth):
            (x,) = pool.next(torch.randn(shape))
            networks.assert_close(compiled(x), model(x))
        assert engine.num_in_place == depth
        base = engine._captured.graph.num_replays
        slots = [slot.clone() for slot in engine._captured._slots]
        for _ in range(2 * depth):
            (x,) = pool.next(torch.randn(shape))
            networks.assert_close(compiled(x), model(x))
        assert engine._captured.graph.num_replays == base  # the graph that copies has nothing to do any more
        assert all(map(torch.equal, engine._captured._slots, slots))  # and nothing is copied
        elsewhere = torch.randn(shape)
        networks.assert_close(compiled(elsewhere), model(elsewhere))
        assert engine._captured.graph.num_replays == base + 1
    assert device.pools == [engine._pool] + [(0, 7)] * depth
    assert f"by {depth} more graph" in str(ms.explain(compiled))
    engine.release()
    assert engine.num_in_place == 0


def test_memory_that_goes_back_to_the_device_is_in_no_shared_pool(device):
    compiled = ms.compile(lambda x: x * 2, strict=True)
    x = torch.randn(100)
    with torch.no_grad():
        compiled(x)
        engine = on_graphs(compiled)
        for gives_back in (False, True):
            engine.gives_memory_back = gives_back
            engine.release()
            for _ in range(2):
                assert torch.equal(compiled(x), 2 * x)
            num_captures = len(device.pools)
            assert torch.equal(engine.run_uncaptured([x])[0], 2 * x)
            engine.release()
            assert torch.equal(engine.run_uncaptured([x])[0], 2 * x)
            assert not engine.is_captured
            assert len(device.pools) == num_captures
    shared, *_, own = device.pools
    assert shared is not None
    assert own is None


def test_what_is_read_in_place_is_not_kept_alive(device):
    compiled = ms.compile(lambda x: x * 2, strict=True)
    memory = aligned((1000,))
    with torch.no_grad():
        compiled(memory.clone())
        engine = on_graphs(compiled)
        for _ in range(6):
            x = memory.detach()
            alive = weakref.ref(x)
            compiled(x)
            del x
            assert alive() is None
    assert engine.num_in_place == 1


def test_what_is_written_is_never_read_in_place(device):
    def function(x, y, count):
        y.mul_(2)
        count.add_(1)
        return x + y + count

    compiled = ms.compile(function, strict=True)
    pool = BufferPool(2, torch.empty(300), torch.empty(300))
    count, expected_count = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        compiled(*pool.next(torch.randn(300), torch.randn(300)), torch.zeros(()))
        engine = on_graphs(compiled)
        for _ in range(20):
            x, y = pool.next(torch.randn(300), torch.randn(300))
            expected_y = y.clone()
            expected = function(x, expected_y, expected_count)
            networks.assert_close(compiled(x, y, count), expected)
            networks.assert_close((y, count), (expected_y, expected_count))
    program = engine.lowered.program
    read = {program.inputs[position] for position in engine._replayer._in_place.positions}
    assert len(read) == 1
    assert not read & program.mutated
    assert engine.num_in_place == 2


def test_an_input_over_the_bytes_of_another_is_copied(device):
    compiled = ms.compile(lambda x, y: x - y, strict=True)
    memory = aligned((640,))
    with torch.no_grad():
        compiled(torch.randn(512), torch.randn(512))
        engine = on_graphs(compiled)
        for _ in range(10):
            memory.copy_(torch.randn(640))
            networks.assert_close(compiled(memory[:512], memory[128:]), memory[:512] - memory[128:])
    assert engine.num_in_place == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_reads_the_buffers_of_a_pool_and_trains_as_before(device, depth):
    batches = [networks.example(networks.Mlp) for _ in range(30)]

    def train(forced):
        in_place.FORCED = forced  # put back by the fixture
        torch.manual_seed(1)
        model = networks.Mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

        @ms.step(strict=True)
        def step(x, y):
            return networks.train_once(model, optimizer, x, y)

        pool = BufferPool(depth, *batches[0])
        losses, engine = [], None
        for batch in batches:
            losses.append(step(*pool.next(*batch)))
            if engine is None and step.graphs:
                engine = on_graphs(step)
        return engine, [*losses, *model.parameters(), *networks.optimizer_state(optimizer)]

    (copying, before), (reading, after) = train(False), train(True)
    assert copying.num_in_place == 0
    assert reading.num_in_place == depth
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (before, after)), strict=True):
        assert torch.equal(a, b)


def test_a_capture_that_fails_leaves_the_copies(device):
    model = networks.Mlp().eval()
    compiled = ms.compile(model, strict=True)
    shape = networks.example(networks.Mlp)[0].shape
    pool = BufferPool(2, torch.empty(shape))
    with torch.no_grad():
        compiled(torch.randn(shape))
        engine = on_graphs(compiled)
        for turn in range(12):
            (x,) = pool.next(torch.randn(shape))
            networks.assert_close(compiled(x), model(x))
            if turn == 1:  # captured by now
                device.error = torch.OutOfMemoryError("no memory")
    assert (engine.is_captured, engine.num_in_place) == (True, 0)
    assert len(device.pools) == 2  # not tried again
    (program,) = ms.explain(compiled).to_dict()["programs"]
    assert program["notes"][:1] == ["inputs are copied; reading them in place failed: no memory"]


@pytest.mark.parametrize("error", [RuntimeError("no handle\nadvice"), torch.OutOfMemoryError("all 80 GB are taken")])
def test_kernels_that_cannot_be_measured_are_told_of_before_the_next_call(device, error):
    """A warning, but where memory is short; strict users get an error when nothing of their call has run yet."""
    told = []

    class Planner:
        def measuring_run(self, inputs):
            self.error = error
            return engine._serial(inputs)

    def refuse(reason):
        told.append(reason)
        raise CaptureError(reason)

    compiled = ms.compile(lambda x: x * 2, strict=True)
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        engine._planner, engine._settled, engine._warn = Planner(), False, refuse
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        assert not told
        reason = f"runs on one stream, since its kernels could not be measured: {str(error).splitlines()[0]}"
        if isinstance(error, torch.OutOfMemoryError):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
            assert reason in executables(compiled)[0].notes[0]
        else:
            with pytest.raises(CaptureError, match=reason):
                compiled(torch.ones(3))
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(told) == (not isinstance(error, torch.OutOfMemoryError))
    assert engine.is_captured
    assert engine.plan.num_streams == 1


def test_a_plan_that_cannot_be_captured_is_told_of_where_one_stream_can(device, monkeypatch):
    compiled, told = ms.compile(lambda x: x * 2, strict=True), []
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        capture, engine.plan, engine._warn = engine._try, replace(engine.plan), told.append

        def try_one_stream(plan, *arguments):
            if plan is not engine._serial.plan:
                raise RuntimeError("streams do not join")
            return capture(plan, *arguments)

        monkeypatch.setattr(engine, "_try", try_one_stream)
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    (reason,) = told
    assert "runs on one stream, since its plan could not be captured: streams do not join" in reason
    assert engine.is_captured


def on_graphs_both_ways(compiled, copy_outputs=True):
    """Let a model's forward and backward program run as on a GPU; return their engines."""
    family, engines = ProgramPair(), {}
    for executable in executables(compiled):
        lowered = executable.lowered
        on_graphs = cuda_graph.CudaGraphEngine(
            lowered,
            plan_serial(lowered.program.graph),
            copy_outputs=copy_outputs,
            family=family,
            scheduling=Scheduling(1),
            warn=pytest.fail,
        )
        engines[lowered.phase] = become(executable, on_graphs)
    return engines


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def gradients(model, network, inputs):
    model.zero_grad()
    sum(network(x).sum() for x in inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("copy_outputs", [True, False])
def test_what_waits_for_its_backward_pass_is_not_overwritten(device, monkeypatch, copy_outputs):
    """Also where the caller has dropped what it got, which may be the graph's own memory."""
    monkeypatch.setattr(in_place, "FORCED", False)
    replay = torch.cuda.CUDAGraph.replay

    def replay_unnoticed(self):  # a graph on a device moves no version counter, so that autograd does not see it
        cells = [cell.cell_contents for cell in self.launch.__closure__]
        written = [t for cell in cells if isinstance(cell, list) for t in cell if isinstance(t, torch.Tensor)]
        with torch.autograd._unsafe_preserve_version_counter(tuple(written)):
            replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_unnoticed)
    model, inputs = perceptron(), [torch.randn(5, 8) for _ in range(2)]
    compiled = ms.compile(model, strict=True)
    gradients(model, compiled, inputs[:1])
    engines = on_graphs_both_ways(compiled, copy_outputs)
    for _ in range(3):
        gradients(model, compiled, inputs[:1])
    assert all(engine.is_captured for engine in engines.values())
    for _ in range(2):
        networks.assert_close(gradients(model, compiled, inputs), gradients(model, model, inputs))


def test_a_backward_pass_is_captured_for_what_the_forward_graph_saves(device, monkeypatch):
    """Not for what a pass beside it has saved elsewhere: that would have to be copied from then on."""
    monkeypatch.setattr(in_place, "FORCED", False)
    model, inputs = perceptron(), [torch.randn(5, 8) for _ in range(2)]
    compiled = ms.compile(model, strict=True)
    gradients(model, compiled, inputs[:1])
    engines = on_graphs_both_ways(compiled)
    for _ in range(4):
        networks.assert_close(gradients(model, compiled, inputs), gradients(model, model, inputs))
    backward = engines[Phase.BACKWARD]
    names = backward.lowered.program.inputs
    slots = [names[position] for position in backward._captured.slot_positions]
    assert not [name for name in slots if "tanh" in name], slots


def test_memory_that_is_given_back_is_no_parameter_that_moved(device, monkeypatch):
    monkeypatch.setattr(in_place, "FORCED", False)
    model, x = networks.Mlp().eval(), networks.example(networks.Mlp)[0]
    compiled = ms.compile(model, strict=True)
    with torch.no_grad():
        compiled(x)
        engine = on_graphs(compiled)
        compiled(x)
        for _ in range(3 * cuda_graph.MAX_CAPTURES):
            networks.assert_close(compiled(x), model(x))
            assert len(engine._captured.slot_positions) == 1
            engine.release()
        for number in range(2 * cuda_graph.MAX_CAPTURES):
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            networks.assert_close(compiled(x), model(x))
            assert (len(engine._captured.slot_positions) > 1) == (number >= cuda_graph.MAX_CAPTURES)
    assert executables(compiled)[0].notes == ["parameters were elsewhere 4 times, so every call copies them"]


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_where_memory_is_short_what_pytorch_keeps_is_given_back_before_a_capture(device, free):
    compiled = ms.compile(lambda x: (x @ x).relu() @ x, strict=True)
    with torch.no_grad():
        compiled(torch.ones(3, 3))
        on_graphs(compiled)
        device.memory = (free, 80 << 30)
        for _ in range(3):
            compiled(torch.ones(3, 3))
    assert device.emptied == ([] if free else [0])


def test_a_step_without_memory_for_its_results_changes_nothing(device, monkeypatch):
    model = torch.nn.Linear(400, 1000)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @ms.step(strict=True)
    def step(x):
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return y.detach()

    x = torch.randn(1000, 400)
    for _ in range(2):
        step(x)
    engine = on_graphs(step)
    for _ in range(2):
        step(x)
    assert engine.is_captured
    before = [parameter.clone() for parameter in model.parameters()]

    def refuse(self, inputs):
        raise torch.OutOfMemoryError("no memory for the results")

    with monkeypatch.context() as patch:
        patch.setattr(captured.Captured, "make_outputs", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            step(x)
    assert all(map(torch.equal, before, model.parameters()))
    step(x)
    assert not any(map(torch.equal, before, model.parameters()))


def test_slots_are_kept_for_every_stream_that_replays(device, monkeypatch):
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append((self.data_ptr(), stream)))
    compiled = ms.compile(lambda x, y: x * 2 + y, strict=True)
    inputs = aligned((300,), torch.float32).fill_(1), aligned((300,), torch.float32).fill_(2)
    with torch.no_grad():
        compiled(*inputs)
        engine = on_graphs(compiled)
        for _ in range(3):
            compiled(*inputs)
        assert engine.is_captured
        assert kept == []
        for handle in (5, 6, 5, None, 6):
            stream = types.SimpleNamespace(cuda_stream=handle)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda index, stream=stream: stream)
            monkeypatch.setattr(cuda_graph, "current_stream_handle", lambda index, handle=handle: handle)
            assert torch.equal(compiled(*inputs), torch.full((300,), 4.0))
    slots = {tensor.data_ptr() for tensor in engine._captured.inputs}
    assert len(slots) == 2
    assert {(slot, stream.cuda_stream) for slot, stream in kept} == {
        (slot, handle) for slot in slots for handle in (5, 6)
    }
    assert len(kept) == 4


def test_plans_are_tried_again_behind_an_interrupt_but_not_behind_an_error(device):
    class Planner:
        error, candidates, num_asked = None, (), 0

        def measuring_run(self, inputs):
            return engine._serial(inputs)

        def settle(self, trials):
            self.num_asked += 1
            raise KeyboardInterrupt if self.num_asked < 3 else ValueError("unexpected")

    compiled = ms.compile(lambda x: x * 2, strict=True)
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        engine._planner, engine._settled = planner, _ = Planner(), False
        compiled(torch.ones(3))
        for error in (KeyboardInterrupt, KeyboardInterrupt, ValueError):
            with pytest.raises(error):
                compiled(torch.ones(3))
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert planner.num_asked == 3
    assert engine.is_captured


def test_a_plan_that_would_race_is_told_of_once(device):
    class Planner:
        error, candidates = None, ()

        def measuring_run(self, inputs):
            return engine._serial(inputs)

        def settle(self, trials):
            raise PlanError("a race")

    def refuse(reason):
        told.append(reason)
        raise CaptureError(reason)

    compiled, told = ms.compile(lambda x: x * 2, strict=True), []
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        engine._planner, engine._settled, engine._warn = Planner(), False, refuse
        compiled(torch.ones(3))
        with pytest.raises(CaptureError, match="runs on one stream: a race"):
            compiled(torch.ones(3))
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(told) == 1
    assert engine.is_captured


def test_what_can_be_neither_measured_nor_captured_is_told_of_once(device):
    class Planner:
        error = RuntimeError("an answer is awaited")

        def measuring_run(self, inputs):
            return engine._serial(inputs)

    compiled, told = ms.compile(lambda x: x * 2, strict=True), []
    with torch.no_grad():
        compiled(torch.ones(3))
        engine = on_graphs(compiled)
        engine._planner, engine._settled, engine._warn = Planner(), False, told.append
        device.error = RuntimeError("an answer is awaited")
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    (reason,) = told
    assert "refused to capture" in reason
    assert not engine.is_captured


def test_a_device_that_a_capture_leaves_unusable_is_named_with_the_reason(device, monkeypatch):
    """The context of such a device is lost: there is nothing to fall back to."""
    model, x = networks.Mlp().eval(), networks.example(networks.Mlp)[0]

    def refuse(context):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore of it")

    monkeypatch.setattr(cuda_graph, "repair", refuse)
    compiled = ms.compile(model, strict=True)
    with torch.no_grad():
        compiled(x)
        on_graphs(compiled)
        compiled(x)
        device.error = torch.AcceleratorError("CUDA error: a trap\nmore of it")
        with pytest.raises(DeviceError, match=r"failed while .*: CUDA error: a trap\. .*streams=1") as caught:
            compiled(x)
    assert caught.value.__cause__ is device.error


class Clock:
    """Lends events that a device passes when ``lag`` more of them have been recorded, at times that calls add to."""

    def __init__(self, lag=0):
        self.now_ms, self.num_recorded, self.lag, self.lent = 0.0, 0, lag, 0
        self.capture_lock, self.spare_captures = threading.RLock(), nullcontext
        self.driver = self.events = self

    def acquire(self, *, timing):
        self.lent += 1
        return Moment(self)

    def release(self, event):
        self.lent -= 1

    def current_stream(self):
        return None


class Moment:
    def __init__(self, clock):
        self.clock = clock

    def record(self, stream):
        self.clock.num_recorded += 1
        self.at_ms, self.number = self.clock.now_ms, self.clock.num_recorded

    def query(self):
        return self.clock.num_recorded - self.number >= self.clock.lag

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


class PretendedReplay:
    """A capture whose parts take so many ms."""

    def __init__(self, clock, copy_ms, replay_ms, make=None):
        self.clock, self.copy_ms, self.replay_ms, self.make = clock, copy_ms, replay_ms, make
        self.calls = 0

    def copy_in(self, inputs):
        self.clock.now_ms += self.copy_ms

    def replay(self):
        self.clock.now_ms += self.replay_ms

    def make_outputs(self, inputs):
        return [self]

    def finish(self, inputs, outputs):
        self.calls += 1
        return outputs

    def run(self, inputs):
        self.copy_in(inputs)
        self.replay()
        return self.finish(inputs, self.make_outputs(inputs))

    def read_in_place(self, inputs, positions):
        return self.make()


@pytest.mark.parametrize("lag", [0, 7, 1000])
@pytest.mark.parametrize(
    ("copy_ms", "in_place_ms", "outcome"),
    [(0.1, 1.0, "in place"), (0.1, 1.2, "copies"), (0.001, 1.0, "no capture")],
)
def test_what_is_faster_on_the_device_is_kept(copy_ms, in_place_ms, outcome, lag):
    clock = Clock(lag)
    made = []

    def make():
        made.append(PretendedReplay(clock, 0.0, in_place_ms))
        return made[-1]

    base = PretendedReplay(clock, copy_ms, 1.0, make)
    replayer = Replayer(base, {0: LEAST_BYTES}, clock, pytest.fail)
    slots = [aligned((4,)), aligned((4,))]
    for turn in range(600):
        (ran,) = replayer.run([slots[turn % 2]])
    if lag == 1000:  # a device that does not answer: copies go on, and nothing piles up
        assert (made, replayer.num_graphs, clock.lent) == ([], 0, 3 * SAMPLES)
        return
    assert clock.lent == 0
    assert len(made) == (0 if outcome == "no capture" else 2)
    assert replayer.num_graphs == (2 if outcome == "in place" else 0)
    assert (ran in made) == (outcome == "in place")


def test_only_what_may_be_read_in_place_is_considered(device, monkeypatch):
    def lowered_of(compiled):
        (executable,) = executables(compiled)
        return executable.lowered

    def considered(lowered, inputs):
        return bytes_in_place(lowered, range(len(inputs)), inputs)

    compiled = ms.compile(lambda x, y: (x + 1, y.mul_(2)), strict=True)
    inputs = [torch.randn(LEAST_BYTES // 4), torch.randn(10)]
    with torch.no_grad():
        compiled(*inputs)
    lowered = lowered_of(compiled)
    assert considered(lowered, inputs) == {0: LEAST_BYTES}
    assert considered(replace(lowered, phase=Phase.FORWARD), inputs) == {}
    monkeypatch.setattr(in_place, "FORCED", None)
    assert considered(lowered, inputs) == {0: LEAST_BYTES}
    assert considered(lowered, [inputs[0][1:], inputs[1]]) == {}
    assert considered(lowered, [torch.randn(LEAST_BYTES // 4, device="meta"), inputs[1]]) == {}  # elsewhere
    monkeypatch.setattr(in_place, "FORCED", False)
    assert considered(lowered, inputs) == {}
