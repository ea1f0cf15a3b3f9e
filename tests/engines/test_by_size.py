"""What is made for which size, and when; decided without a device."""

from collections import namedtuple

import pytest

from millstream.engine import BySize, by_size

Made = namedtuple("Made", "sizes key num_streams")


class Executable:
    """What the first one measured comes to: three streams; the others take what they are told."""

    peak_bytes = 100

    def __init__(self, made):
        self.made, self.num_streams, self.released = made, made.num_streams or 3, False

    def __call__(self, inputs):
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
    def __init__(self, monkeypatch, device_type="cuda", *, at_once=False):
        self.made = []
        monkeypatch.setattr(by_size, "OpenEngine", lambda lowered, sizes: lambda inputs: "open")
        self.run = BySize(Lowered(device_type), self.build, at_once=at_once)

    def build(self, sizes, key, num_streams):
        executable = Executable(Made(sizes, key, num_streams))
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


def test_later_sizes_take_as_many_streams_as_the_first(monkeypatch):
    world = World(monkeypatch, at_once=True)
    for sizes in ([4, 5], [6, 5], [7, 7]):
        world.run(sizes)
    assert [each.made.num_streams for each in world.made] == [None, 3, 3]


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


def test_bytes_are_bounded_beside_the_largest(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_BYTES", 250)
    world = World(monkeypatch, at_once=True)
    for size in range(6):
        world.run([size, size])
    assert len([*world.run]) == 3


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
