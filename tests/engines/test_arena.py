"""Memory that sizes of one program have in turn: where things lie, and what becomes of those who had it before."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import millstream as ms
from millstream.engine import BySize, by_size
from millstream.engine.arena import GRAIN_BYTES, HEADROOM, Arena, lay_out
from millstream.engine.cuda import captured, cuda_graph
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.cuda.cuda_graph import CudaGraphEngine
from millstream.graph import Role
from millstream.schedule import Scheduling, plan_serial
from tests import networks

WIDTH = 16


class Holder:
    def __init__(self):
        self.num_released = 0

    def release(self):
        self.num_released += 1


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_arena_is_as_large_as_the_largest_asked_for(sizes):
    arena, holders = Arena(), [Holder() for _ in sizes]
    for size, holder in zip(sizes, holders, strict=True):
        memory = arena.take(size, "cpu", holder)
        assert memory.numel() == size
        assert max(sizes[: sizes.index(size) + 1]) <= arena.num_bytes <= max(sizes) * (1 + 1 / HEADROOM)


def test_who_had_memory_is_told_when_it_grows():
    arena, small, large = Arena(), Holder(), Holder()
    arena.take(100, "cpu", small)
    arena.take(50, "cpu", large)
    assert (small.num_released, large.num_released) == (0, 0)
    arena.take(200, "cpu", large)
    assert (small.num_released, large.num_released) == (1, 1)
    arena.give_back(small)
    assert arena.num_bytes
    arena.give_back(large)
    assert not arena.num_bytes


def test_small_ones_do_not_grow_on_a_device_that_gives_no_less(monkeypatch):
    monkeypatch.setitem(GRAIN_BYTES, "cpu", 1000)
    arena, holder, size = Arena(), Holder(), 0
    for size in range(0, 1001, 10):
        assert arena.take(size, "cpu", holder).numel() == size
    assert (holder.num_released, arena.num_bytes) == (1, 1000)  # the first asked for nothing
    arena.take(1001, "cpu", holder)
    assert (holder.num_released, arena.num_bytes) == (2, 2000)


def test_it_is_given_up_when_a_second_stream_comes():
    arena, holder = Arena(), Holder()
    assert arena.serves(7)
    arena.take(100, "cpu", holder)
    assert arena.serves(7)
    assert not arena.serves(8)
    assert holder.num_released == 1
    assert not arena.num_bytes
    assert not arena.serves(7)


class Texts(nn.Module):
    """Several layers, and two results: one of the texts' size, one of one number."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.layer_norm(layer(x).relu(), (WIDTH,))
        return x, x.sum(-1).mean()  # few numbers at a time: Inductor guards how many it adds up


