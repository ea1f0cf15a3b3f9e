"""Whether feeds leave anything behind: many epochs of each kind of source, and what a process holds after each.

Run by ``make soak``; ``python -m benchmarks.sweeps.feed_life --device cuda`` on a GPU. Each source has a process of its
own. Epochs end in turn by themselves and by ``break``. What is looked at: memory, threads, open files, child processes,
events of the device context, and how long the process takes to end after its last line, beyond one without a feed.
Without a GPU the device is the virtual one of the tests, which has events, too. ``--out benchmarks/results/soak.md``
keeps the figures.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import millstream as ms
from millstream.data import Feed

NUM_EPOCHS, NUM_BATCHES, ROWS, WIDTH = 50, 8, 16, 1024
WARM_EPOCHS = 10  # in which memory settles
MOST_GROWTH_MIB = 8.0  # of memory from then on: the allocator's, which has no steps as small as a batch (64 KiB)
MOST_EXIT_S = 1.0
MOST_S = 1200  # for all epochs of a source; then it hangs, and its threads are shown
MOST_INSIDE_S = 20.0  # a feed's thread may be inside the loader, which looks for dead workers every five seconds


class Rows(Dataset[Any]):
    """Rows; the worker that makes a certain one is killed meanwhile."""

    def __init__(self, deadly: int = -1) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return NUM_BATCHES * ROWS

    def __getitem__(self, index: int) -> Any:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((WIDTH,), float(index)), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((WIDTH,), float(i)) for i in range(NUM_BATCHES * ROWS))


class Generated:
    def __iter__(self) -> Iterator[Any]:
        for i in range(NUM_BATCHES):
            yield torch.full((ROWS, WIDTH), float(i))


def read_queue() -> Iterator[Any]:
    """A queue that blocks after each few batches, until another thread has put more of them into it."""
    batches: queue.Queue[Any] = queue.Queue()

    def fill() -> None:
        for i in range(10**9):
            while batches.qsize() >= NUM_BATCHES:
                time.sleep(0.002)
            batches.put(torch.full((ROWS, WIDTH), float(i)))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield batches.get()


def read_queue_that_ends() -> Iterator[Any]:
    """A queue that nobody fills any more: its reader waits for ever, and is left there."""
    batches: queue.Queue[Any] = queue.Queue()
    for i in range(NUM_BATCHES):
        batches.put(torch.full((ROWS, WIDTH), float(i)))
    while True:
        yield batches.get()


class Blocking:
    def __iter__(self) -> Iterator[Any]:
        return read_queue_that_ends()


def make_stateful() -> Iterable[Any]:
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(Rows(), batch_size=ROWS)


NO_FEED = "no feed at all"
ENDLESS = ("shared queue", "blocking queue")
# Its epochs are not left early: the loader ends its workers then, and where the news of the one that was killed comes
# meanwhile, PyTorch raises it there and leaves the others behind, in a plain loop, too (files 6 → 10 in 30 epochs).
KILLED = "killed worker"
SOURCES: dict[str, Callable[[], Iterable[Any]]] = {
    NO_FEED: lambda: (),
    "workers": lambda: DataLoader(Rows(), batch_size=ROWS, num_workers=2),
    "persistent workers": lambda: DataLoader(Rows(), batch_size=ROWS, num_workers=2, persistent_workers=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=ROWS),
    "StatefulDataLoader": make_stateful,
    "generator": Generated,
    "shared queue": read_queue,
    "blocking queue": Blocking,
    KILLED: lambda: DataLoader(Rows(deadly=5 * ROWS + 3), batch_size=ROWS, num_workers=2),
}


def make_feed(source: Iterable[Any], device: str) -> tuple[Feed, Callable[[], int]]:
    """A feed of it, and what counts the events that are lent."""
    from millstream.device import Place, context

    if device == "virtual":
        from tests.device.virtual_device import make_virtual_context

        feeding: Any = importlib.import_module("millstream.data.feeding")
        made, _ = make_virtual_context("eager")
        feeding.context = lambda _: made
        return Feed(source, Place("cuda", 0), feeding.Options()), lambda: made.events.num_lent
    fed = ms.feed(source, device)
    return fed, lambda: context(Place.of(device)).events.num_lent


def look(num_events: Callable[[], int]) -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    memory_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "MiB": memory_kib / 1024,
        "threads": threading.active_count(),
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "children": len(children),
        "events": num_events(),
    }


def run_one(name: str, device: str, num_epochs: int) -> None:
    """Run the epochs of a source, and print what was held after each."""
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    fed: Any = ()
    num_events: Callable[[], int] = int
    if name != NO_FEED:
        fed, num_events = make_feed(SOURCES[name](), device)
    found = []
    for epoch in range(num_epochs):
        with suppress(RuntimeError, OSError, EOFError):  # of a worker that was killed
            for number, batch in enumerate(fed):
                del batch
                if (epoch % 2 or name in ENDLESS) and name != KILLED and number == NUM_BATCHES // 2:
                    break
        found.append(look(num_events))
        end_s = time.monotonic() + MOST_INSIDE_S
        while name == KILLED and found[-1]["children"] and time.monotonic() < end_s:
            time.sleep(0.1)
            found[-1] = look(num_events)
    print(json.dumps(found), flush=True)


def queued_s(pid: int) -> float:
    """How long the main thread of a process had to wait for a processor: of a busy machine, and not of the feed."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def watch_one(name: str, device: str, num_epochs: int, usual_exit_s: float | None = None) -> tuple[bool, float, str]:
    """Run a source in a process of its own; whether all stays as it is, how long it took to end, and a table's row."""
    program = [sys.executable, "-m", "benchmarks.sweeps.feed_life"]
    command = [*program, "--device", device, "--epochs", str(num_epochs), "--only", name]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        said, queued = time.monotonic(), queued_s(process.pid)
        waited = queued
        while (status := process.poll()) is None:
            waited = queued_s(process.pid) or waited
            time.sleep(0.01)
        exit_s = time.monotonic() - said - (waited - queued)
    if status or not line:
        print(f"{name:20} ended with status {status}")
        return False, exit_s, f"| {name} | ended with status {status} |"
    found = json.loads(line)
    last = found[-1]
    # After as many epochs, but for an even number: persistent workers wait after some, and not after others.
    distance = 2 * max((len(found) - WARM_EPOCHS) // 2, 0)
    settled = found[len(found) - 1 - distance]
    # A leak of one thing in eight epochs is one; a batch that workers have made ahead is a file by chance.
    is_flat = all(last[key] - settled[key] <= distance // 8 for key in last if key != "MiB")
    is_flat &= last["MiB"] - settled["MiB"] <= MOST_GROWTH_MIB
    is_flat &= usual_exit_s is None or exit_s - usual_exit_s < MOST_EXIT_S
    shown = ", ".join(f"{key} {settled[key]:.4g} → {last[key]:.4g}" for key in last)
    ended = f"exit {exit_s:.2f} s, {said - began:.0f} s in all"
    print(f"{name:20} {'flat' if is_flat else 'NOT FLAT'}: {shown}; {ended}", flush=True)
    cells = [name, str(len(found)), "yes" if is_flat else "**no**"]
    cells += [f"{settled[key]:.4g} → {last[key]:.4g}" for key in last]
    return is_flat, exit_s, f"| {' | '.join(cells)} | {exit_s:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "virtual", help="cuda, cpu, virtual"
    )
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in the process of one source
    parser.add_argument("--out", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.only:
        run_one(options.only, options.device, options.epochs)
        return 0
    _, usual_exit_s, _ = watch_one(NO_FEED, options.device, 2)
    wanted = [name for name in SOURCES if name != NO_FEED]
    if importlib.util.find_spec("torchdata") is None:
        print("StatefulDataLoader    left out: torchdata is not installed")
        wanted.remove("StatefulDataLoader")
    found = [watch_one(name, options.device, options.epochs, usual_exit_s) for name in wanted]
    if options.out is not None:
        write(options.out, options.device, usual_exit_s, [row for _, _, row in found])
    return int(not all(is_flat for is_flat, _, _ in found))


def write(path: Path, device: str, usual_exit_s: float, rows: list[str]) -> None:
    """Keep the figures as a table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    names = ["source", "epochs", "flat", "MiB", "threads", "files", "children", "events", "exit, s"]
    path.write_text(
        f"""# What feeds leave behind

`make soak` on a {device} device, {os.cpu_count()} processors, Python {sys.version.split()[0]},
torch {torch.__version__}, commit {commit.strip() or "unknown"}. What a process holds after {WARM_EPOCHS} epochs and
after the last, and how long it takes to end (one without a feed: {usual_exit_s:.2f} s).

| {" | ".join(names)} |
|{" --- |" * len(names)}
"""
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
