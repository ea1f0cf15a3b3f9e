"""Scripts with a planted cause of idle time, their fixed twins, and clean ones, each under ``millstream profile``.

Of each: whether the outcome names the cause, whether its time is on the planted lines, what was promised beside what
the twin gains, and what looking cost. A clean script runs ``--repeats`` times, and its last recording is judged again
with 20 kinds of jitter. The scripts are in ``tests/insight/scripts``; some mean nothing without a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import pickle
import random
import re
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before torch is imported: asked otherwise whether there is a GPU, a process can start no other by ``fork``.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

import millstream.cli.profile as command
from millstream.cli.running import run_script
from millstream.insight import Recording, Sample, Severity, analyse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "insight" / "scripts"
TIMEOUT_S = 90.0
KINDS = ("profiled", "plain", "twin")
NUM_JITTERED, JITTER, JITTERED_NS = 20, 0.3, 500_000
"""So many times a recording is judged with each half millisecond stretched or shrunk by up to 30 %."""


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        name: Of its file.
        causes: Of which the outcome must name one; none where there must be no HIGH or MODERATE outcome.
        markers: Texts of lines that are to blame.
        needs_gpu: Without one there is nothing to find.
        arguments: Of the script.
    """

    name: str
    causes: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    needs_gpu: bool = False
    arguments: tuple[str, ...] = ()


CASES = (
    Case("workers_too_slow", ("data",), ("# waits",)),
    Case("in_process_loader", ("data in process",), ("# slow",)),
    Case("host_reads", ("sync",), ("# waits",), needs_gpu=True),
    Case("library_reads", ("sync",), ("# waits",), needs_gpu=True),
    Case("pageable_copies", ("copy",), ("# copies",), needs_gpu=True),
    Case("tiny_kernels", ("launch",), ("# launches",), needs_gpu=True),
    Case("python_loop", ("python",), ("# slow",)),
    Case("empty_cache", ("allocator",), ("# gives back", "# takes", "model(x)", ".backward()"), needs_gpu=True),
    Case("recompiles", ("compile",), ("compiled(",)),
    Case("checkpoints", ("io",), ("torch.save(",)),
    Case("collector", ("gc",), ("# slow",)),
    Case("busy_thread", ("gil",), ("model(x)", ".backward()", "optimizer.")),
    Case("clean_matmuls"),
    Case("clean_rare_reads", needs_gpu=True),
    Case("clean_loader", needs_gpu=True),
    Case("clean_graph", needs_gpu=True),
    Case("clean_one_graph", needs_gpu=True),
)


@dataclass(frozen=True)
class Run:
    """What one process gave: milliseconds of a step by the script's own clock, and if it was profiled, the report."""

    step_ms: float | None
    report: dict[str, Any] | None
    error: str = ""
    report_s: float | None = None


def run_here(kind: str, case: Case, report: Path, arguments: Sequence[str]) -> int:
    """Run one script in this process, which is its own, and return its exit code."""
    script = str(SCRIPTS / f"{case.name}.py")
    if kind != "profiled":
        return run_script(script, [*arguments])

    class Kept(command.Profile):
        """Leaves the recording beside the report, to be looked into elsewhere, and says how long reporting took."""

        def __exit__(self, *error: Any) -> None:
            began = time.monotonic()
            super().__exit__(*error)
            print(f"report_s {time.monotonic() - began:.3f}", file=sys.stderr)

        def save(self, path: str | Path) -> None:
            super().save(path)
            super().save(Path(path).with_suffix(".html"))
            if self.findings is not None:
                with gzip.open(Path(path).with_suffix(".pickle.gz"), "wb", 3) as file:
                    pickle.dump(self.findings.recording, file)

    command.Profile = Kept  # type: ignore[misc]
    return command.profile(script, [*arguments], as_module=False, save=[report], fail_if=[])


def run_apart(kind: str, case: Case, folder: Path, device: str) -> Run:
    """Run a script in a process of its own: ``profiled``, ``plain``, or its ``twin``.

    The process is a fork of this one, which has imported everything and never touched the device.
    """
    report, text = (folder / f"{case.name}.{kind}.{suffix}" for suffix in ("json", "txt"))
    rest = [*case.arguments, *(["cpu"] if device == "cpu" else []), *(["fixed"] if kind == "twin" else [])]

    def run() -> None:
        with text.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = run_here(kind, case, report, rest)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Run(None, None, f"{kind} took longer than {TIMEOUT_S:.0f} s")
    said = text.read_text(encoding="utf-8", errors="replace")
    found, took = (re.findall(rf"^{name} ([\d.]+)$", said, re.MULTILINE) for name in ("step_ms", "report_s"))
    error = "" if process.exitcode == 0 else f"{kind}: " + (said.strip().splitlines() or ["failed"])[-1]
    told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    return Run(float(found[-1]) if found else None, told, error, float(took[-1]) if took else None)


