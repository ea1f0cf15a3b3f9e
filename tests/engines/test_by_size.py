"""What is made for which size, and when; decided without a device."""

from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest

from millstream.engine import BySize, by_size

Made = namedtuple("Made", "sizes key many")


class Executable:
    """It is settled by its first call, and holds as many bytes for itself as the world says."""

    peak_bytes = 100
    num_kernels = 10

    def __init__(self, made, *, shares_memory):
        self.made, self.shares_memory, self.is_settled, self.released = made, shares_memory, False, False
        self.notes = []

    def __call__(self, inputs):
        self.is_settled = True
        return self.made.sizes

    def release(self):
        self.released = True


class Program:
    symbols = ("s0", "s1")

    def __init__(self, device_type):
        self.device_type = device_type

    def sizes(self, inputs):
        return tuple(inputs)


class Lowered:
    def __init__(self, device_type):
        self.program = Program(device_type)

    def at(self, sizes):
        return sizes


class World:
    def __init__(self, monkeypatch, device_type="cuda", *, at_once=False, shares_memory=False):
        self.made, self.shares_memory = [], shares_memory
        monkeypatch.setattr(by_size, "OpenEngine", lambda lowered, sizes, notes: lambda inputs: "open")
        self.run = BySize(Lowered(device_type), self.build, at_once=at_once)

    def build(self, sizes, key, many):
        executable = Executable(Made(sizes, key, many), shares_memory=self.shares_memory)
        self.made.append(executable)
        return executable


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_size_gets_an_executable_when_it_comes_again(monkeypatch, device_type):
    world = World(monkeypatch, device_type)
    calls = by_size.OPEN_CALLS[device_type]
    assert [world.run([4, 5]) for _ in range(calls + 2)] == ["open"] * calls + [(4, 5)] * 2
    assert len(world.made) == 1


def test_an_engine_asked_for_runs_at_once(monkeypatch):
    world = World(monkeypatch, at_once=True)
    assert world.run([4, 5]) == (4, 5)


def test_later_sizes_are_planned_like_the_first_in_one_arena(monkeypatch):
    world = World(monkeypatch)
    for sizes in ([4, 5], [6, 5], [7, 7]) * 2:
        world.run(sizes)
    first, *others = world.made
    assert first.made.many.like is None
    assert [each.made.many.like for each in others] == [first, first]
    assert all(each.made.many.arena is world.run.arena for each in world.made)
    assert [each.made.many.is_warm for each in world.made] == [False, True, True]


def test_sizes_wait_for_the_plan_of_the_first_for_a_while(monkeypatch):
    world = World(monkeypatch)
    for sizes in ([4, 5], [6, 5]):
        world.run(sizes)
    world.run._make((4, 5))  # and before it has run
    for _ in range(by_size.PATIENCE):
        assert world.run([6, 5]) == "open"
    assert world.run([6, 5]) == (6, 5)
    assert world.made[1].made.many.like is None


def test_another_thread_is_not_warm(monkeypatch):
    world = World(monkeypatch)
    for sizes in ([4, 5], [4, 5], [6, 5]):
        world.run(sizes)
    with ThreadPoolExecutor() as pool:
        pool.submit(world.run, [6, 5]).result()
    assert not world.made[1].made.many.is_warm


def test_on_a_cpu_a_call_beside_another_runs_from_the_open_text(monkeypatch):
    world = World(monkeypatch, "cpu", at_once=True)
    assert world.run([4, 5]) == (4, 5)
    with world.run.arena.lock, ThreadPoolExecutor() as pool:
        assert pool.submit(world.run, [4, 5]).result() == "open"
    assert world.run([4, 5]) == (4, 5)


def test_forward_and_backward_of_one_size_have_one_key(monkeypatch):
    forward, backward = (World(monkeypatch, at_once=True) for _ in range(2))
    backward.run._sizes = lambda inputs: tuple(reversed(inputs))
    backward.run._lowered.program.symbols = ("s1", "s0")
    for world in (forward, backward):
        world.run([4, 5])
    assert forward.made[0].made.key == backward.made[0].made.key
    forward.run([5, 4])
    assert forward.made[1].made.key != forward.made[0].made.key


def test_executables_are_bounded_in_number_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 2)
    world = World(monkeypatch, at_once=True)
    for sizes in ([1, 1], [2, 2], [1, 1], [3, 3]):
        world.run(sizes)
    assert [each.made.sizes for each in world.made if each.released] == [(2, 2)]
    assert [each.made.sizes for each in world.run] == [(1, 1), (3, 3)]


def test_kernels_are_bounded(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_KERNELS", 35)
    world = World(monkeypatch, at_once=True)
    for size in range(6):
        world.run([size, size])
    assert [each.made.sizes for each in world.run] == [(3, 3), (4, 4), (5, 5)]


def test_bytes_are_bounded_beside_the_largest(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_BYTES", 250)
    world = World(monkeypatch, at_once=True)
    for size in range(6):
        world.run([size, size])
    assert len([*world.run]) == 3


def test_bytes_in_the_arena_are_not_counted_for_each(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_BYTES", 250)
    world = World(monkeypatch, at_once=True, shares_memory=True)
    for size in range(6):
        world.run([size, size])
    assert len([*world.run]) == 6


def test_where_executables_go_soon_others_are_made_later(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 4)
    world = World(monkeypatch)
    for _ in range(20):
        for size in range(20):
            world.run([size, size])
    assert len(world.made) < 12


def test_counts_start_anew_after_thousands_of_sizes(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_COUNTED", 10)
    world = World(monkeypatch)
    for size in range(1000):
        world.run([size, size])
    assert not world.made
    assert len(world.run._counts) <= 12
