"""Results: one row per case, variant and baseline, as JSON and as a table; rewritten after every case.

``python -m benchmarks.measuring.results RESULT.json... --out DIR`` joins the results of several runs of one suite, for
instance when a machine is to be had for less time than the whole suite takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

TIMES = "\N{MULTIPLICATION SIGN}"
LIBRARIES = ("millstream", "torch", "triton", "timm", "torchvision", "transformers")


@dataclass(frozen=True)
class Row:
    """One comparison; ``None`` stands for what was not measured.

    Attributes:
        case: Name of the case.
        variant: Way ours was run: ``replay`` (the captured graph alone), ``call`` (the user's call).
        baseline: What ours is compared with.
        baseline_ms: Median time of the baseline.
        ours_ms: Our median time; ``p20`` and ``p80`` are its percentiles.
        ratio: Baseline over ours: above 1 we are faster.
        peak_bytes: Peak memory of our graph (see ``harness.MemoryMeter``); ``peak_ratio`` is ours over the baseline's.
        compile_s: Seconds from the uncompiled model to the first result; ``compile_ratio`` is ours over the baseline's.
        bound_ms: Critical path of the graph.
        predicted_ms: What the simulator said.
        exposed_us: Microseconds of a step in which collectives ran and nothing else did.
        equal: Whether ours computes what eager computes; no time counts otherwise.
        note: Why something was not run, or what a reader must know.
    """

    case: str
    variant: str | None = None
    baseline: str | None = None
    baseline_ms: float | None = None
    ours_ms: float | None = None
    ratio: float | None = None
    p20: float | None = None
    p80: float | None = None
    streams: int | None = None
    kernels: int | None = None
    waits: int | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    compile_s: float | None = None
    compile_ratio: float | None = None
    bound_ms: float | None = None
    predicted_ms: float | None = None
    exposed_us: float | None = None
    equal: bool | None = None
    note: str | None = None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Divide, where both were measured."""
    return numerator / denominator if numerator is not None and denominator else None


@dataclass
class Report:
    """The results of a suite so far.

    Attributes:
        suite: Name of the suite.
        device: Name of the device.
        commit: Commit of the code that ran.
        command: What reproduces it.
        libraries: Versions.
        quick: A run with few samples, to try the scripts: not to be published.
    """

    suite: str
    device: str
    commit: str | None
    command: str
    libraries: dict[str, str]
    quick: bool = False
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        head = {"suite": self.suite, "date": self.date, "device": self.device, "torch": self.libraries["torch"]}
        rest = {"command": self.command, "libraries": self.libraries, "quick": self.quick}
        return {**head, "commit": self.commit, **rest, "rows": [asdict(row) for row in self.rows]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        named = {name: data[name] for name in ("suite", "device", "commit", "command", "libraries", "quick", "date")}
        return Report(**named, rows=[Row(**row) for row in data["rows"]])

    def write(self, folder: Path) -> None:
        """Write ``SUITE.json`` and ``SUITE.md`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.suite}.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        (folder / f"{self.suite}.md").write_text(self.to_markdown())

    def to_markdown(self) -> str:
        lines = [
            f"# Suite `{self.suite}`",
            "",
            f"- **Device:** {self.device}",
            f"- **Libraries:** {', '.join(f'{name} {number}' for name, number in self.libraries.items())}",
            f"- **Date and commit:** {self.date}, {self.commit or 'commit not known'}",
            f"- **Command:** `{self.command}`",
            *(["- **A quick run with few samples, to try the scripts: no figure here counts.**"] if self.quick else []),
            "",
            "Times are medians in ms: ours with 20th and 80th percentile, a baseline's with baseline / ours",
            f"(above 1{TIMES} we are faster). Ratios of memory and compile seconds are ours / baseline.",
            "What is measured, and how: `benchmarks/README.md`.",
            "",
            *table(self.rows),
        ]
        return "\n".join(lines) + "\n"


# --- the table -------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table: a line per case and variant, a column per baseline."""
    baselines = list(dict.fromkeys(row.baseline for row in rows if row.baseline))
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.case, row.variant or ""), []).append(row)
    columns = ["case", "variant", "ours", *baselines, "kernels", "streams", "waits", "peak MiB", "compile s"]
    columns += ["exposed µs", "equal"]
    if any(row.bound_ms is not None or row.predicted_ms is not None for row in rows):
        columns += ["bound", "predicted"]
    columns.append("note")
    body = [
        [case, variant, *(cell(column, group, baselines) for column in columns[2:])]
        for (case, variant), group in lines.items()
    ]
    words = ("case", "variant", "note")
    align = ["---" if column in words else "--:" for column in columns]
    told = [i for i, name in enumerate(columns) if name in words or any(cells[i] for cells in body)]
    return ["| " + " | ".join(cells[i] for i in told) + " |" for cells in (columns, align, *body)]


