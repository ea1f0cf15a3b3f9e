"""Decide, without a device, whether inputs are read where their caller has them instead of being copied first.

A captured graph reads fixed addresses; inputs are copied there before each replay. What a feeder brings lies in the
buffers of a pool, at a few addresses in turn. Once a set of addresses has come back, another graph of the same plan can
be captured that reads its inputs at just these addresses, and the copy is saved.

**Contract**
- A graph is found only for a call whose inputs all lie where the graph reads them.
- There are at most ``MOST_GRAPHS`` at a time. One gives way only when it has not served for ``PATIENCE`` calls, and
each that had to go makes the next one harder to get: addresses that never settle cause ever fewer captures.
- Graphs are captured only where copies take ``LEAST_SHARE`` of a call, and kept only if calls are faster with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from statistics import median
from typing import Generic, TypeVar

Addresses = tuple[int, ...]
Graph = TypeVar("Graph")

#: ``True``: read in place whatever it gains; ``False``: never; ``None``: decide by size and time. For tests and
#: benchmarks; it holds for what is captured from then on.
FORCED: bool | None = None

LEAST_BYTES = 1 << 20  # to copy less takes 2 or 3 µs, however little it is: nothing that could be seen in a step
LEAST_SHARE = 0.005  # of a call's time on the device, that copies must take: below it, a measurement is noise
LARGE_BYTES = 1 << 16  # inputs from here on are worth a graph even if the small ones beside them are never in one place
ALIGNMENT_BYTES = 256  # as slots have it: kernels are compiled for 16 bytes, and cuBLASLt chooses by up to 256

MOST_GRAPHS = 8  # a feeder's pool has 2 buffers, or up to 8
LEAST_RETURNS = 2  # so often a set of addresses must have come back: what happened once may be chance
PATIENCE = 4 * MOST_GRAPHS  # calls in which every buffer of a pool comes round several times
SAMPLES = 15  # timed calls of each kind: the median of so many tells half a percent


class InPlaceCache(Generic[Graph]):
    """Graphs by the addresses where they read, and which addresses deserve the next one.

    Args:
        num_bytes: What copying each input moves, by position; these are watched at first. Where that leads nowhere,
            because small inputs lie elsewhere in every call, the large ones are watched alone.

    Attributes:
        positions: The inputs whose addresses are to be passed, in this order.
    """

    def __init__(self, num_bytes: Mapping[int, int]) -> None:
        self.positions = tuple(num_bytes)
        self._large = tuple(position for position, size in num_bytes.items() if size >= LARGE_BYTES)
        self._graphs: dict[Addresses, Graph] = {}
        self._used: dict[Addresses, int] = {}  # the latest call of each graph
        self._returns: OrderedDict[Addresses, float] = OrderedDict()  # of addresses without a graph, latest last
        self._calls = self._misses = self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, addresses: Addresses) -> Graph | None:
        """Count a call and return the graph for it, if there is one."""
        self._calls += 1
        graph = self._graphs.get(addresses)
        if graph is not None:
            self._misses = 0
            self._used[addresses] = self._calls
        return graph

    def miss(self, addresses: Addresses) -> bool:
        """Note a call without a graph; tell whether its addresses deserve one, to be given by ``keep``."""
        self._misses += 1
        if self._misses > PATIENCE and self._large and self._large != self.positions:
            self.positions = self._large
            self._forget()
            return False
        if any(address % ALIGNMENT_BYTES for address in addresses):
            return False
        returns = self._returns.pop(addresses, -1) + 1
        self._returns[addresses] = returns
        if len(self._returns) > PATIENCE:
            self._returns.popitem(last=False)
        return returns >= LEAST_RETURNS + self._num_dropped and self._has_room()

    def keep(self, addresses: Addresses, graph: Graph) -> None:
        """Take in a graph; the one that has not served for longest goes if there is no room."""
        if len(self._graphs) == MOST_GRAPHS:
            oldest = min(self._used, key=self._used.__getitem__)
            del self._graphs[oldest], self._used[oldest]
            self._num_dropped += 1
        self._returns.pop(addresses, None)
        self._graphs[addresses], self._used[addresses] = graph, self._calls

    def refuse(self, addresses: Addresses) -> None:
        """Do not ask for a graph at these addresses again."""
        self._returns[addresses] = -float("inf")

    def _has_room(self) -> bool:
        return len(self._graphs) < MOST_GRAPHS or self._calls - min(self._used.values()) > PATIENCE

    def _forget(self) -> None:
        self._num_dropped += len(self._graphs)
        self._misses = 0
        for table in (self._graphs, self._used, self._returns):
            table.clear()


class CopyTrial:
    """Tells from the times of calls whether copies are worth avoiding, and then whether that has made calls faster.

    The times are those of calls that are made anyway: nothing runs twice, and the host waits for nothing. Calls that
    copy and calls that do not are compared in turn, so that what slows all of them down decides nothing.

    Attributes:
        promising: Whether copies take enough of a call to be worth a capture; ``None`` before so much is known.
        faster: Whether calls that read in place have proved faster; ``None`` before so much is known.
    """

    def __init__(self) -> None:
        self.promising: bool | None = None
        self.faster: bool | None = None
        self._shares: list[float] = []
        self._ms: dict[bool, list[float]] = {False: [], True: []}  # by whether inputs were read in place
        self._in_place = False

    def take_turn(self) -> bool:
        """Return whether the next call for which there is a graph shall read in place."""
        self._in_place = not self._in_place
        return self._in_place

    def add(self, copy_ms: float, replay_ms: float, *, in_place: bool) -> None:
        """Note the time of a call."""
        if self.promising is None:
            self._shares.append(copy_ms / max(copy_ms + replay_ms, 1e-6))
            if len(self._shares) == SAMPLES:
                self.promising = median(self._shares) >= LEAST_SHARE
            return
        self._ms[in_place].append(copy_ms + replay_ms)
        if min(map(len, self._ms.values())) >= SAMPLES:
            self.faster = median(self._ms[True]) < median(self._ms[False])
