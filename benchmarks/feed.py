"""Suite ``feed``: batches to the device beside the computation, and results back.

- ``loop``: milliseconds per step of a loop over some batches, beginning and end included; the source has them ready in
  pageable memory. The bound is the longest of staging, copy and computation, each measured alone. The computation is a
  kernel that only spins, for a given multiple of the copy's time, so that nothing but the feeding differs. It takes its
  turn among the sides, since a device's clock changes.
- ``drain``: the same without any computation: what the way itself can carry.
- ``copy``: the copies of that loop alone, against bare ones of the same bytes from pinned memory; of both the time that
  CUPTI says the copy engine took. (The feed's ledger sees copies between two events. Where the engine is idle it passes
  the first before the host has asked for the copy, which is longer than a copy of 1 MiB.)
- ``next``: host time of asking for a batch that is ready, where the host has slept while it got ready, so that nothing
  of its way is in the processor's caches any more; ``next behind a step``: where it has waited for one on the device.
- ``read out``: a step whose loss is read every time, against one that reads nothing.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measuring.harness import Sample, alternate, by_rounds, synchronize, wall_ms
from benchmarks.measuring.results import TIMES, Row, ratio
from benchmarks.measuring.suite import Settings, run_suite

if TYPE_CHECKING:
    from millstream.data import Feed, Stats

MIB = 1 << 20
RATIOS = (0.25, 0.5, 0.8, 1.0, 2.0, 4.0)
BATCHES = 200  # of an epoch: enough that filling and draining the pipeline is a small part of it
EPOCH_BYTES, EPOCH_LEAVES = 10 << 30, 20_000  # no more than so many, to save time
MAX_ROUNDS = 6  # of epochs that are many measurements already, being longer than
SHORT_MS = 50.0
WARM_EPOCHS = 3
REST_S = 0.03  # between epochs: threads of the side before (OpenMP's, for one) still spin for some ms
NEXT_SAMPLES = 300
NEXT_PAUSE_MS = 2.0  # in which the next batch gets ready
STEP_MS = 3.3  # of the step whose loss is read: what a captured ResNet-50 step of batch 8 takes on an H200

Batch = list[Tensor]
Way = Callable[[Sequence[Batch], torch.device], Iterator[Batch]]


@dataclass(frozen=True)
class FeedCase:
    """Something to be fed or fetched."""

    name: str
    run: Callable[[Settings], list[Row]]
    estimate_s: float


# --- ways to the device ----------------------------------------------------------------------------------------------


def make_feed(batches: Sequence[Batch], device: torch.device, *, prefetch: bool = True) -> Way:
    """``ms.feed``, made once and iterated in each epoch, as one does."""
    import millstream as ms

    fed = ms.feed(batches, device, prefetch=prefetch)
    return lambda *_: iter(fed)


def feed_plainly(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """``tensor.to(device)`` for each batch."""
    for batch in batches:
        yield [leaf.to(device) for leaf in batch]


def feed_pinned(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """A DataLoader that pins, and ``non_blocking`` copies on the loop's stream."""
    loader = DataLoader(batches, batch_size=None, pin_memory=device.type == "cuda")  # type: ignore[arg-type]
    for batch in loader:
        yield [leaf.to(device, non_blocking=True) for leaf in batch]


