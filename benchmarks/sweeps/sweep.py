"""Run many cases in processes of their own, and keep each result in a file as soon as it is there.

A sweep can be stopped at any time: started again, it continues with the cases that have no result. The libraries are
loaded once, and each case runs in a fork of its own, so that one that crashes or hangs takes nothing else along.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO

from benchmarks.measuring.results import current_commit, libraries

FOLDER = Path(__file__).parent.parent / "results"


class Outcome(StrEnum):
    """What became of a case."""

    EQUAL = "equal"
    WRONG = "wrong"
    FELL_BACK = "fell back"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Attributes:
        case: Its name.
        outcome: What became of it.
        detail: What was compared, or why not, or what differs.
        environment: Device, versions of the libraries and commit that it ran with.
    """

    case: str
    outcome: Outcome
    detail: str = ""
    environment: str = ""


@dataclass(frozen=True)
class Sweep:
    """A kind of cases.

    Attributes:
        module: The module that is run, with ``python -m``.
        title: What the table is about.
        list_cases: All names, those first that matter most, or take least.
        run: Runs a case on a device.
        load: Loads what all cases need, before they fork; it must not touch a GPU.
        devices: Kinds of devices that it runs on, the usual one first.
        limit_s: Seconds that a case may take.
    """

    module: str
    title: str
    list_cases: Callable[[], Sequence[str]]
    run: Callable[[str, str], Result]
    load: Callable[[], object] = lambda: None
    devices: tuple[str, ...] = ("cpu",)
    limit_s: float = 1800

    def path(self, folder: Path) -> Path:
        """Where the results with this release of PyTorch are; the table stands beside them."""
        release = ".".join(version("torch").split(".")[:2])
        return folder / f"{self.module.rpartition('.')[2]}_{release}.jsonl"


def read_results(path: Path) -> dict[str, Result]:
    """The results in a file, by case; of several for one case the last counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return {each.case: replace(each, outcome=Outcome(each.outcome)) for each in found}


def write_table(sweep: Sweep, results: Iterable[Result], folder: Path) -> Path:
    """Write the results as Markdown: what ran where, then what is not equal, then the rest."""
    results = sorted(results, key=lambda each: each.case)
    missing = {*sweep.list_cases()} - {each.case for each in results}
    runs = {name: number for number, (name, _) in enumerate(Counter(r.environment for r in results).most_common(), 1)}
    lines = [
        f"# {sweep.title}",
        "",
        f"- **Command:** `python -m {sweep.module}`",
        f"- **Cases:** {len(results)}: {count_outcomes(results)}",
        *([f"- **Not run yet:** {len(missing)}"] if missing else []),
        "",
        "| run | with | cases |",
        "|--:|---|---|",
    ]
    for name, number in runs.items():
        own = [each for each in results if each.environment == name]
        lines.append(f"| {number} | {name} | {len(own)}: {count_outcomes(own)} |")
    lines.append("")
    for outcome in (Outcome.WRONG, Outcome.FELL_BACK, Outcome.NOT_COMPARABLE):
        rows = [
            f"| {each.case} | {runs[each.environment]} | {each.detail.replace('|', '/')} |"
            for each in results
            if each.outcome is outcome
        ]
        if rows:
            lines += [f"## {outcome.capitalize()}", "", "| case | run | why |", "|---|--:|---|", *rows, ""]
    if missing:
        lines += ["## Not run yet", "", ", ".join(sorted(missing)), ""]
    for name, number in runs.items():
        equal = [r.case for r in results if r.outcome is Outcome.EQUAL and r.environment == name]
        if equal:
            lines += [f"## Equal, run {number}", "", ", ".join(equal), ""]
    path = sweep.path(folder).with_suffix(".md")
    path.write_text("\n".join(lines))
    return path


def main(sweep: Sweep) -> None:
    """The command line of a sweep."""
    parser = argparse.ArgumentParser(description=sweep.title)
    parser.add_argument("cases", nargs="*", help="these only, whether or not they have a result")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--device", choices=sweep.devices, default=sweep.devices[0])
    parser.add_argument("--limit-seconds", type=float, default=sweep.limit_s, help="what a case may take")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="then the sweep stops")
    parser.add_argument("--commit", default=None, help="of the code, where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument(
        "--again", action="append", default=[], choices=[*Outcome], help="run those of this outcome again"
    )
    parser.add_argument("--table", action="store_true", help="write the table of what is there, and run nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_seconds
    path = sweep.path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_results(path)
    waiting = [case for case in sweep.list_cases() if case not in known or known[case].outcome in options.again]
    cases = [] if options.table else options.cases or waiting
    print(f"{len(cases)} cases to run; {len(known)} have a result in {path}", flush=True)
    if cases:
        sweep.load()
        versions = ", ".join(f"{name} {number}" for name, number in libraries().items())
        environment = f"{options.device}, {versions}, commit {options.commit or current_commit() or 'not known'}"
        Runner(sweep, options.device, options.limit_seconds, environment, path).run(cases, options.jobs, deadline)
    results = read_results(path)
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for _, each in sorted(results.items())))
    print(f"{write_table(sweep, results.values(), options.out)}: {count_outcomes(results.values())}")


@dataclass
class Running:
    """A case that runs: its process, where its result arrives, what it prints, and when it must have ended."""

    case: str
    process: ForkProcess
    results: Connection
    output: IO[str]
    limit: float

    def end(self) -> None:
        """End the process with all that it started, and let go of it."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # they are over
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.results.close()
        self.output.close()


