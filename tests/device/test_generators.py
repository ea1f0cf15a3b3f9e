"""A capture leaves the default generator to other threads, on a model of PyTorch 2.11's generators and graphs."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.devices import capture_generators


class State:
    def __init__(self, seed, offset):
        self.seed, self.offset, self.is_capturing, self.is_registered = seed, offset, False, False


class Generator:
    """A handle to a state."""

    def __init__(self, state):
        self.state = state

    def graphsafe_get_state(self):
        return Generator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def clone_state(self):
        return Generator(State(self.state.seed, self.state.offset))

    def initial_seed(self):
        return self.state.seed

    def get_offset(self):
        return self.state.offset

    def manual_seed(self, seed):
        self.state.seed, self.state.offset = seed, 0

    def set_offset(self, offset):
        self.state.offset = offset

    def draw(self):
        assert not self.state.is_capturing, "Offset increment outside graph capture encountered unexpectedly."
        self.state.offset += 4


class Graph:
    """Registers a state, allocating where it is new; sets all that are registered to capturing."""

    def __init__(self, default):
        self.default, self.states = default, []

    def register_generator_state(self, generator):
        state = generator.state
        self.states.append(state)
        if not state.is_registered:
            state.memory = [torch.empty(1), torch.empty(1)]
        state.is_registered = True

    def capture_begin(self):
        self.register_generator_state(self.default)
        for state in self.states:
            state.is_capturing = True
            state.memory[0].fill_(state.seed)

    def capture_end(self):
        for state in self.states:
            state.is_capturing = False


@pytest.fixture
def default(monkeypatch):
    default = Generator(State(7, 8))
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return default


class OtherThread(TorchDispatchMode):
    """Draws whenever PyTorch does anything."""

    def __init__(self, default):
        super().__init__()
        self.default, self.count = default, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.default.draw()
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_others_draw_at_every_moment_of_a_capture_and_it_draws_from_where_they_stop(default):
    own = default.state
    for _ in range(2):  # the generator's own state is new to the first graph alone
        graph, before = Graph(default), own.offset
        aside = capture_generators.GeneratorExchange(graph)
        with OtherThread(default) as other:
            with aside.begin():
                graph.capture_begin()
            torch.ones(1)
            assert default.state is not own
            assert own.is_capturing
            graph.capture_end()
            aside.end()
        assert default.state is own
        assert other.count >= 4
        assert own.offset == before + 4 * other.count
        assert own in graph.states


def test_a_seed_that_another_thread_sets_is_kept(default):
    graph = Graph(default)
    aside = capture_generators.GeneratorExchange(graph)
    with aside.begin():
        graph.capture_begin()
    default.manual_seed(3)
    default.draw()
    graph.capture_end()
    aside.end()
    assert (default.state.seed, default.state.offset) == (3, 4)


def test_a_capture_that_does_not_begin_leaves_the_generator_as_it_was(default):
    own, aside = default.state, capture_generators.GeneratorExchange(Graph(default))
    with pytest.raises(RuntimeError), aside.begin():
        raise RuntimeError
    aside.end()
    assert (default.state, own.seed, own.offset) == (own, 7, 8)


def test_what_is_captured_draws_from_the_given_generator_or_in_an_exchange():
    entered = []

    @contextmanager
    def exchanged():
        entered.append(True)
        yield

    given = torch.Generator().manual_seed(1)
    drawn, filled = torch.empty(3), torch.empty(3)
    with capture_generators._DrawFrom(given, exchanged):
        torch.rand(3, out=drawn)
        filled.normal_()
        torch.randn(3, generator=torch.Generator().manual_seed(2))
        torch.ones(3).cumsum(0)
    again = torch.Generator().manual_seed(1)
    assert torch.equal(drawn, torch.rand(3, generator=again))
    assert torch.equal(filled, torch.empty(3).normal_(generator=again))
    assert not entered
    with capture_generators._DrawFrom(given, exchanged):
        torch.native_dropout(torch.ones(3), 0.5, True)
    assert len(entered) == 1


@pytest.mark.parametrize(
    ("version", "without", "kind"),
    [("2.11.0", "", "GeneratorExchange"), ("2.11.0", "pytorch#176752", "NoExchange"), ("2.12.0", "", "NoExchange")],
)
def test_states_are_exchanged_where_pytorch_needs_it_unless_switched_off(default, monkeypatch, version, without, kind):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setenv("MILLSTREAM_WITHOUT", without)
    graph, own = Graph(default), default.state
    aside = capture_generators.aside(graph)
    assert type(aside).__name__ == kind
    with aside.begin():
        graph.capture_begin()
    assert default.state.is_capturing == (kind == "NoExchange")  # then a draw of any thread is PyTorch's error
    graph.capture_end()
    aside.end()
    assert default.state is own
    default.draw()