def judge(case: Case, profiled: Run, plain: Run, twin: Run) -> dict[str, Any]:
    """Say what was found beside what was planted."""
    report = profiled.report
    row: dict[str, Any] = {"case": case.name, "expected": list(case.causes), "plain_ms": plain.step_ms}
    row["error"] = "; ".join(run.error for run in (profiled, plain, twin) if run.error)
    if report is None:
        return row | {"outcome": "no report", "is_right": False}
    leading = report["leading"]
    cause = leading["cause"] if leading else ""
    row["outcome"] = f"{report['severity']} {cause}".strip()
    row["why_unreliable"] = report["why_unreliable"]
    row["is_right"] = (
        cause in case.causes and report["severity"] == "HIGH" if case.causes else report["severity"] == "healthy"
    )
    row["num_steps"], row["step_ms"], row["idle"] = report["num_steps"], report["step_ns"] / 1e6, report["idle"]
    row["idle_by_cause"] = {
        name: spent / max(report["num_steps"], 1) / 1e6 for name, spent in report["idle_ns_by_cause"].items()
    }
    row["report_s"] = profiled.report_s
    row["unknown"], row["looking_slowed"], row["spent"] = report["unknown"], report["looking_slowed"], report["cost"]
    row["always_on"] = report["always_on"]
    if profiled.step_ms and plain.step_ms:
        row["after_windows"] = profiled.step_ms / plain.step_ms - 1
    if case.causes:
        rows = [each for each in report["rows"] if each["cause"] in case.causes]
        charged = sum(each["idle_ns"] for each in rows)
        right = sum(each["idle_ns"] for each in rows if is_planted(each["site"], case))
        row["right_line"] = right / charged if charged else None
        row["lines"] = [f"{Path(e['site']['file']).name}:{e['site']['line']}" for e in rows[:4] if e["site"]]
        own = [each for each in rows if each["cause"] == cause]
        promised = sum(each["recoverable_share"] for each in own)
        row["promised_ms"] = report["usual_step_ns"] / 1e6 * promised
        if own and all(each["is_rare"] for each in own) and plain.step_ms:  # its share is of the run's time
            row["promised_ms"] = plain.step_ms * sum(each["share"] for each in own)
        if twin.step_ms and plain.step_ms:
            row["twin_ms"] = twin.step_ms
            row["gained_ms"] = plain.step_ms - twin.step_ms
    return row


def with_jitter(recording: Recording, dice: random.Random) -> Recording:
    """The same recording on a clock that runs unevenly: what followed what stays, and all lengths change."""
    edges = range(recording.start_ns, recording.end_ns + JITTERED_NS, JITTERED_NS)
    rates, moved = [], [recording.start_ns]
    for _ in edges:
        rates.append(dice.uniform(1 - JITTER, 1 + JITTER))
        moved.append(moved[-1] + round(JITTERED_NS * rates[-1]))

    def at(now: int) -> int:
        number = min(max(bisect_right(edges, now) - 1, 0), len(rates) - 1)
        return moved[number] + round((now - edges[number]) * rates[number])

    def move(each: Any) -> Any:
        return replace(each, start_ns=at(each.start_ns), end_ns=at(each.end_ns))

    def move_look(each: Sample) -> Sample:
        look = move(each)
        rate = (look.end_ns - look.start_ns) / max(each.end_ns - each.start_ns, 1)
        spent = {name: getattr(each, name) for name in ("cpu_ns", "process_ns", "ready_ns")}
        scaled = {name: None if value is None else round(value * rate) for name, value in spent.items()}
        return replace(look, others=tuple((round(ran * rate), stack) for ran, stack in each.others), **scaled)

    kinds: dict[str, Callable[[Any], Any]] = dict.fromkeys(("steps", "spans", "activities", "launches"), move)
    kinds["samples"] = move_look
    parts = {name: tuple(map(change, getattr(recording, name))) for name, change in kinds.items()}
    waits = tuple(replace(each, at_ns=at(each.at_ns)) for each in recording.waits)
    return replace(recording, end_ns=at(recording.end_ns), waits=waits, **parts)


def count_alarms(path: Path) -> int:
    """How often a clean script's recording gives an alarm when it is judged with jitter."""
    with gzip.open(path) as file:
        recording = pickle.load(file)  # noqa: S301 - our own, of a moment ago
    found = (analyse(with_jitter(recording, random.Random(seed))) for seed in range(NUM_JITTERED))
    return sum(each.severity is not Severity.HEALTHY for each in found)


def is_planted(site: dict[str, Any] | None, case: Case) -> bool:
    """Whether a line is one of those that are to blame."""
    if site is None or Path(site["file"]).stem != case.name:
        return False
    text = (SCRIPTS / f"{case.name}.py").read_text(encoding="utf-8").splitlines()[site["line"] - 1]
    return any(marker in text for marker in case.markers)


