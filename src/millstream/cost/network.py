"""Costs of collectives: a network of links, and the time of an exchange over it by ring, tree, or in two levels.

A link has one or more *rates*, as libraries have protocols: one that begins at once, and one that is quicker for large
messages. A rate is three numbers: ``start_ns``, what a collective takes however small it is, ``hop_ns`` for each step
from one device to the next, and ``bytes_per_s``. An all-reduce of B bytes over n devices of one link takes

- as a *ring* ``start + 2 (n - 1) hop + 2 (n - 1) / n B / bytes_per_s``
- as a *tree* ``start + 2 log2(n) hop + 2 B / bytes_per_s``
- *hierarchical*, over hosts of g devices each: a reduce-scatter in each host, an all-reduce of B / g between hosts on
  every device's own adapter, and an all-gather in each host

and the quickest of all counts. Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH" (2005) for the counts; NCCL's ``tuning.cc`` for protocols with a start and hops.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from millstream.errors import ArgumentError

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of a link in one protocol.

    Attributes:
        start_ns: Of a collective, however small and however few take part.
        hop_ns: Of a step from one device to the next.
        bytes_per_s: That each device sends, and receives, at the same time; infinite for a link that costs nothing.

    Raises:
        ArgumentError: One is negative, or there is no bandwidth.
    """

    start_ns: float
    hop_ns: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.start_ns < math.inf and 0 <= self.hop_ns < math.inf and self.bytes_per_s > 0):
            numbers = self.start_ns, self.hop_ns, self.bytes_per_s
            raise ArgumentError(f"a link has start, hop and bandwidth {numbers}: expected positive ones")

    def __str__(self) -> str:
        start_us, hop_us, gbytes_per_s = self.start_ns / 1e3, self.hop_ns / 1e3, self.bytes_per_s / 1e9
        return f"{start_us:.3g} µs + {hop_us:.3g} µs a hop + bytes / {gbytes_per_s:.3g} GB/s"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between devices.

    Attributes:
        name: For people.
        rates: In each protocol.
        source: Where the numbers are from.
        measured_devices: Up to so many devices they were measured on; 0 where nothing was.
    """

    name: str
    rates: tuple[Rate, ...]
    source: str = ""
    measured_devices: int = 0

    def copy_ns(self, num_bytes: int) -> int:
        """Return how long one device takes to send so much to another."""
        return math.ceil(min(rate.hop_ns + num_bytes * 1e9 / rate.bytes_per_s for rate in self.rates))

    def describe(self) -> str:
        """Its numbers, for people."""
        return f"{self.name}: {', or '.join(map(str, self.rates))}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts of some devices each.

    Attributes:
        within: What connects the devices of a host.
        between: What connects hosts, an adapter for each device; ``None`` where there is one host only.
        per_host: Devices of a host.
    """

    within: Link
    between: Link | None = None
    per_host: int = 8

    def __post_init__(self) -> None:
        if self.per_host < 1:
            raise ArgumentError(f"there are {self.per_host} devices in a host: expected one or more")

    def is_verified(self, num_devices: int) -> bool:
        """Return whether the links were measured on as many devices."""
        if num_devices > self.per_host:
            return self.between is not None and num_devices <= self.between.measured_devices
        return num_devices <= self.within.measured_devices

    def describe(self) -> list[str]:
        """Its links, for people."""
        lines = [f"within a host of {self.per_host}, {self.within.describe()}"]
        return [*lines, f"between hosts, {self.between.describe()}"] if self.between else lines

    def time_ns(self, operation: str, num_bytes: int, num_devices: int) -> int:
        """Return how long a collective takes by the quickest way, from when the last device has come.

        Args:
            operation: One of ``OPERATIONS``.
            num_bytes: Of the whole that each device has in the end, or, of a reduce-scatter, in the beginning.
            num_devices: That take part; one alone exchanges nothing.

        Raises:
            ArgumentError: There are more devices than a host has, and no link between hosts; or no such operation.
        """
        return self.choose(operation, num_bytes, num_devices)[1]

    def choose(self, operation: str, num_bytes: int, num_devices: int) -> tuple[str, int]:
        """The quickest way and its ns; see ``time_ns``."""
        if operation not in OPERATIONS:
            raise ArgumentError(f"{operation!r} is none of {', '.join(OPERATIONS)}")
        if num_devices <= 1:
            return "none", 0
        passes = 2 if operation == "all_reduce" else 1
        times = ((math.ceil(way.time_ns(num_bytes, passes)), name) for name, way in self._ways(num_devices))
        time_ns, name = min(times)
        return name, time_ns

    def _ways(self, num_devices: int) -> Iterator[tuple[str, _RingPass]]:
        if num_devices <= self.per_host:
            n = num_devices
            for rate in self.within.rates:
                yield "ring", _RingPass(rate.start_ns, (n - 1) * rate.hop_ns, (n - 1) / n / rate.bytes_per_s)
                yield "tree", _RingPass(rate.start_ns, math.log2(n) * rate.hop_ns, 1 / rate.bytes_per_s)
            return
        if self.between is None:
            raise ArgumentError(
                f"{num_devices} devices are more than one host of {self.per_host}: name a link between hosts, as in "
                "nvlink,ib-400"
            )
        hosts, g, share = math.ceil(num_devices / self.per_host), self.per_host, (num_devices - 1) / num_devices
        for within, between in itertools.product(self.within.rates, self.between.rates):
            start_ns = max(within.start_ns, between.start_ns)
            # Rings through all devices, one for each adapter: as quick as all adapters, or as the links within.
            slowest = min(within.bytes_per_s, g * between.bytes_per_s)
            ring_ns = (num_devices - hosts) * within.hop_ns + hosts * between.hop_ns
            yield "ring", _RingPass(start_ns, ring_ns, share / slowest)
            tree_ns = (g - 1) * within.hop_ns + math.log2(hosts) * between.hop_ns
            yield "tree", _RingPass(start_ns, tree_ns, 1 / slowest)
            levels_ns = (g - 1) * within.hop_ns + (hosts - 1) * between.hop_ns
            levels = (g - 1) / g / within.bytes_per_s + (hosts - 1) / hosts / g / between.bytes_per_s
            yield "hierarchical", _RingPass(2 * within.start_ns + between.start_ns, levels_ns, levels)