def feed_beside(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """The prefetcher that everyone writes: the next batch is pinned and copied on a side stream.

    Raises:
        RuntimeError: There is no CUDA device, and so no stream.
    """
    if device.type != "cuda":
        raise RuntimeError("needs a CUDA device")
    stream = torch.cuda.Stream(device)

    def load(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            return [leaf.pin_memory().to(device, non_blocking=True) for leaf in batch]

    following = load(batches[0])
    for i in range(len(batches)):
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        batch = following
        for leaf in batch:
            leaf.record_stream(current)
        if i + 1 < len(batches):
            following = load(batches[i + 1])
        yield batch


def feed_timm(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """timm's own prefetcher, which expects pinned uint8 images and normalises them on its stream."""
    from timm.data.loader import PrefetchLoader

    loader = DataLoader(batches, batch_size=None, pin_memory=device.type == "cuda")  # type: ignore[arg-type]
    yield from PrefetchLoader(loader, device=device)


def make_feed_of_images(batches: Sequence[Batch], device: torch.device) -> Feed:
    """``ms.feed``, normalising as timm does."""
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    import millstream as ms

    mean, std = (
        torch.tensor([255 * value for value in values], device=device).view(1, 3, 1, 1)
        for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    synchronize(device)
    return ms.feed(batches, device, transform=lambda batch: [batch[0].float().sub_(mean).div_(std), batch[1]])


PEERS: dict[str, Way] = {
    "no prefetch": feed_plainly,
    "pin_memory + non_blocking": feed_pinned,
    "side stream": feed_beside,
}

# --- what is computed ------------------------------------------------------------------------------------------------


class Work:
    """A computation of a given length on the device, which needs nothing of it but time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix = torch.randn(64, 64)
        self._per_ms = self._calibrate()

    def _calibrate(self) -> float:
        trial = 20_000_000 if self._device.type == "cuda" else 500
        self._spin(trial)
        return trial / min(wall_ms(partial(self._spin, trial), self._device) for _ in range(5))

    def _spin(self, amount: int) -> None:
        if self._device.type == "cuda":
            torch.cuda._sleep(amount)
        else:
            for _ in range(amount):
                torch.mm(self._matrix, self._matrix)

    def of(self, ms: float) -> Callable[[], None]:
        """Return a function that queues ``ms`` milliseconds of it."""
        amount = round(ms * self._per_ms)
        return partial(self._spin, amount) if amount else lambda: None


def make_batches(sizes: Sequence[int], count: int) -> list[Batch]:
    """Random bytes in pageable memory; four different batches take turns."""
    made = [[torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes] for _ in range(4)]
    return [made[i % len(made)] for i in range(count)]


def make_copy(sizes: Sequence[int], device: torch.device) -> Callable[[], None]:
    """Return a function that copies pinned leaves of these sizes to the device, one after the other."""
    pairs = [
        (torch.empty(n, dtype=torch.uint8, device=device), torch.empty(n, dtype=torch.uint8).pin_memory())
        for n in sizes
    ]

    def copy() -> None:
        for to, come_from in pairs:
            to.copy_(come_from, non_blocking=True)

    return copy


def copy_ms(sizes: Sequence[int], device: torch.device) -> float:
    """Milliseconds that bare copies of pinned leaves take one after the other; the best that the bus can do."""
    if device.type != "cuda":
        return max(sum(sizes) / 10e9 * 1e3, 0.05)  # made up, to try the scripts
    copy, times = make_copy(sizes, device), []
    for _ in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the host shall be ahead
        begin.record()
        copy()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)  # by the median, 16 MiB took 0.34 to 0.44 ms on one host, of which the copy engine worked 0.31


def engine_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that the copy engine is busy with copies to the device while something runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize(device)
    return sum(event.device_time for event in profiler.events() if event.name.startswith("Memcpy HtoD")) / 1e3


def stage_ms(batches: Sequence[Batch], device: torch.device) -> float:
    """Milliseconds to copy a batch into pinned memory, by the code that a feed has for it, in a tight loop."""
    from millstream.data.transfer.staging import PAST_CACHES_BYTES
    from millstream.device.copying import filler

    past_caches = sum(leaf.nbytes for leaf in batches[0]) <= PAST_CACHES_BYTES
    targets = [torch.empty_like(leaf, pin_memory=device.type == "cuda") for leaf in batches[0]]
    compiled, times = filler(), []
    for batch in [*batches[:4]] * 10:
        start = time.perf_counter_ns()
        if compiled is None:
            torch._foreach_copy_(targets, batch)
        else:
            to, sources = (array("Q", [leaf.data_ptr() for leaf in leaves]) for leaves in (targets, batch))
            begin = compiled.prepare(to, array("Q", [leaf.nbytes for leaf in batch]), None, past_caches=past_caches)
            compiled.follow(begin(sources.buffer_info()[0], None)).finish()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return sorted(times[-12:])[6]


# --- loops -----------------------------------------------------------------------------------------------------------


def run_epoch(way: Way, batches: Sequence[Batch], device: torch.device, work: Callable[[], None]) -> None:
    for batch in way(batches, device):
        work()
        del batch


def arrives(way: Way, batches: Sequence[Batch], device: torch.device) -> bool:
    """Whether every batch is on the device as the source has it, looked at after other work of the loop's stream."""
    flags = []
    for batch, sent in zip(way(batches, device), batches, strict=True):
        torch.zeros(1000, device=device).add_(1)
        wanted = [leaf.to(device) for leaf in sent]
        flags += [torch.equal(a, b) for a, b in zip(batch, wanted, strict=True)]
    return all(flags)


def compare_ways(
    facts: Row, ours: Way, peers: dict[str, Way], batches: Sequence[Batch], settings: Settings, work: Callable[[], None]
) -> tuple[list[Row], float]:
    """Time epochs of all sides in turn, and the computation alone; that in ms, too, which may be the bound."""
    device = settings.device
    clocks: dict[str, Callable[[], float]] = {}
    failures: list[Row] = []
    longest = 0.0

    def clock(run: Callable[[], object]) -> float:
        end = time.perf_counter() + REST_S
        while time.perf_counter() < end:
            pass  # a thread that sleeps is slow at first, and those of loops do not
        return wall_ms(run, device) / len(batches)

    for name, way in {"ours": ours, **peers}.items():
        run = partial(run_epoch, way, batches, device, work)
        try:
            for _ in range(WARM_EPOCHS):
                run()
            longest = max(longest, wall_ms(run, device))
        except Exception as error:
            if name == "ours":
                raise
            failures.append(replace(facts, baseline=name, note=f"{name} not run: {error}"))
            continue
        clocks[name] = partial(clock, run)
    clocks["compute"] = partial(clock, lambda: [work() for _ in batches])
    samples = alternate(clocks, settings.rounds if longest < SHORT_MS else min(settings.rounds, MAX_ROUNDS))
    own, compute = samples.pop("ours"), samples.pop("compute").median
    bound = max(facts.bound_ms or 0.0, compute)
    facts = replace(facts, ours_ms=own.median, p20=own.p20, p80=own.p80, bound_ms=bound)
    if samples:
        rounds = ", ".join(told_by_rounds(name, sample, own) for name, sample in samples.items())
        facts = replace(facts, note=f"by rounds {rounds}")
    rows = [
        replace(facts, baseline=name, baseline_ms=sample.median, ratio=ratio(sample.median, own.median))
        for name, sample in samples.items()
    ]
    return [*(rows or [facts]), *failures], compute


def watch(fed: Feed, work: Callable[[], None], device: torch.device) -> tuple[Stats, float | None]:
    """What a feed says of some epochs, and which share of the copies' time was hidden behind the first of them.

    In the first pass all of the first batches are measured, which wait for memory to be pinned; later a batch in 20 ms.
    """
    for _ in range(WARM_EPOCHS):
        run_epoch(lambda *_: iter(fed), (), device, work)
        synchronize(device)
    found = []
    for _ in range(3 * WARM_EPOCHS):
        run_epoch(lambda *_: iter(fed), (), device, work)
        synchronize(device)
        found.append(fed.stats())
    passes = [each for each in found if each.hidden is not None]
    copied = sum(each.copy_s * each.num_measured for each in passes)
    hidden = sum(each.copy_s * each.num_measured * (each.hidden or 0.0) for each in passes)
    stats = replace(found[-1], num_measured=sum(each.num_measured for each in found))
    return stats, hidden / copied if copied else None


def told_by_rounds(name: str, baseline: Sample, own: Sample) -> str:
    """How a baseline compares round by round, in a few words."""
    sample = by_rounds(baseline, own)
    return f"{name} {sample.median:.2f}{TIMES} ({sample.p20:.2f} to {sample.p80:.2f})"


def told(stats: Stats, hidden: float | None) -> list[str]:
    """The same in a few words, with the copies' mean time as the feed sees it."""
    shares = []
    if hidden is not None:
        shares = [f"{hidden:.1%} of copies hidden (of {stats.copy_s * 1e3:.3g} ms, in {stats.num_measured} steps)"]
    return [*shares, *([] if stats.has_worker else ["no worker"])]


def run_loop(
    name: str, sizes: Sequence[int], copy_to_compute: float | None, settings: Settings, *, prefetch: bool = True
) -> list[Row]:
    """A loop whose computation is the copy's time over ``copy_to_compute``; ``None``: no computation at all."""
    import millstream as ms

    device = settings.device
    sizes = [max(size // 64, 1) for size in sizes] if settings.tiny else list(sizes)
    batches = make_batches(sizes, min(BATCHES, EPOCH_BYTES // sum(sizes), EPOCH_LEAVES // len(sizes)))
    copy, stage = copy_ms(sizes, device), stage_ms(batches, device)
    work = Work(device).of(copy / copy_to_compute if copy_to_compute else 0.0)
    variant = "loop" if copy_to_compute else "drain"
    ours = make_feed(batches, device, prefetch=prefetch)
    facts = Row(name, variant, bound_ms=max(copy, stage), equal=arrives(ours, batches, device))
    if not facts.equal:
        return [replace(facts, note="not timed: batches do not arrive as they were sent")]
    peers = {peer: way for peer, way in PEERS.items() if settings.wants(peer)}
    rows, compute = compare_ways(facts, ours, peers, batches, settings, work)
    watched = watch(ms.feed(batches, device, prefetch=prefetch), work, device)
    parts = f"copy {copy:.3g}, stage {stage:.3g}, compute {compute:.3g} ms alone"
    over = f"{ratio(rows[0].ours_ms, rows[0].bound_ms):.3f} of the bound"
    rows = [replace(row, note="; ".join(filter(None, (row.note, parts, *told(*watched), over)))) for row in rows]
    if device.type == "cuda":
        mine = engine_ms(partial(run_epoch, ours, batches, device, work), device) / len(batches)
        copy_plainly = make_copy(sizes, device)
        bare = engine_ms(lambda: [copy_plainly() for _ in batches], device) / len(batches)
        rate = f"{sum(sizes) / mine / 1e6:.1f} GB/s"
        rows.append(Row(name, "copy", "bare pinned copy", bare, mine, ratio(bare, mine), note=rate))
    return rows


def run_next(name: str, sizes: Sequence[int], settings: Settings) -> list[Row]:
    """Host time of ``next`` when the batch is ready."""
    import millstream as ms

    device = settings.device
    samples = 50 if settings.tiny else NEXT_SAMPLES
    work = Work(device).of(NEXT_PAUSE_MS)
    pauses = {"next": partial(time.sleep, NEXT_PAUSE_MS / 1e3), "next behind a step": work}
    rows = []
    for variant, pause in pauses.items():
        times, passing = [], iter(ms.feed(make_batches(sizes, samples + 10), device))
        for i, batch in enumerate(passing):
            del batch
            synchronize(device)
            pause()
            synchronize(device)
            if i < 10 or i >= samples + 9:
                continue
            start = time.perf_counter_ns()
            batch = next(passing)
            times.append((time.perf_counter_ns() - start) / 1e6)
            del batch
        sample, last = Sample.of(times), sorted(times)[math.ceil(0.99 * len(times)) - 1]
        note = f"p50 {sample.median * 1e3:.0f} µs, p99 {last * 1e3:.0f} µs"
        rows.append(Row(name, variant, ours_ms=sample.median, p20=sample.p20, p80=sample.p80, note=note))
    return rows


def run_images(name: str, settings: Settings) -> list[Row]:
    """Images as bytes, normalised on the device, against timm's prefetcher."""
    device = settings.device
    size = (4, 3, 32, 32) if settings.tiny else (64, 3, 224, 224)
    made = [[torch.randint(0, 256, size, dtype=torch.uint8), torch.randint(1000, size[:1])] for _ in range(4)]
    batches = [made[i % 4] for i in range(BATCHES)]
    copy = copy_ms([leaf.nbytes for leaf in batches[0]], device)
    fed = make_feed_of_images(batches, device)
    if device.type == "cuda":
        theirs = list(feed_timm(batches[:4], device))
        mine = list(islice(fed, 4))
        equal = all(torch.allclose(a, b) for x, y in zip(theirs, mine, strict=True) for a, b in zip(x, y, strict=True))
    else:
        equal = None
    facts = Row(name, "loop", bound_ms=copy, equal=equal)
    work = Work(device).of(2 * copy)
    rows, _ = compare_ways(facts, lambda *_: iter(fed), {"timm": feed_timm}, batches, settings, work)
    stats, hidden = watch(fed, work, device)
    shares = ", ".join(f"{cause} {share:.0%}" for cause, share in stats.shares.items())
    said = told(stats, hidden)
    parts = [f"copy {copy:.3g} ms alone", *said, f"of each step {shares}"] if shares else said
    return [replace(row, note="; ".join(filter(None, (row.note, *parts)))) for row in rows]


# --- results ---------------------------------------------------------------------------------------------------------


def run_read_out(name: str, step: Callable[[], Tensor], settings: Settings) -> list[Row]:
    """A step whose loss is fetched each time, against reading it by ``item`` and not at all."""
    import millstream as ms

    device, steps = settings.device, 5 if settings.tiny else 100  # the wait for the last result is a part of it

    def fetch_each() -> None:
        futures = [ms.fetch(step(), step=i) for i in range(steps)]
        for future in futures:
            future.result()

    def item_each() -> None:
        for _ in range(steps):
            step().item()

    def read_nothing() -> None:
        for _ in range(steps):
            step()

    runs = {"ours": fetch_each, "no read-out": read_nothing, ".item() each step": item_each}
    for run in runs.values():
        run()
    clocks = {side: partial(lambda run: wall_ms(run, device) / steps, run) for side, run in runs.items()}
    samples = alternate(clocks, min(settings.rounds, MAX_ROUNDS))
    own = samples.pop("ours")
    facts = Row(name, "read out", ours_ms=own.median, p20=own.p20, p80=own.p80)
    return [
        replace(facts, baseline=side, baseline_ms=sample.median, ratio=ratio(sample.median, own.median))
        for side, sample in samples.items()
    ]


def run_read_out_of_spin(name: str, settings: Settings) -> list[Row]:
    """A step that spins, and changes its loss in place as a graph does."""
    device = settings.device
    work = Work(device).of(0.2 if settings.tiny else STEP_MS)
    loss = torch.zeros((), device=device)

    def step() -> Tensor:
        work()
        return loss.add_(1)

    return run_read_out(name, step, settings)


def run_read_out_of_network(name: str, settings: Settings) -> list[Row]:
    """The captured training step of ResNet-50."""
    import millstream as ms
    from benchmarks.cases.models import TRAINING
    from benchmarks.measuring.baselines import trainee

    case = next(case for case in TRAINING if case.name == "resnet50 b8")
    problem = case.make(settings.device, tiny=settings.tiny)
    side = trainee(problem)
    step = ms.step(problem.make_step(side.model, side.optimizer), strict=True)
    for i in range(3):
        step(*problem.batches[i % len(problem.batches)])
    return run_read_out(name, lambda: step(*problem.batches[0]), settings)


def run_case(case: FeedCase, settings: Settings) -> list[Row]:
    return case.run(settings)


TEN_LEAVES = [16 * MIB, 4 * MIB, MIB, MIB, 256 << 10, 64 << 10, 4096, 512, 64, 8]
SMALL_LEAVES = [256 + 16 * (i % 100) for i in range(500)]

CASES = (
    *(
        FeedCase(f"copy : compute {share:g}", partial(run_loop, f"copy : compute {share:g}", [64 * MIB], share), 15)
        for share in RATIOS
    ),
    *(
        FeedCase(f"1 x {n} MiB", partial(run_loop, f"1 x {n} MiB", [n * MIB], 0.8, prefetch=n > 1), 10 + n / 6)
        for n in (1, 16, 256)
    ),
    FeedCase("10 leaves", partial(run_loop, "10 leaves", TEN_LEAVES, 0.8), 15),
    FeedCase("500 small leaves", partial(run_loop, "500 small leaves", SMALL_LEAVES, 0.1), 20),
    *(FeedCase(f"drain {n} MiB", partial(run_loop, f"drain {n} MiB", [n * MIB], None), 10 + n / 6) for n in (64, 256)),
    FeedCase("images 64 x 224", partial(run_images, "images 64 x 224"), 20),
    FeedCase("next of 10 leaves", partial(run_next, "next of 10 leaves", [4096] * 10), 5),
    FeedCase("next of 500 leaves", partial(run_next, "next of 500 leaves", SMALL_LEAVES), 5),
    FeedCase("read out of a spin", partial(run_read_out_of_spin, "read out of a spin"), 15),
    FeedCase("read out of resnet50 b8", partial(run_read_out_of_network, "read out of resnet50 b8"), 150),
)

if __name__ == "__main__":
    sys.exit(run_suite("feed", CASES, run_case))
