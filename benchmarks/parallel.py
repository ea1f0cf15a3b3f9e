"""Suite ``parallel``: a step whose gradients are reduced between GPUs of one host, a process each, by torchrun.

All sides of a case share the processes, as in the other suites. Each baseline is timed in turn with ours as soon as it
is built, in all processes at once; the slowest process counts. Only ``ddp compile`` is built and timed after all
others, whose kernels it would slow, and alone. Sides of a *fully sharded* case have processes of their own.

- ``one gpu``: our step of the bare model in each process, nothing reduced; its ratio is the efficiency
- ``ddp compile``: torch.compile on the DistributedDataParallel model, and the optimizer as PyTorch gives it
- ``hand graph``: the whole step in one CUDA graph captured by hand around torch.compile, with one all-reduce of all
  gradients after the backward pass and the fused optimizer
- ``whole state``: of a case that is *sharded* (``shard_optimizer=True``), our step without that, and nothing else
- ``fsdp compile``: of a case that is *fully sharded* (``fully_shard`` around each block, bfloat16), PyTorch's own step
  with each block and the loss under torch.compile and the fused optimizer, and nothing else

Beside times, a row has the memory that a side takes on the device of the fullest process, where the workspaces for
libraries that our sides share count with each of them, and how long each collective of ours was *exposed*: it ran, and
nothing else did. The rank that comes last waits for nobody, so of each collective the least over all ranks counts; what
the others took longer is waiting for that rank.

With ``SAVE_STEPS=DIR`` in the environment each case's step is written there, for ``millstream simulate DIR/CASE.json``;
with ``CASE_SECONDS=N`` a case that takes longer than that is ended, and has the rows that were measured by then.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import fully_sharded
from benchmarks.cases.fully_sharded import FSDP_COMPILE, FULLY_SHARDED, build_fully_sharded, vit_small
from benchmarks.cases.models import ADAMW, LARGE, SGD, TRAINING, Training, TrainingCase, labelled, shape
from benchmarks.cases.networks import resnet
from benchmarks.measuring.baselines import Call, Trainee, trainee
from benchmarks.measuring.harness import Sample, prepare_torch, synchronize, take_workspaces
from benchmarks.measuring.results import Row, ratio
from benchmarks.measuring.sides import capture
from benchmarks.measuring.suite import Settings, brief, run_suite
from millstream.device import context
from millstream.insight.intervals import complement, total, union
from millstream.insight.profiler.kineto import read_trace
from millstream.insight.records import Activity, ActivityKind

WHOLE_STATE = "whole state"
BASELINES = ("one gpu", "ddp compile", "hand graph", WHOLE_STATE, FSDP_COMPILE)
LAST = ("ddp compile",)  # its stream slows all kernels of a process from then on (docs/decisions/side-by-side.md)
SHARDED = "sharded"  # the last word of such a case's name
WARM_STEPS = 12  # ours has settled by then
SAMPLE_MS = 60.0  # a sample begins with a barrier, which processes do not leave at the same time
LIMIT_S, END_S = float(os.environ.get("CASE_SECONDS", "900")), 30.0  # of a case; of its processes to end when told to
TIMEOUT = timedelta(seconds=300)  # of a collective: one process may compile for long while another has a cached result
TRACED_STEPS = 6
JUDGED, TOLERANCE = 4, 0.02  # so many losses, to such a part, in bf16


def resnet50(small: bool) -> nn.Module:
    return resnet((1, 1, 1, 1), 8) if small else resnet()


def images(batch: int) -> Any:
    return labelled(shape(batch, 3, 224, 224, tiny=(4, 3, 32, 32)), 1000)


UNSHARDED = (
    TrainingCase("resnet50 b32", resnet50, images(32), torch.optim.SGD, SGD, estimate_s=200),
    TrainingCase("resnet50 b8", resnet50, images(8), torch.optim.SGD, SGD, estimate_s=200),
    TrainingCase("vit small b16", vit_small, images(16), torch.optim.AdamW, ADAMW, estimate_s=150),
    *(case for case in (*LARGE, *TRAINING) if case.name in ("gpt2 small b8 T1024", "char-rnn lstm 2x128 b50")),
)
CASES = (
    *UNSHARDED,
    *(replace(case, name=f"{case.name} {SHARDED}") for case in UNSHARDED if case.name.startswith("gpt2")),
    *fully_sharded.CASES,
)


def peers_of(case: str) -> list[str]:
    """The baselines that a case has."""
    if case.endswith(FULLY_SHARDED):
        return [FSDP_COMPILE]
    if case.endswith(SHARDED):
        return [WHOLE_STATE]
    return [each for each in BASELINES if each not in (WHOLE_STATE, FSDP_COMPILE)]


def run_case(case: TrainingCase, settings: Settings) -> list[Row]:
    """Run all sides of a case in a group of processes, one for each GPU."""
    size = torch.cuda.device_count() if settings.device.type == "cuda" else 2
    if size < 2:
        return [Row(case.name, note="not run: it needs two GPUs")]
    sides = ["ours", *filter(settings.wants, peers_of(case.name))]
    if not case.name.endswith(FULLY_SHARDED):
        return compare(case.name, size, ask(case.name, size, sides, settings))
    mine, *others = (ask(case.name, size, [side], settings) for side in sides)
    for other in others:
        mine["sides"] |= other["sides"]
    return compare(case.name, size, mine)


def ask(case: str, size: int, sides: list[str], settings: Settings) -> dict[str, Any]:
    """Have a new group of processes measure; see ``measure``.

    Raises:
        RuntimeError: One of them has failed, or nothing was measured in time; what they said stands in the log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["-m", "benchmarks.parallel", "measure", case, ",".join(sides), "--rounds", str(settings.rounds)]
    command += ["--device", settings.device.type, *(["--tiny"] if settings.tiny else [])]
    path = os.pathsep.join(part or os.curdir for part in sys.path)
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    late = ""
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        late = f"the processes did not end within {LIMIT_S:g} s"
        end(child)
        said, _ = child.communicate()
    finally:
        end(child)
    answers = [line for line in said.splitlines() if line.startswith("{")]
    if not answers:
        raise RuntimeError(late or f"the processes ended with status {child.returncode}, see above")
    if child.returncode and not late:
        late = f"the processes ended with status {child.returncode}"
    answer: dict[str, Any] = json.loads(answers[-1])
    if late:
        answer["note"] = f"{late}; {answer['note']}"
    return answer