@dataclass(frozen=True)
class Runner:
    """Runs cases, each in a fork of this process."""

    sweep: Sweep
    device: str
    limit_s: float
    environment: str
    path: Path

    def run(self, cases: Sequence[str], jobs: int, deadline: float) -> None:
        """Run as many cases as there is time for; those that still run at the deadline have no result."""
        waiting, running = list(reversed(cases)), list[Running]()
        try:
            while time.monotonic() < deadline and (waiting or running):
                while waiting and len(running) < jobs:
                    running.append(self._start(waiting.pop()))
                until = min(deadline, *(each.limit for each in running))
                wait([each.results for each in running], max(0.0, until - time.monotonic()))
                for each in list(running):
                    if each.results.poll() or time.monotonic() > each.limit:
                        seconds = time.monotonic() - each.limit + self.limit_s
                        note_result(self.path, replace(self._result(each), environment=self.environment), seconds)
                        each.end()
                        running.remove(each)
        finally:
            for each in running:
                each.end()

    def _start(self, case: str) -> Running:
        context = multiprocessing.get_context("fork")
        results, sender = context.Pipe(duplex=False)
        output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  its end closes it
        process = context.Process(target=self._work, args=(case, sender, output.fileno()))
        process.start()
        with contextlib.suppress(ProcessLookupError):  # it is over
            os.setpgid(process.pid, process.pid)
        sender.close()
        return Running(case, process, results, output, time.monotonic() + self.limit_s)

    def _work(self, case: str, sender: Connection, output: int) -> None:
        """Run a case; what it prints goes to a file."""
        os.dup2(output, 1)
        os.dup2(output, 2)
        sender.send(self.sweep.run(case, self.device))

    def _result(self, each: Running) -> Result:
        if not each.results.poll():
            return Result(each.case, Outcome.NOT_COMPARABLE, f"no result within {self.limit_s:.0f} s")
        try:
            return each.results.recv()
        except EOFError:
            each.process.join()
            each.output.seek(0)
            last = [line.strip() for line in each.output if line.strip()][-1:]
            text = f"the process ended with {each.process.exitcode}: {''.join(last)}"
            return Result(each.case, Outcome.WRONG, text)


def note_result(path: Path, result: Result, seconds: float) -> None:
    """Append a result to the file, without where things lie on this machine."""
    for folder in (Path(__file__).parents[2], sys.prefix):
        result = replace(result, detail=result.detail.replace(f"{folder}/", ""))
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    detail = "" if result.outcome is Outcome.EQUAL else result.detail
    print(f"{seconds:6.1f} s  {result.outcome:>14}  {result.case}  {detail}", flush=True)


def count_outcomes(results: Iterable[Result]) -> str:
    """Text: how many results there are of each outcome."""
    counts = Counter(each.outcome for each in results)
    return ", ".join(f"{counts[each]} {each}" for each in Outcome)
