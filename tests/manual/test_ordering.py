"""The bookkeeping alone: what it asks for is enough, by another checker, and nothing of it can be left out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.check import find_races
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Launch, Plan, Record, Role, Wait
from millstream.manual.ordering import Ordering, TrackedStorage

NUM_MEMORIES = 4
USES = st.tuples(
    st.just("use"),
    st.integers(0, 3),
    st.sets(st.integers(0, NUM_MEMORIES - 1), max_size=2),
    st.sets(st.integers(0, NUM_MEMORIES - 1), max_size=1),
)
EVENTS = st.lists(
    st.one_of(
        USES,
        USES,
        USES,
        USES,
        st.tuples(st.just("meet")),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(1, 2)),
    ),
    max_size=25,
)


class Issued:
    """Drives an ordering and writes down what is issued, as a plan: each use is a kernel."""

    def __init__(self):
        self.ordering = Ordering()
        self.memories = [TrackedStorage() for _ in range(NUM_MEMORIES)]
        self.steps, self.kernels = [], []
        self.groups, self.events = [], {}
        self.launch(0, [], ["before"])  # what the caller issued before the fork

    def launch(self, stream, reads, writes):
        kernel = len(self.kernels)
        self.kernels.append(
            Kernel(kernel, f"k{kernel}", KernelKind.LIBRARY, "cuda:0", tuple(reads), tuple(dict.fromkeys(writes)))
        )
        self.steps.append(Launch(kernel, stream))

    def order(self, steps):
        """Write steps down with an event for each record."""
        for is_record, event, stream in steps:
            if is_record:
                self.events[event] = len(self.steps)
            self.steps.append((Record if is_record else Wait)(self.events[event], stream))

    def use(self, stream, reads, writes):
        reads = reads - writes
        self.order(
            self.ordering.use(
                stream, [self.memories[i] for i in sorted(reads)], [self.memories[i] for i in sorted(writes)]
            )
        )
        # "before" is read by everything: so each fork is needed. Each kernel writes a word of its own for the join.
        self.launch(
            stream, ["before", *(f"m{i}" for i in reads)], [*(f"m{i}" for i in writes), f"w{len(self.kernels)}"]
        )

    def fork(self, parent, count):
        children = [self.ordering.add_stream() for _ in range(count)]
        self.order(self.ordering.fork(parent, children))
        self.groups.append((parent, children))
        return children

    def join(self):
        parent, children = self.groups.pop()
        self.order(self.ordering.join(parent, children))

    def plan(self, steps=None):
        names = dict.fromkeys(name for kernel in self.kernels for name in (*kernel.reads, *kernel.writes))
        buffers = tuple(Buffer(name, 4, "cuda:0", Role.STATE) for name in names)
        return Plan(
            KernelGraph("uses", tuple(self.kernels), buffers, tuple(names)),
            tuple(self.steps if steps is None else steps),
            num_streams=self.ordering.num_streams,
        )


def issue(events):
    issued = Issued()
    streams = [0, *issued.fork(0, 3)]
    for event in events:
        if event[0] == "use":
            issued.use(streams[event[1]], event[2], event[3])
        elif event[0] == "meet":
            issued.order(issued.ordering.meet())
        else:
            parent = streams[event[1]]
            child, *_ = issued.fork(parent, event[2])
            issued.use(child, {0}, {1})
            issued.join()
            issued.use(parent, {1}, set())
    issued.join()
    written = [name for kernel in issued.kernels for name in kernel.writes if name.startswith("w")]
    issued.launch(0, ["before", *written], [])
    return issued


@given(EVENTS)
def test_no_use_races(events):
    assert find_races(issue(events).plan()) == []


@settings(max_examples=60)
@given(st.lists(USES, max_size=16))
def test_every_wait_is_needed(events):
    issued = issue(events)
    for position, step in enumerate(issued.steps):
        if isinstance(step, Wait):
            without = issued.steps[:position] + issued.steps[position + 1 :]
            assert find_races(issued.plan(without)), f"{step} at {position} could be left out of {issued.steps}"


@pytest.mark.parametrize(
    ("first", "second"),
    [(("reads",), ("reads",)), (("reads",), ("writes",)), (("writes",), ("reads",)), (("writes",), ("writes",))],
)
def test_conflicting_uses_are_ordered_and_others_are_not(first, second):
    ordering, memory = Ordering(), TrackedStorage(0)
    one, other = ordering.add_stream(), ordering.add_stream()
    ordering.fork(0, [one, other])

    def use(stream, what):
        return ordering.use(stream, [memory] if "reads" in what else [], [memory] if "writes" in what else [])

    ordering.use(one, []), ordering.use(other, [])
    assert use(one, first) == []
    assert bool(use(other, second)) is ("writes" in (*first, *second))
    assert use(other, second) == [], "the order is known by now"


def used_away_from_home(home=1):
    ordering, memory = Ordering(), TrackedStorage(home)
    one, other = ordering.add_stream(), ordering.add_stream()
    ordering.fork(0, [one, other])
    ordering.use(one, [], [])
    if home is not None:
        ordering.make(memory, home)
    ordering.use(other, [memory])
    return ordering, memory, one, other


def test_what_is_used_away_from_home_is_held():
    ordering, memory, _, _ = used_away_from_home()
    assert list(ordering.held) == [memory]
    assert ordering.release() == []


def test_held_memory_goes_when_its_home_comes_after():
    ordering, memory, one, other = used_away_from_home()
    written_there = TrackedStorage(other)
    ordering.use(other, [], [written_there])
    ordering.use(one, [written_there])
    assert memory in ordering.release()


def test_held_memory_goes_when_the_host_has_seen_the_end():
    ordering, memory, _, other = used_away_from_home()
    ((stream, tick),) = ordering.unreached()
    assert stream == other
    ordering.reach(stream, tick - 1)
    assert ordering.release() == []
    ordering.reach(stream, tick)
    assert ordering.release() == [memory]
    assert not ordering.held


def test_memory_of_unknown_home_is_held_until_the_host_has_seen_the_end():
    ordering, memory, one, other = used_away_from_home(home=None)
    ordering.join(0, [one, other])
    assert ordering.release() == []
    ordering.reach_all()
    assert ordering.release() == [memory]


def test_what_is_used_at_home_alone_is_not_held():
    ordering, memory = Ordering(), TrackedStorage(0)
    ordering.use(0, [memory], [])
    assert not ordering.held


def test_streams_that_do_nothing_are_not_waited_for():
    ordering = Ordering()
    children = [ordering.add_stream() for _ in range(3)]
    assert len(ordering.fork(0, children)) == 1
    ordering.use(children[0], [])
    assert [is_record for is_record, _, _ in ordering.join(0, children)] == [True, False]