def end(child: subprocess.Popen[str]) -> None:
    """Have torchrun end its processes, which would keep the devices otherwise; it does when it is told to terminate."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()


def compare(case: str, size: int, answer: dict[str, Any]) -> list[Row]:
    """A row for each baseline; ours is not timed where it computes something else."""
    mine, facts = answer["sides"]["ours"], answer["facts"]
    variant = f"{size} processes"
    if "failure" in mine:
        return [Row(case, variant, note=f"not run: {mine['failure']}")]
    if answer["wrong"]:
        return [Row(case, variant, equal=False, note=answer["wrong"])]
    own = Sample.of(mine["times"])
    facts |= {"ours_ms": own.median, "p20": own.p20, "p80": own.p80, "compile_s": mine["build_s"]}
    facts["equal"] = None if answer["wrong"] is None else True
    facts["peak_bytes"] = mine["peak_bytes"]
    rows = []
    for baseline in filter(answer["sides"].__contains__, BASELINES):
        theirs = answer["sides"][baseline]
        if "failure" in theirs:
            note = f"{answer['note']}; {baseline} not timed: {theirs['failure']}"
            rows.append(Row(case, variant, baseline, note=note, **facts))
            continue
        theirs_ms = Sample.of(theirs["times"]).median
        rows.append(
            Row(
                case,
                variant,
                baseline,
                baseline_ms=theirs_ms,
                ratio=ratio(theirs_ms, own.median),
                compile_ratio=ratio(mine["build_s"], theirs["build_s"]),
                peak_ratio=ratio(mine["peak_bytes"], theirs["peak_bytes"]),
                note=answer["note"],
                **facts,
            )
        )
    return rows or [Row(case, variant, note=answer["note"], **facts)]


# --- in each of the processes -----------------------------------------------------------------------------------------


class Sides:
    """What is built and timed of a case in one of the processes, as in all others at the same time."""

    def __init__(self, problem: Training, device: torch.device) -> None:
        self.problem, self.device = problem, device
        self.batches = [tuple(x[other_rows(x)] for x in batch) for batch in problem.batches]
        self.calls: dict[str, Callable[[], Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, Call] = {}
        self.losses: dict[str, list[float]] = {}
        # Kept: a graph captured by hand keeps none of the memory it was captured with.
        self.trainees: dict[str, Trainee] = {}

    def add(self, side: str) -> None:
        """Build a side, and run it until it has settled."""
        start = time.perf_counter()
        failure, before, batches = "", held_bytes(self.device), self.batches
        try:
            step, self.trainees[side] = build(self.problem, side, batches)
            taken = [step(*batches[number % len(batches)]).detach().clone() for number in range(WARM_STEPS)]
            self.losses[side] = [loss.item() for loss in taken[:JUDGED]]
        except Exception as error:  # noqa: BLE001 - a side's failure is a result
            traceback.print_exc()
            failure = brief(error)
        failed = [text for text in told_by_all(failure) if text]
        if failed:
            self.answers[side] = {"failure": failed[0]}
            return
        self.steps[side] = step
        call = self.calls[side] = lambda: step(*batches[1])
        self.answers[side] = {"times": [], "build_s": time.perf_counter() - start}
        taken.clear()
        held = peak_bytes(call, self.device, before)
        self.answers[side]["peak_bytes"] = None if held is None else max(told_by_all(held))
        first_ms = sample_ms(call, self.device, 10)
        if dist.get_rank() == 0:  # for those that watch
            told = f"{first_ms:.3f} ms, built in {self.answers[side]['build_s']:.0f} s{pools(self.device)}"
            print(f"{self.problem.case.name}, {side}: {told}", file=sys.stderr)

    def time(self, sides: Sequence[str], rounds: int) -> None:
        """Time sides in turn."""
        names = [side for side in sides if side in self.calls]
        number_of = {side: max(told_by_all(calls_in_a_sample(self.calls[side], self.device))) for side in names}
        for first in range(rounds):
            for position in range(len(names)):
                side = names[(first + position) % len(names)]
                taken_ms = sample_ms(self.calls[side], self.device, number_of[side])
                self.answers[side]["times"].append(max(told_by_all(taken_ms)))

    def describe(self) -> tuple[dict[str, Any], str]:
        """Facts and a note about our side."""
        step, name = self.steps["ours"], self.problem.case.name
        facts, note = described(name, step)
        try:
            facts["exposed_us"], told = communication(self.calls["ours"], step, self.device)
        except Exception as error:  # noqa: BLE001 - what was timed counts without it
            traceback.print_exc()
            told = f"communication not measured: {brief(error)}"
        note = f"{told}; {note}"
        if WHOLE_STATE in self.calls:
            optimizers = (self.trainees[side].optimizer for side in ("ours", WHOLE_STATE))
            own, whole = (max(told_by_all(state_bytes(each))) for each in optimizers)
            note = f"optimizer state {own / whole:.3f} of the whole, {own / 2**20:.0f} MiB; {note}"
        return facts, note


def measure(case: TrainingCase, sides: list[str], device: torch.device, rounds: int, *, tiny: bool) -> None:
    """Build and time all sides, in all processes at once; the first one prints what is known after each, as JSON.

    ``sides``: for each its milliseconds, in the order they were taken, and seconds to build, or its failure; ``wrong``:
    what is wrong with our side, ``None`` while nobody has looked; ``facts`` and ``note``: about our side.
    """
    mine = Sides(case.make(device, tiny=tiny), device)
    answer: dict[str, Any] = {"sides": mine.answers, "wrong": None, "facts": {}, "note": ""}

    def tell() -> None:
        shared = max(told_by_all(workspace_bytes(device)))
        told = {side: dict(facts) for side, facts in mine.answers.items()}
        for side in {"ours", "one gpu", WHOLE_STATE} & mine.calls.keys():
            if device.type == "cuda":
                told[side]["peak_bytes"] += shared
        if dist.get_rank() == 0:
            print(json.dumps({**answer, "sides": told}), flush=True)

    if "ours" in sides:
        mine.add("ours")
    for side in (side for side in sides if side != "ours" and side not in LAST):
        mine.add(side)
        mine.time(["ours", side], rounds)
        tell()
    if "ours" in mine.calls:
        if not mine.answers["ours"]["times"]:
            mine.time(["ours"], rounds)
        answer["facts"], answer["note"] = mine.describe()
        tell()
    for side in LAST:
        if side in sides:
            mine.add(side)
            mine.time([side], rounds)
    if "ours" in mine.calls:
        answer["wrong"] = fault(mine.problem, mine.losses["ours"], mine.trainees["ours"].model, mine.batches)
    tell()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    entries = (value for entry in optimizer.state.values() for value in entry.values())
    return sum(value.nbytes for value in entries if isinstance(value, Tensor))


def other_rows(x: Tensor) -> Tensor:
    """An order of rows that is another in each process; memory keeps its layout."""
    return (torch.arange(len(x), device=x.device) + dist.get_rank()) % len(x)


def told_by_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def held_bytes(device: torch.device) -> int:
    """Memory that is in use once all garbage is gone: tensors, and all of the pools that graphs have.

    Of what PyTorch's allocator has taken for tensors only that counts which holds some: the rest is what earlier sides,
    and compilers, have left in pieces.
    """
    if device.type != "cuda":
        return 0
    take_workspaces(device)
    synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    segments = [each for each in torch.cuda.memory_snapshot() if not _is_workspace(each, device)]
    return sum(each["active_size" if _is_common(each) else "total_size"] for each in segments)


def workspace_bytes(device: torch.device) -> int:
    """Workspaces for libraries that all of our sides share: they lie in a pool that whichever comes first fills."""
    if device.type != "cuda":
        return 0
    return sum(each["total_size"] for each in torch.cuda.memory_snapshot() if _is_workspace(each, device))


def _is_workspace(segment: dict[str, Any], device: torch.device) -> bool:
    return tuple(segment["segment_pool_id"]) == tuple(context(device).graphs.workspace_pool)


def _is_common(segment: dict[str, Any]) -> bool:
    """Whether a piece of the allocator's memory is of the pool that tensors come from outside graphs."""
    return tuple(segment["segment_pool_id"]) == (0, 0)