def to_markdown(rows: Sequence[dict[str, Any]], device: str) -> str:
    """All rows as tables, with what they come to."""
    planted, clean = [r for r in rows if r["expected"]], [r for r in rows if not r["expected"]]
    kept = [r for r in planted if r.get("gained_ms") and r.get("promised_ms") is not None]
    near = sum(abs(r["promised_ms"] / r["gained_ms"] - 1) <= 0.25 for r in kept)
    lines = [
        "# Planted causes of idle time",
        "",
        f"`python -m benchmarks.idle` on {device}. Times are milliseconds a step by the scripts' own clocks.",
        "",
        f"- Right outcome: {sum(r['is_right'] for r in planted)} of {len(planted)} planted, "
        f"{sum(r['is_right'] for r in clean)} of {len(clean)} clean "
        f"in {sum(len(r.get('runs', ())) for r in clean)} runs; "
        f"{sum(r.get('alarms', 0) for r in clean)} alarms in {sum('alarms' in r for r in clean) * NUM_JITTERED} "
        "recordings with jitter.",
        f"- Promised within ±25 % of what the twin gains: {near} of {len(kept)}.",
        "- *Window slower*: steps under CUPTI against those after it. *Always on*: hooks counted times what one takes,",
        "  and the sampler's own time. *Later steps*: after the windows, against a run of its own without a profile.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + "---|" * len(_COLUMNS),
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    why = {r["case"]: r["error"] or r.get("why_unreliable") for r in rows}
    notes = [f"- {name}: {reason}" for name, reason in why.items() if reason]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


_COLUMNS = (
    *("script", "outcome", "right", "right line", "step", "twin", "promised", "gained"),
    *("window slower", "always on", "later steps", "unknown", "report s"),
)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = (number(row.get(name)) for name in ("plain_ms", "twin_ms", "promised_ms", "gained_ms"))
    shares = (share(row.get(name), 1) for name in ("looking_slowed", "always_on", "after_windows", "unknown"))
    report = number(row.get("report_s"))
    right = "yes" if row["is_right"] else "NO"
    return row["case"], row["outcome"], right, share(row.get("right_line")), *times, *shares, report


def number(value: float | None) -> str:
    """A time in a table."""
    return "" if value is None else f"{value:.3g}"


def share(value: float | None, digits: int = 0) -> str:
    """A share in a table."""
    return "" if value is None else f"{value:.{digits}%}".replace("%", " %")


def run_all(cases: Sequence[Case], device: str, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every case, one process after another."""
    began, kinds = time.monotonic(), options.kinds.split(",")
    for case in cases:
        wanted = [kind for kind in KINDS if kind in kinds] if case.causes else ["profiled"] * options.repeats
        runs: dict[str, Run] = dict.fromkeys(KINDS, Run(None, None))
        outcomes = []
        for kind in wanted:
            if time.monotonic() - began > options.budget_seconds:
                runs[kind] = runs[kind] if runs[kind].report else Run(None, None, f"{kind}: no time was left")
                continue
            runs[kind] = run_apart(kind, case, folder, device)
            report = runs[kind].report
            if kind == "profiled" and report is not None:
                outcomes.append(report["severity"])
        row = judge(case, *runs.values()) | {"runs": outcomes}
        if not case.causes and runs["profiled"].report is not None:
            row["is_right"] = all(outcome == Severity.HEALTHY for outcome in outcomes)
            row["alarms"] = count_alarms(folder / f"{case.name}.profiled.pickle.gz")
        yield row


def find_device(folder: Path) -> str:
    """Name of the GPU, or ``CPU``; asked by a process of its own, for one that has asked must not fork."""
    path = folder / "device"

    def ask() -> None:
        path.write_text(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", encoding="utf-8")

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    process.join()
    return path.read_text(encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite, and write its results after each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--device", default=None, help="cuda or cpu; cuda where there is one")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each clean script")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which processes of each case to run")
    parser.add_argument("--keep", type=Path, help="a folder for reports and output of each process")
    options, _ = parser.parse_known_args(argv)  # others are of other suites

    wanted, rows = options.cases.split(","), list[dict[str, Any]]()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        name = "CPU" if options.device == "cpu" else find_device(folder)
        device = "cpu" if name == "CPU" else "cuda"
        cases = [case for case in CASES if case.name in wanted and (device == "cuda" or not case.needs_gpu)]
        for row in run_all(cases, device, options, folder):
            rows.append(row)
            print(json.dumps(row), flush=True)
            written = json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1)
            (options.out / "idle.json").write_text(written + "\n", encoding="utf-8")
            (options.out / "idle.md").write_text(to_markdown(rows, name), encoding="utf-8")
    print(to_markdown(rows, name))
    return int(not all(row["is_right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
