"""Running a suite: options, the order of cases, the time budget, and results that survive whatever happens next."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from benchmarks.measuring.harness import forget_case, prepare_torch
from benchmarks.measuring.results import Row, device_name, start_report
from benchmarks.measuring.worker import Event, Tell, not_run, run_apart

RESULTS = Path(__file__).parents[1] / "results"
HANG_FACTOR, HANG_S = 5.0, 300.0  # a case that takes so many times its estimate, and so much more, will not end


class Case(Protocol):
    """What the runner must know of a case."""

    @property
    def name(self) -> str: ...

    @property
    def estimate_s(self) -> float:
        """Seconds it takes on an H200, everything included."""
        ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        device: Where to run.
        rounds: Samples of each side.
        tiny: Small stand-ins for the networks, to try the scripts where there is no GPU.
        baselines: Names to which the baselines are limited; empty for the usual ones.
        long: Also the baselines that take long to build.
        channels_last: Convolutional inference in this layout.
        freeze: Inference with parameters folded into the graph as constants, on every side that compiles.
        plan_memory: Measure the peers' memory with Inductor's own memory planning, too.
    """

    device: torch.device
    rounds: int
    tiny: bool
    baselines: frozenset[str] = frozenset()
    long: bool = False
    channels_last: bool = False
    freeze: bool = False
    plan_memory: bool = True

    def wants(self, baseline: str) -> bool:
        return not self.baselines or baseline in self.baselines

    def name(self, variant: str) -> str:
        """Name a variant with what is not as usual."""
        unusual = {"channels last": self.channels_last, "frozen": self.freeze}
        return ", ".join([variant, *(name for name, is_so in unusual.items() if is_so)])


def names(text: str) -> list[str]:
    """Split a list at its commas; names have spaces in them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(suite: str, cases: Sequence[Case], device: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    known = [case.name for case in cases]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{suite}", description=f"cases: {', '.join(known)}")
    parser.add_argument("--cases", type=names, default=known, help="comma-separated; all when not given")
    parser.add_argument("--baselines", type=names, default=[], help="comma-separated; the usual ones when not given")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="leave out what does not fit")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="few samples, to try the scripts; not for publication")
    parser.add_argument("--rounds", type=int, help="samples of each side (50; quick: 5)")
    parser.add_argument("--device", default=device, help="cuda or cpu; cpu runs tiny stand-ins of the GPU suites")
    parser.add_argument("--long", action="store_true", help="also baselines that take long to build")
    parser.add_argument("--channels-last", action="store_true", help="inference of convolutions in this layout")
    parser.add_argument("--freeze", action="store_true", help="inference with parameters folded in, on every side")
    parser.add_argument("--plain-memory", action="store_true", help="no second build for the peers' planned memory")
    parser.add_argument("--commit", help="what to write down where git cannot be asked")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # given to the process that runs the cases
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}; the suite has {', '.join(known)}")
    return options


def run_suite(
    suite: str,
    cases: Sequence[AnyCase],
    run_case: Callable[[AnyCase, Settings], list[Row]],
    *,
    device: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run the cases that were asked for, in a process of their own, and write the results after each.

    Args:
        suite: Name of the suite, which is a module of this package.
        cases: All of its cases.
        run_case: Runs one and returns its rows.
        device: Kind of device the suite is for; ``None`` takes the GPU where there is one.
        argv: Command line without the program.

    Returns:
        Exit status: 1 when a case failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(suite, cases, device, arguments)
    if options.log:
        os.environ.setdefault("MILLSTREAM_TUNE", "first")  # what is timed is compiled by then
        with options.log.open("a", buffering=1) as log:
            run_cases(cases, run_case, options, device, lambda event: print(json.dumps(event), file=log))
        return 0
    began, failed = time.monotonic(), False
    estimates = {case.name: case.estimate_s for case in cases}
    report = start_report(suite, quick=options.quick, commit=options.commit)

    def command(left: list[str], log: Path) -> list[str]:
        budget = options.budget_seconds - (time.monotonic() - began)
        own = ["--cases", ",".join(left), "--budget-seconds", str(budget), "--log", str(log)]
        return [sys.executable, "-m", f"benchmarks.{suite}", *arguments, *own]

    def tell(event: Event) -> None:
        nonlocal failed
        if "device" in event:
            report.device, report.quick = event["device"], event["quick"]
        elif "begin" in event:
            print(f"[{time.monotonic() - began:6.1f} s] {event['begin']}", flush=True)
        else:
            rows = [Row(**row) for row in event["rows"]]
            report.rows += rows
            report.write(options.out)
            failed |= event["failed"]
            for row in rows:
                print(f"           {describe(row)}", flush=True)

    run_apart(options.cases, command, lambda name: HANG_FACTOR * estimates[name] + HANG_S, tell)
    print(report.to_markdown())
    return int(failed)


def run_cases(
    cases: Sequence[AnyCase],
    run_case: Callable[[AnyCase, Settings], list[Row]],
    options: argparse.Namespace,
    device: str | None,
    tell: Tell,
) -> None:
    """Run cases in this process, as far as the budget goes.

    An error ends its case, is printed and stands in its row. After one that leaves the device unusable the rest is left
    to a new process.
    """
    began = time.monotonic()
    settings = settings_of(options, device)
    prepare_torch()
    quick = options.quick or settings.tiny or settings.rounds < 30
    tell({"device": device_name(settings.device), "quick": quick})
    by_name = {case.name: case for case in cases}
    for name in options.cases:
        case, left_s, usable = by_name[name], options.budget_seconds - (time.monotonic() - began), True
        if case.estimate_s > left_s:
            reason = f"it takes about {case.estimate_s:.0f} s, and {max(left_s, 0):.0f} s were left"
            tell({**not_run(name, reason), "failed": False})
            continue
        tell({"begin": name})
        try:
            rows = run_case(case, settings)
            forget_case(settings.device)
            tell({"case": name, "rows": [asdict(row) for row in rows], "failed": False})
        except Exception as error:  # noqa: BLE001 - whatever ends a case, the others still run
            traceback.print_exc()
            tell(not_run(name, brief(error)))
            usable = not device_failed(settings.device)
        if not usable:
            return


def settings_of(options: argparse.Namespace, device: str | None) -> Settings:
    """Turn the command line into settings; a suite for GPUs runs tiny networks where there is none."""
    chosen = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return Settings(
        chosen,
        options.rounds or (5 if options.quick else 50),
        tiny=chosen.type == "cpu" and device != "cpu",
        baselines=frozenset(options.baselines),
        long=options.long,
        channels_last=options.channels_last,
        freeze=options.freeze,
        plan_memory=not options.plain_memory,
    )


def device_failed(device: torch.device) -> bool:
    """Whether an error has left the device unusable, as an illegal access does; clears up for the next case if not."""
    try:
        forget_case(device)
    except RuntimeError:
        return True
    return False


def brief(error: BaseException) -> str:
    """Return the kind of error and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def describe(row: Row) -> str:
    """Text of a row for the terminal."""
    parts = [f"{row.variant or '':8}"]
    if row.ours_ms is not None:
        parts.append(f"ours {row.ours_ms:.4g} ms")
    if row.baseline:
        parts.append(row.baseline if row.baseline_ms is None else f"{row.baseline} {row.baseline_ms:.4g} ms")
    for name in ("ratio", "peak_ratio", "compile_s", "compile_ratio", "equal"):
        value = getattr(row, name)
        if value is not None:
            parts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join([*parts, row.note or ""]).rstrip()