@dataclass(frozen=True, slots=True)
class _RingPass:
    """One pass over all devices: a reduce-scatter, or an all-gather; an all-reduce is two of them."""

    start_ns: float
    hops_ns: float
    s_per_byte: float

    def time_ns(self, num_bytes: int, passes: int) -> float:
        return self.start_ns + passes * (self.hops_ns + num_bytes * self.s_per_byte * 1e9)


NVLINK = Link(
    "nvlink",
    (Rate(7_280, 1_000, 167e9), Rate(17_800, 1_000, 298e9)),
    source="start and bandwidth fitted to all-reduces captured on two H200; the hop is from others' times on 4 and 8 "
    "H100 (vllm#24111, vllm#42324)",
    measured_devices=2,
)
"""NVLink 4 through switches, without multicast: ``benchmarks/results/collectives.json``."""

GLOO = Link(
    "gloo",
    (Rate(80_000, 20_000, 1.1e9),),
    source="in orders of magnitude: two processes of one machine with two cores",
)
"""Gloo between processes of one host."""

_RATED = re.compile(r"(ib|eth)-(\d+(?:\.\d+)?)")
_HOP_NS = {"ib": 8_500, "eth": 25_000}
_EFFICIENCY = 0.95  # of the line rate: headers, and what NCCL's proxies leave
KNOWN = {"nvlink": NVLINK, "gloo": GLOO, "free": Link("free", (Rate(0, 0, math.inf),), "costs nothing")}


def parse_link(text: str) -> Link:
    """The link of a name: ``nvlink``, ``gloo``, ``free``, or ``ib-400`` or ``eth-100`` with Gbit/s for each device.

    Raises:
        ArgumentError: There is none of this name.
    """
    if text in KNOWN:
        return KNOWN[text]
    rated = _RATED.fullmatch(text)
    if rated is None or not float(rated[2]):
        names = ", ".join(KNOWN)
        raise ArgumentError(f"no link is called {text!r}: take {names}, ib-GBITS or eth-GBITS, as in ib-400")
    kind, gbits = rated[1], float(rated[2])
    source = f"{_EFFICIENCY:.0%} of the line rate; the hop is NCCL's tuning constant for LL128 in a tree over a network"
    if kind == "eth":
        source = f"{_EFFICIENCY:.0%} of the line rate; the hop is assumed"
    return Link(text, (Rate(10_000, _HOP_NS[kind], gbits * 1e9 / 8 * _EFFICIENCY),), source.replace("%", " %"))