def texts(length):
    return torch.randint(50, (3, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Texts().eval()


class Compiled:
    """The program of the model for all lengths, called as PyTorch calls it."""

    def __init__(self, program, inputs):
        self.program, self._inputs = program, inputs

    def __call__(self, tokens):
        sizes = dict(zip((3, 7), tokens.shape, strict=True))
        inputs = [sizes[item] if isinstance(item, int) else item for item in self._inputs]
        return self.program([tokens if getattr(item, "dtype", None) is tokens.dtype else item for item in inputs])


@pytest.fixture(scope="module")
def compiled_once(model):
    torch._dynamo.reset()
    compiled, seen = ms.compile(model, dynamic=True, strict=True), []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        call = BySize.__call__
        patch.setattr(BySize, "__call__", lambda self, inputs: seen.append(list(inputs)) or call(self, inputs))
        compiled(texts(7))
    (program,) = compiled._millstream.compiler.graphs[0].executables
    return program, seen[0]


@pytest.fixture
def compiled(compiled_once):
    """The model, compiled for all lengths, none of which has been called yet."""
    program, inputs = compiled_once
    return Compiled(BySize(program._lowered, program._build, at_once=False), inputs)


def test_buffers_slots_and_outputs_lie_apart(compiled):
    lowered = compiled.program._lowered
    program = lowered.at((9,) * len(lowered.program.symbols)).program
    space = lay_out(program, plan_serial(program.graph), [100, 0, 1000])
    outputs = {name: program.graph.buffer_of[name].num_bytes for name in space.outputs}
    spans = [(0, space.temporaries.arena_bytes), *zip(space.slots, (100, 0, 1000), strict=True)]
    spans += [(space.outputs[name], size) for name, size in outputs.items()]
    assert len(outputs) == sum(buffer.role is Role.OUTPUT for buffer in program.graph.buffers)
    ends = sorted((start, start + size) for start, size in spans if size)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] == space.num_bytes


def test_a_hundred_sizes_take_the_memory_of_the_largest(model, compiled, monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 64)
    program = compiled.program
    program._open_calls = 0
    lengths = [2 + 5 * turn % 101 for turn in range(100)]
    with torch.no_grad():
        compiled(texts(max(lengths)))
        alone = program.arena.num_bytes
        program.release()
        assert not program.arena.num_bytes
        for length in (*lengths, *lengths[:5]):
            networks.assert_close(tuple(compiled(texts(length))), model(texts(length)))
    assert alone <= program.arena.num_bytes <= 1.1 * alone
    assert len([*program]) == 64


def on_graphs(program):
    """Let the sizes of a program run as on a GPU; returns the engines as they are made."""
    engines = []

    def build(lowered, key, many):
        serial = plan_serial(lowered.program.graph)
        chosen = None if many.like is None else many.like.plan
        scheduling, family = Scheduling(1), ProgramPair()
        engine = CudaGraphEngine(
            lowered,
            serial,
            copy_outputs=True,
            family=family,
            scheduling=scheduling,
            chosen=chosen and serial,
            arena=many.arena,
            is_warm=many.is_warm,
            warn=pytest.fail,
        )
        engines.append(engine)
        return engine

    program._build, program._least_open_calls, program._open_calls = build, 1, 1
    return engines


def test_captured_sizes_have_one_memory_in_turn(device, model, compiled):
    program = compiled.program
    engines = on_graphs(program)
    with torch.no_grad():
        for length in (9, 9, 9, 30, 30, 5, 5, 30, 9, 5, 80, 80, 5, 9, 30, 80):
            networks.assert_close(tuple(compiled(texts(length))), model(texts(length)))
    assert len(engines) == 4
    assert all(engine.is_captured for engine in engines)
    largest = max(engine._captured._whole.numel() for engine in engines)
    assert largest <= program.arena.num_bytes <= 1.1 * largest
    assert len({engine._captured._whole.data_ptr() for engine in engines}) == 1


def test_sizes_on_several_streams_have_memory_of_their_own(device, model, compiled, monkeypatch):
    program, handle = compiled.program, 0
    engines = on_graphs(program)
    for module in (captured, cuda_graph):
        monkeypatch.setattr(module, "current_stream_handle", lambda index: handle)
    with torch.no_grad():
        for handle, length in [(0, 9)] * 3 + [(0, 30)] * 2 + [(1, 9), (0, 30)] * 3:  # noqa: B007  read by the lambda
            networks.assert_close(tuple(compiled(texts(length))), model(texts(length)))
    assert not program.arena.num_bytes
    assert len(engines) == 2
    assert all(engine.is_captured and not engine.shares_memory for engine in engines)


def test_a_size_that_comes_again_is_captured_at_once(device, compiled):
    engines = on_graphs(compiled.program)
    with torch.no_grad():
        for length in (30, 30, 30, 9, 9):
            compiled(texts(length))
    assert [engine.is_captured for engine in engines] == [True, True]


def test_a_graph_whose_memory_served_another_is_not_replayed_by_itself(device, compiled):
    engines = on_graphs(compiled.program)
    with torch.no_grad():
        for length in (30, 30, 30, 9, 9):
            compiled(texts(length))
        first, second = engines
        assert not second.why_not_replay()
        assert "another size" in first.why_not_replay()
        with pytest.raises(ms.MillstreamError, match="Another size"):
            first.replay()
        compiled(texts(30))
        assert not first.why_not_replay()


def test_two_threads_with_two_sizes(model, compiled):
    compiled.program._open_calls = 0
    expected = {length: model(texts(length)) for length in (9, 30)}

    def work(length):
        with torch.no_grad():
            for _ in range(50):
                networks.assert_close(tuple(compiled(texts(length))), expected[length])

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, length) for length in (9, 30, 9)]:
            done.result()


def test_two_sizes_forward_then_both_backward(model):
    """What a forward pass saves is not in memory that another size's takes."""
    compiled = ms.compile(model, dynamic=True, strict=True)

    def gradients(call, order):
        found = {length: call(texts(length))[1] for length in (9, 30)}
        return [torch.autograd.grad(found[length], list(model.parameters())) for length in order]

    for _ in range(by_size.OPEN_CALLS["cpu"] + 2):
        gradients(compiled, (9, 30))
    for order in ((9, 30), (30, 9)):
        for ours, theirs in zip(gradients(compiled, order), gradients(model, order), strict=True):
            networks.assert_close(ours, theirs, 1e-4)
