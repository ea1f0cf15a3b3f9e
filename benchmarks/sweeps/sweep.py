"""Run many cases in processes of their own, and keep each result in a file as soon as it is there.

A sweep can be stopped at any time: started again, it goes on with the cases that have no result. Cases run in chunks,
each in a fresh process, so that one that crashes or hangs takes nothing else along.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.results import current_commit, libraries

FOLDER = Path(__file__).parent.parent / "results"
MARK = "\x1eresult "  # in front of a result on a worker's standard output, where programs may print what they like


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
    """

    case: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Sweep:
    """A kind of cases.

    Attributes:
        module: The module that is run, with ``python -m``.
        title: What the table is about.
        list_cases: All names; called in the parent, so it should load little.
        run: Runs a case.
        limit_s: Seconds that a case may take.
        chunk: So many cases share a process.
    """

    module: str
    title: str
    list_cases: Callable[[], Sequence[str]]
    run: Callable[[str], Result]
    limit_s: int = 1800
    chunk: int = 32

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.module.rpartition('.')[2]}.jsonl"


def read_results(path: Path) -> dict[str, Result]:
    """The results in a file, by case; of several for one case the last counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return {each.case: Result(each.case, Outcome(each.outcome), each.detail) for each in found}


def write_table(sweep: Sweep, results: Iterable[Result]) -> Path:
    """Write the results as Markdown: counts first, then what is not equal, then the rest."""
    results = sorted(results, key=lambda each: each.case)
    missing = {*sweep.list_cases()} - {each.case for each in results}
    lines = [
        f"# {sweep.title}",
        "",
        f"- **Libraries:** {', '.join(f'{name} {number}' for name, number in libraries().items())}",
        f"- **Commit:** {current_commit() or 'not known'}",
        f"- **Command:** `python -m {sweep.module}`",
        f"- **Cases:** {len(results)}: {count_outcomes(results)}",
        *([f"- **Not run yet:** {len(missing)}"] if missing else []),
        "",
    ]
    for outcome in (Outcome.WRONG, Outcome.FELL_BACK, Outcome.NOT_COMPARABLE):
        rows = [f"| {each.case} | {each.detail.replace('|', '/')} |" for each in results if each.outcome is outcome]
        if rows:
            lines += [f"## {outcome.capitalize()}", "", "| case | why |", "|---|---|", *rows, ""]
    equal = [each.case for each in results if each.outcome is Outcome.EQUAL]
    if missing:
        lines += ["## Not run yet", "", ", ".join(sorted(missing)), ""]
    path = sweep.path.with_suffix(".md")
    path.write_text("\n".join([*lines, "## Equal", "", ", ".join(equal), ""]))
    return path


def main(sweep: Sweep) -> None:
    """The command line of a sweep."""
    parser = argparse.ArgumentParser(description=sweep.title)
    parser.add_argument("cases", nargs="*", help="these only, whether or not they have a result")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--again", action="append", default=[], choices=[*Outcome], help="run those of this outcome anew"
    )
    parser.add_argument("--table", action="store_true", help="write the table of what is there, and run nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for case in options.cases:
            print(MARK + json.dumps(asdict(sweep.run(case))), flush=True)
        return
    known = read_results(sweep.path)
    waiting = [case for case in sweep.list_cases() if case not in known or known[case].outcome in options.again]
    cases = [] if options.table else options.cases or waiting
    print(f"{len(cases)} cases to run; {len(known)} have a result in {sweep.path}", flush=True)
    chunks = [cases[start : start + sweep.chunk] for start in range(0, len(cases), sweep.chunk)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(run_chunk, sweep, chunk) for chunk in chunks]:
            future.result()
    results = read_results(sweep.path)
    sweep.path.write_text("".join(json.dumps(asdict(each)) + "\n" for _, each in sorted(results.items())))
    print(f"{write_table(sweep, results.values())}: {count_outcomes(results.values())}")


def run_chunk(sweep: Sweep, cases: Sequence[str]) -> None:
    """Run cases in a process; one that ends it or takes too long is noted, and the rest goes on in another."""
    waiting = list(cases)
    while waiting:
        for result in run_process(sweep, tuple(waiting)):
            note_result(sweep.path, result)
            waiting.remove(result.case)


def run_process(sweep: Sweep, cases: Sequence[str]) -> Iterator[Result]:
    """Yield the results of cases until all are there, or until one has none."""
    command = [sys.executable, "-m", sweep.module, "--worker", "--", *cases]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)]),
            threading.Thread(target=lambda: errors.extend(process.stderr)),
        ]
        for reader in readers:
            reader.start()
        for case in cases:
            try:
                while (line := lines.get(timeout=sweep.limit_s)) is not None and not line.startswith(MARK):
                    pass
            except queue.Empty:
                process.kill()
                yield Result(case, Outcome.NOT_COMPARABLE, f"no result within {sweep.limit_s} s")
                return
            if line is None:
                print("".join(errors), end="", flush=True)
                last = next((error.strip() for error in reversed(errors) if error.strip()), "")
                yield Result(case, Outcome.WRONG, f"the process ended with {process.wait()}: {last}")
                return
            found = Result(**json.loads(line.removeprefix(MARK)))
            yield Result(found.case, Outcome(found.outcome), found.detail)
        for reader in readers:
            reader.join()


_writes = threading.Lock()


def note_result(path: Path, result: Result) -> None:
    """Append a result to the file, without where things lie on this machine."""
    for folder in (Path(__file__).parents[2], sys.prefix):
        result = replace(result, detail=result.detail.replace(f"{folder}/", ""))
    with _writes, path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    print(
        f"{result.outcome:>14}  {result.case}  {'' if result.outcome is Outcome.EQUAL else result.detail}", flush=True
    )


def count_outcomes(results: Iterable[Result]) -> str:
    """Text: how many results there are of each outcome."""
    counts = Counter(each.outcome for each in results)
    return ", ".join(f"{counts[each]} {each}" for each in Outcome)