def pools(device: torch.device) -> str:
    """What PyTorch holds of a GPU for itself, and in each pool of a graph; nothing about a CPU."""
    if device.type != "cuda":
        return ""
    sizes: Counter[tuple[int, int]] = Counter()
    for segment in torch.cuda.memory_snapshot():
        sizes[tuple(segment["segment_pool_id"])] += segment["total_size"]
    own = sizes.pop((0, 0), 0)
    graphs = " + ".join(f"{size / 2**20:.0f}" for size in sorted(sizes.values(), reverse=True))
    return f", {own / 2**20:.0f} MiB and in graphs {graphs or 0}"


def peak_bytes(call: Callable[[], Any], device: torch.device, before: int) -> int | None:
    """What a side takes: what it holds between calls, and what a call allocates beyond that; all processes call it."""
    if device.type != "cuda":
        call()
        return None
    held = held_bytes(device) - before
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return held + torch.cuda.max_memory_allocated(device) - allocated


def calls_in_a_sample(call: Callable[[], Any], device: torch.device) -> int:
    return max(1, min(50, round(SAMPLE_MS / sample_ms(call, device, 3))))


def sample_ms(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Milliseconds of a call, of some in a row that all processes begin at the same time."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6 / calls


def fault(problem: Training, losses: list[float], model: nn.Module, batches: list[Any]) -> str:
    """What is wrong with ours; empty where it is right.

    Its first losses are to be those of DDP, or of FSDP, without any compiler, and the parameters to have the same bits
    in all processes, unless each has a shard.
    """
    shards = problem.case.name.endswith(FULLY_SHARDED)
    if shards:
        step, _ = build_fully_sharded(problem, "fsdp")
    else:
        twin = trainee(problem)
        step = problem.make_step(DistributedDataParallel(twin.model), twin.optimizer)
    expected = [step(*batches[number % len(batches)]).item() for number in range(len(losses))]
    difference = max(abs(own - theirs) / max(abs(theirs), 1.0) for own, theirs in zip(losses, expected, strict=True))
    if max(told_by_all(difference)) > TOLERANCE:
        return f"losses differ by a part of {difference:.2g}"
    if shards:
        return ""
    content = b"".join(each.detach().float().cpu().numpy().tobytes() for each in model.parameters())
    digests = told_by_all(hashlib.sha256(content).hexdigest())
    return "" if len(set(digests)) == 1 else "processes have other parameters"


def described(name: str, step: Any) -> tuple[dict[str, Any], str]:
    """Our counts, what the simulator says of it, and whether it is one graph."""
    from millstream import api

    executables = api.executables(step)
    facts: dict[str, Any] = {
        name: sum(getattr(each, f"num_{name}") for each in executables) for name in ("kernels", "waits")
    }
    facts["streams"] = max(each.num_streams for each in executables)
    notes = "; ".join(note for each in executables for note in each.notes)
    try:
        explanation = api.explain(step)
        if (folder := os.environ.get("SAVE_STEPS")) and dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            explanation.save(Path(folder, f"{name.replace(' ', '_')}.json"))
        told = [each for each in explanation.communication if not each.is_calculated]
        if len(told) == 1:  # from costs of kernels, and of captured collectives, that were measured alone
            facts["predicted_ms"] = told[0].runs["predicted"].end_ns / 1e6
    except Exception as error:  # noqa: BLE001 - what was timed counts without it
        traceback.print_exc()
        notes = f"not predicted: {brief(error)}; {notes}"
    return facts, f"{len(executables)} graphs: {notes}"[:300]


def communication(call: Callable[[], Any], step: Any, device: torch.device) -> tuple[float | None, str]:
    """Exposed microseconds of all collectives in our step, and a text about each; all processes call it."""
    from millstream import api

    failure, exchanges = "", api.exchanges(step)
    kind = "CUDA" if device.type == "cuda" else "CPU"  # on which nothing is found: that tries the script
    profiler = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)])
    try:
        profiler.start()
    except RuntimeError as error:
        failure = brief(error)
    for _ in range(TRACED_STEPS + 1):  # CUPTI may lose the first kernels of a window (pytorch#192021)
        sample_ms(call, device, 1)
    if not failure:
        profiler.stop()
    found: list[list[tuple[float, float]]] = []
    if not failure:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            activities = read_trace(json.loads(path.read_text(encoding="utf-8"))).activities
        found = exposed(activities, len(exchanges))
    of_ranks = told_by_all(found)
    num_steps = min(map(len, of_ranks))
    if not num_steps:
        return None, f"communication not measured: {failure or 'collectives of steps could not be told apart'}"
    last = [steps[-num_steps:] for steps in of_ranks]
    parts, whole = [], 0.0
    for number, exchange in enumerate(exchanges):
        least = [min(steps[at][number] for steps in last) for at in range(num_steps)]
        exposed_us, took_us = (median(pair[part] for pair in least) for part in (0, 1))
        longest_us = median(max(steps[at][number][1] for steps in last) for at in range(num_steps))
        whole += exposed_us
        parts.append(
            f"{exchange.num_bytes / 2**20:.2f} MiB {exposed_us:.0f} of {took_us:.0f} µs (first rank {longest_us:.0f})"
        )
    return whole, f"exposed: {', '.join(parts)}"


