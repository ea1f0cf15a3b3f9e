"""Suite ``alone``: a model in a process of its own, as in a user's program: no other side, nothing measured before.

In the other suites all sides share a process. That is fair to all, but for the device: what any of them has done there
stays (``docs/decisions/side-by-side.md``). Here a process loads a model, compiles it with one line and is timed. Each
side gets some processes, in turn. The first of each also judges its output, in the end.

- ``call``: wall clock of a loop of calls, outputs copied for the user.
- ``device``: what a call keeps the device, queued behind a short spin.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases.models import INFERENCE, InferenceCase
from benchmarks.inference import SampledInferenceJudge
from benchmarks.measuring.baselines import compile_called
from benchmarks.measuring.harness import Sample, loop_clock, prepare_torch, queue_behind_spin
from benchmarks.measuring.ours import only_executable
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.sides import WARM_CALLS
from benchmarks.measuring.suite import Settings, run_suite
from benchmarks.measuring.worker import answer_of

PEERS = ("compile reduce-overhead", "compile")
PROCESSES = 3  # of each side
LIMIT_S = 600.0  # of one of them

Answers = dict[str, list[dict[str, Any]]]


def run_case(case: InferenceCase, settings: Settings) -> list[Row]:
    """Run all sides of a case, each in processes of its own."""
    answers: Answers = {side: [] for side in ("ours", *filter(settings.wants, PEERS))}
    failures: dict[str, str] = {}
    for turn in range(PROCESSES):
        for side in [side for side in answers if side not in failures]:
            try:
                answers[side].append(ask(case.name, side, settings, judged=not turn))
            except RuntimeError as error:
                if side == "ours":
                    raise
                failures[side] = str(error)
    return compare(case.name, answers, failures)


def ask(case: str, side: str, settings: Settings, *, judged: bool) -> dict[str, Any]:
    """Time a side in a new process; see ``measure``."""
    arguments = ["measure", case, side, "--device", str(settings.device), "--rounds", str(settings.rounds)]
    arguments += [*(["--tiny"] if settings.tiny else []), *(["--judged"] if judged else [])]
    answer: dict[str, Any] = answer_of("benchmarks.alone", arguments, LIMIT_S, {})
    return answer


def compare(case: str, answers: Answers, failures: dict[str, str]) -> list[Row]:
    """A row for each peer and way of timing; nothing that computes something else is timed."""
    mine = answers["ours"]
    if wrong := fault(mine):
        return [Row(case, equal=False, note=f"not timed: {wrong}")]
    facts = Row(case, **mine[-1]["facts"], equal=True)
    rows = []
    for variant in ("call", "device"):
        own = pooled(mine, variant)
        timed = replace(facts, variant=variant, ours_ms=own.median, p20=own.p20, p80=own.p80)
        for peer in [side for side in answers if side != "ours"]:
            if reason := failures.get(peer) or fault(answers[peer]):
                rows.append(replace(timed, baseline=peer, note=f"{peer} not timed: {reason}"))
                continue
            theirs = pooled(answers[peer], variant)
            note = f"processes: ours {medians(mine, variant)}; {peer} {medians(answers[peer], variant)}"
            times = {"baseline_ms": theirs.median, "ratio": ratio(theirs.median, own.median)}
            rows.append(replace(timed, baseline=peer, note=note, **times))
    return rows


def fault(answers: list[dict[str, Any]]) -> str:
    """What is wrong with the output of a side; empty where it is right."""
    return next((answer["wrong"] for answer in answers if answer["wrong"]), "")


def pooled(answers: list[dict[str, Any]], variant: str) -> Sample:
    """The samples of all processes as one."""
    return Sample.of([ms for answer in answers for ms in answer[variant]])


def medians(answers: list[dict[str, Any]], variant: str) -> str:
    """The median of each process, in words."""
    return ", ".join(f"{Sample.of(answer[variant]).median:.4g}" for answer in answers)


@torch.no_grad()
def measure(
    case: InferenceCase, side: str, device: torch.device, rounds: int, *, tiny: bool, judged: bool
) -> dict[str, Any]:
    """Compile and time a side here.

    Returns:
        ``call`` and ``device``, milliseconds in the order they were taken; ``wrong``, what is wrong with the output,
        where that is judged; ``facts`` of the plan.
    """
    import millstream as ms

    problem = case.make(device, tiny=tiny)
    if side == "ours":
        compiled = ms.compile(problem.model, strict=True)
        for _ in range(WARM_CALLS):
            compiled(*problem.first)
        facts = {name: getattr(only_executable(compiled), f"num_{name}") for name in ("kernels", "streams", "waits")}
    else:
        mode = "reduce-overhead" if side.endswith("overhead") else "default"
        compiled, _ = compile_called(problem.model, problem.first, device, mode=mode)
        facts = {}

    def call() -> Any:
        return compiled(*problem.second)

    wall = loop_clock(call, device)
    times = [wall() for _ in range(rounds)]
    device_times = [device_ms(call) for _ in range(rounds)] if device.type == "cuda" else times
    wrong = SampledInferenceJudge(problem).judge(compiled, None).reason if judged else ""
    return {"call": times, "device": device_times, "wrong": wrong, "facts": facts}


def device_ms(call: Any) -> float:
    """What a call takes between two events, the host being ahead."""
    torch.cuda.synchronize()
    start, end = queue_behind_spin(call)
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    cases = {case.name: case for case in INFERENCE}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["measure"])
    parser.add_argument("case", choices=sorted(cases))
    parser.add_argument("side", choices=("ours", *PEERS))
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--judged", action="store_true")
    options = parser.parse_args()
    prepare_torch()
    how = {"tiny": options.tiny, "judged": options.judged}
    print(json.dumps(measure(cases[options.case], options.side, options.device, options.rounds, **how)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        main()
    else:
        sys.exit(run_suite("alone", INFERENCE, run_case))