def parse_network(text: str, per_host: int = 8, fitted: Link | None = None) -> Network:
    """A network of one or two links, from within hosts outwards, as in ``nvlink,ib-400``.

    Args:
        text: Names of links, see ``parse_link``.
        per_host: Devices of a host.
        fitted: Takes the place of the link of its name.

    Raises:
        ArgumentError: It has no such form.
    """
    names = [name.strip() for name in text.split(",")]
    if not 1 <= len(names) <= 2:
        raise ArgumentError(f"the network {text!r} has {len(names)} links: name one within hosts and one between them")
    links = [fitted if fitted is not None and name == fitted.name else parse_link(name) for name in names]
    return Network(links[0], links[1] if len(links) > 1 else None, per_host)


@dataclass(frozen=True, slots=True)
class TimedReduction:
    """An all-reduce that was measured: devices, bytes, ns."""

    num_devices: int
    num_bytes: int
    time_ns: float


def fit_link(name: str, times: Iterable[TimedReduction], source: str = "") -> Link:
    """The link that explains measured all-reduces of one host best, as rings.

    Least squares of relative errors, none of the numbers negative: for all sizes one rate, or one for the smaller and
    one for the larger sizes where that explains them better. With one number of devices only, starts and hops cannot be
    told apart: the hop is that of ``NVLINK``.

    Raises:
        ArgumentError: There are too few of them.
    """
    times = sorted(times, key=lambda each: each.num_bytes)
    sizes = sorted({each.num_bytes for each in times})
    if len(sizes) < 2 or any(each.num_devices < 2 or each.time_ns <= 0 for each in times):
        raise ArgumentError(f"{len(times)} times of {len(sizes)} sizes tell no start and bandwidth: measure more sizes")
    counts = {each.num_devices for each in times}
    found: list[tuple[Rate, ...]] = [(_fit_rate(times),)]
    for border in sizes[2:-1]:  # two sizes or more on each side
        parts = (
            [each for each in times if each.num_bytes < border],
            [each for each in times if each.num_bytes >= border],
        )
        found.append((_fit_rate(parts[0]), _fit_rate(parts[1])))

    def error(rates: tuple[Rate, ...]) -> float:
        network = Network(Link(name, rates), per_host=max(counts))
        return sum(
            (network.time_ns("all_reduce", each.num_bytes, each.num_devices) / each.time_ns - 1) ** 2 for each in times
        )

    return Link(name, min(found, key=error), source, max(counts))


def _fit_rate(times: Sequence[TimedReduction]) -> Rate:
    counts = {each.num_devices for each in times}
    known_hop_ns = NVLINK.rates[0].hop_ns if len(counts) == 1 else 0.0
    rows, values = [], []
    for each in times:
        n, weight = each.num_devices, 1 / each.time_ns
        steps = 2 * (n - 1)
        rows.append([weight, steps / n * each.num_bytes * weight, *([steps * weight] if len(counts) > 1 else [])])
        values.append((each.time_ns - known_hop_ns * steps) * weight)
    solved = _least_squares(rows, values)
    start_ns, ns_per_byte = solved[0], solved[1]
    hop_ns = solved[2] if len(counts) > 1 else known_hop_ns
    if start_ns < 0:  # then less of what is known is in the hops
        hop_ns, start_ns = hop_ns + start_ns / (2 * (min(counts) - 1)), 0.0
    return Rate(start_ns, max(hop_ns, 0.0), 1e9 / ns_per_byte if ns_per_byte > 0 else math.inf)


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve the normal equations by elimination with scaled columns."""
    width = len(rows[0])
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in range(width)]
    scaled = [[row[i] / scale[i] for i in range(width)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * value for row, value in zip(scaled, values, strict=True))]
        for i in range(width)
    ]
    for column in range(width):
        pivot = max(range(column, width), key=lambda i: abs(matrix[i][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        if abs(matrix[column][column]) < 1e-12:
            raise ArgumentError("these times do not tell starts, hops and bandwidth apart: measure other sizes")
        for i in range(width):
            if i != column:
                factor = matrix[i][column] / matrix[column][column]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[column], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]