def exposed(activities: Sequence[Activity], num_collectives: int) -> list[list[tuple[float, float]]]:
    """For each step and each of its collectives, in order, the microseconds it was exposed, and those it took.

    Args:
        activities: Of some steps; what a barrier between them does is a collective, too.
        num_collectives: Of a step.

    Returns:
        A list for each step but the first; empty where the steps cannot be told apart.
    """
    mine = sorted((each for each in activities if each.kind is ActivityKind.COMMUNICATION), key=lambda a: a.start_ns)
    other = union((each.start_ns, each.end_ns) for each in activities if each.kind is not ActivityKind.COMMUNICATION)
    each_step = num_collectives + 1  # with its barrier, which comes first
    if not num_collectives or len(mine) < 2 * each_step:
        return []
    steps = []
    for end in range(len(mine), each_step - 1, -each_step):  # the first ones may be lost
        own = mine[end - num_collectives : end]
        steps.append(
            [(total(complement(other, a.start_ns, a.end_ns)) / 1e3, (a.end_ns - a.start_ns) / 1e3) for a in own]
        )
    return steps[::-1]


def build(problem: Training, side: str, batches: list[Any]) -> tuple[Call, Trainee]:
    """Build a side: its step, and what the step trains."""
    import millstream as ms

    if side == "hand graph":
        return build_hand_graph(problem, batches)
    if problem.case.name.endswith(FULLY_SHARDED):
        return build_fully_sharded(problem, side)
    own = trainee(problem)
    if problem.case.name.endswith(SHARDED):
        step = problem.make_step(own.model, own.optimizer)
        return ms.step(step, strict=True, data_parallel=True, shard_optimizer=side != WHOLE_STATE), own
    model: Any = own.model if side == "one gpu" else DistributedDataParallel(own.model, gradient_as_bucket_view=True)
    run = torch.compile(model) if side == "ddp compile" else model
    step = problem.make_step(run, own.optimizer)
    return step if side == "ddp compile" else ms.step(step, strict=True), own