def cell(column: str, group: list[Row], baselines: list[str]) -> str:
    """Text of one cell: what the rows of one case and variant say in a column."""
    first = group[0]
    if column in baselines:
        return next((against(row) for row in group if row.baseline == column), "")
    match column:
        case "ours":
            if first.ours_ms is None:
                return "not run" if first.compile_s is None and first.equal is None else ""
            spread = "" if first.p20 is None or first.p80 is None else f" ({first.p20:.4g} to {first.p80:.4g})"
            return f"{first.ours_ms:.4g}{spread}"
        case "kernels" | "streams" | "waits":
            return number(getattr(first, column), "d")
        case "peak MiB":
            mib = None if first.peak_bytes is None else first.peak_bytes / 2**20
            return number(mib, ".1f") + ratios(group, "peak_ratio")
        case "compile s":
            return number(first.compile_s, ".1f") + ratios(group, "compile_ratio")
        case "equal":
            return {True: "yes", False: "**no**", None: ""}[first.equal]
        case "exposed µs":
            return number(first.exposed_us, ".0f")
        case "bound":
            return number(first.bound_ms, ".4g")
        case "predicted":
            return number(first.predicted_ms, ".4g")
        case _:
            return "; ".join(dict.fromkeys(row.note.replace("|", "\\|") for row in group if row.note))


def against(row: Row) -> str:
    """Text of a comparison."""
    if row.baseline_ms is None:
        return "not run"
    return f"{row.baseline_ms:.4g}" + ("" if row.ratio is None else f" ({row.ratio:.2f}{TIMES})")


def ratios(group: list[Row], name: str) -> str:
    """Text of the ratios that were measured, each with its baseline."""
    known = [f"{getattr(row, name):.2f}{TIMES} {row.baseline}" for row in group if getattr(row, name) is not None]
    return f" ({', '.join(known)})" if known else ""


def number(value: float | None, form: str) -> str:
    """Text of a value, or nothing."""
    return "" if value is None else format(value, form)


# --- where it ran ----------------------------------------------------------------------------------------------------


def start_report(suite: str, *, quick: bool, commit: str | None) -> Report:
    """Return an empty report that says how it runs; on which device is still to be told."""
    command = f"python -m benchmarks.{suite} " + " ".join(f"'{arg}'" if " " in arg else arg for arg in sys.argv[1:])
    return Report(suite, "device not known", commit or current_commit(), command.strip(), libraries(), quick)


def device_name(device: torch.device) -> str:
    """Name of a GPU, or of the processor and the number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {torch.get_num_threads()} threads"


def libraries() -> dict[str, str]:
    """Versions of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def current_commit() -> str | None:
    """Return the commit checked out beside this file, with a mark when files differ from it."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# --- joining runs ----------------------------------------------------------------------------------------------------


def join(reports: Iterable[Report]) -> Report:
    """Join runs of one suite at one commit on one kind of device; of a case that ran twice the later run counts.

    Raises:
        ValueError: The runs cannot stand in one table.
    """
    first, *others = reports
    joined = Report.from_dict(first.to_dict())
    for other in others:
        for name in ("suite", "device", "libraries", "commit"):
            if getattr(first, name) != getattr(other, name):
                raise ValueError(f"runs differ in {name}: {getattr(first, name)!r} and {getattr(other, name)!r}")
        measured = {row.case for row in other.rows if row.ours_ms is not None}
        unknown = {row.case for row in other.rows} - {row.case for row in joined.rows}
        taken = measured | unknown
        joined.rows = [row for row in joined.rows if row.case not in taken]
        joined.rows += [row for row in other.rows if row.case in taken]
        joined.command += f"`, `{other.command}"
        joined.quick |= other.quick
        joined.date = max(joined.date, other.date)
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="SUITE.json files, in the order they were written")
    parser.add_argument("--out", type=Path, required=True, help="folder for the joined SUITE.json and SUITE.md")
    options = parser.parse_args()
    joined = join(Report.from_dict(json.loads(path.read_text())) for path in options.results)
    joined.write(options.out)
    print(joined.to_markdown())


if __name__ == "__main__":
    main()