def build_hand_graph(problem: Training, batches: list[Any]) -> tuple[Call, Trainee]:
    """Capture the whole step by hand; gradients are reduced in one piece."""
    side = trainee(problem, fused=True, capturable=True)
    compiled = torch.compile(side.model, fullgraph=True, dynamic=False)
    case, device = problem.case, problem.device
    autocast = case.autocast is not None
    parameters = [each for each in side.model.parameters() if each.requires_grad]
    size = dist.get_world_size()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, problem.dtype if autocast else torch.bfloat16, enabled=autocast):
            out = compiled(x)
        loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
        loss.backward()
        gradients = [each.grad for each in parameters if each.grad is not None]
        flat = torch.cat([each.reshape(-1) for each in gradients]).div_(size)
        dist.all_reduce(flat)
        pieces = flat.split([each.numel() for each in gradients])
        torch._foreach_copy_(gradients, [piece.view(each.shape) for piece, each in zip(pieces, gradients, strict=True)])
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip)
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss

    static = [x.clone() for x in batches[0]]
    replay, result = capture(lambda: step(*static), device)

    def call(*fresh: Tensor) -> Tensor:
        for slot, x in zip(static, fresh, strict=True):
            slot.copy_(x)
        replay()
        return result

    return call, side


def join_group(kind: str) -> torch.device:
    """Become one of the processes that torchrun has started; returns this one's device."""
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    return device


def main() -> None:
    cases = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["measure"])
    parser.add_argument("case", choices=sorted(cases))
    parser.add_argument("sides")
    parser.add_argument("--device", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prepare_torch()
    device = join_group(options.device)
    measure(cases[options.case], options.sides.split(","), device, options.rounds, tiny=options.tiny)
    dist.barrier()
    os._exit(0)  # graphs captured by hand would have destroy_process_group wait for ever


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        main()
    else:
        sys.exit(run_suite("parallel", CASES, run_case))
