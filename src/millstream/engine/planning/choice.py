"""Which plan runs: candidates are made, simulated, and the promising ones timed on the device.

**Contract**
- The serial plan is always a candidate, and wins a tie: a plan with streams must be faster by ``MARGIN``.
- A plan that needs more memory than the budget is no candidate.
- What is tried is checked before.
- What is chosen is noted on disk with the costs it was made from, so that another process plans the same at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from millstream.check import check_plan
from millstream.cost import Costs
from millstream.device.cuda_graphs.spread import BESIDE, SMALL
from millstream.errors import ArgumentError
from millstream.graph import CHOSEN, PLANNED_ROLES, Candidate, KernelGraph, Plan, Spread, Wait, format_graph
from millstream.program import Program
from millstream.progress import count
from millstream.schedule import POLICIES, critical_path_ns, peak_bytes, plan_graph, plan_serial
from millstream.simulate import simulate

STREAM_COUNTS = (8, 6, 4, 3, 2)
TRIED_POLICIES = ("list", "slack", "chains")  # the first with all variants, the others with the first one
#: What a wait is taken to cost, as a factor, and whether memory is packed: what is right differs from graph to graph.
VARIANTS = ((1.0, True), (1.0, False), (4.0, True))
HAND_STREAMS = 8  # ``streams="manual"`` takes as many as are written down, and at most so many
MOST_STREAMS = 1024  # more than any device runs at one time; a plan keeps books for each
MARGIN = 0.01  # by so much several streams must be faster than one: below it the difference is noise
HOPEFUL = 1.15  # candidates predicted within this factor of the best one are timed
MOST_TRIALS = 12
GRANULE_BYTES = 2 << 20  # PyTorch's allocator takes no less from the device: so much more never counts as too much


@dataclass(frozen=True)
class Scheduling:
    """What a user asks of the schedule.

    Attributes:
        streams: How many streams at most; ``None`` chooses by measuring.
        policy: Name of a policy; ``None`` chooses.
        memory: Budget: for temporaries and outputs in bytes as an ``int``, or as a ``float`` a factor of all that the
            program holds when it runs on one stream, parameters and inputs included.
        tune: When a plan is chosen: by the first calls, or between later ones (``background``). What is chosen from is
            the same.
    """

    streams: int | None = None
    policy: str | None = None
    memory: float | int = 1.25
    tune: Literal["first", "background"] = field(default="first", repr=False)  # a choice on disk serves both

    def __post_init__(self) -> None:
        if self.tune not in ("first", "background"):
            raise ArgumentError(f"tune={self.tune!r} says not when; choose 'first' or 'background'.")
        if self.streams is not None and (
            not isinstance(self.streams, int) or isinstance(self.streams, bool) or self.streams < 1
        ):
            raise ArgumentError(f"streams={self.streams!r} leaves nowhere to run; give 1 or more, or 'auto'.")
        if self.streams is not None and self.streams > MOST_STREAMS:
            raise ArgumentError(f"streams={self.streams} is more than can be planned; give at most {MOST_STREAMS}.")
        if self.policy is not None and (not isinstance(self.policy, str) or self.policy not in POLICIES):
            raise ArgumentError(f"Unknown policy {self.policy!r}; choose one of {', '.join(map(repr, POLICIES))}.")
        if isinstance(self.memory, bool) or not isinstance(self.memory, (int, float)):
            raise ArgumentError(f"memory={self.memory!r} is no amount; give bytes as an int, or a factor as a float.")
        if isinstance(self.memory, float) and not 1 <= self.memory < inf:
            raise ArgumentError(
                f"memory={self.memory} is no factor of what one stream needs; give 1.0 or more, or bytes as an int."
            )

    @property
    def serial(self) -> bool:
        """Whether only one stream is asked for."""
        return self.streams == 1 or self.policy == "serial"

    def budget_bytes(self, serial: Plan) -> int:
        """Return the budget for temporaries and outputs in bytes.

        Raises:
            ArgumentError: One stream needs more.
        """
        needed = peak_bytes(serial)
        if isinstance(self.memory, float):
            owned = (buffer for buffer in serial.graph.buffers if buffer.alias_of is None)
            held = needed + sum(buffer.num_bytes for buffer in owned if buffer.role not in PLANNED_ROLES)
            return needed + max(int(held * (self.memory - 1)), GRANULE_BYTES)
        budget = int(self.memory)
        if budget < needed:
            raise ArgumentError(
                f"memory={self.memory} bytes is too little: {serial.graph.name} needs {needed} bytes for its "
                "temporaries and outputs on one stream; give at least that."
            )
        return budget


class Recipe(NamedTuple):
    """How a plan is made.

    Attributes:
        policy: Name of the policy.
        streams: How many there may be.
        wait_factor: What a wait is taken to cost more than measured.
        packed: Whether memory is packed.
    """

    policy: str
    streams: int
    wait_factor: float
    packed: bool


@dataclass(frozen=True)
class CandidatePlan:
    """A plan with what is known of it before it runs.

    Attributes:
        plan: To be checked before it runs.
        peak_bytes: What temporaries and outputs take.
        predicted_ns: Its time in the simulator.
        recipe: How it was made: what ``plan_by`` takes; ``None`` of the serial one.
    """

    plan: Plan
    peak_bytes: int
    predicted_ns: int
    recipe: Recipe | None = None

    def describe(self, outcome: str = "", measured_ns: int | None = None) -> Candidate:
        """Return it as a candidate for a report."""
        plan = self.plan
        return Candidate(
            policy=plan.policy,
            streams=plan.num_streams,
            waits=sum(isinstance(step, Wait) for step in plan.steps),
            peak_bytes=self.peak_bytes,
            predicted_ns=self.predicted_ns,
            measured_ns=measured_ns,
            outcome=outcome,
            spread=plan.spread,
        )


def calibrate(costs: Costs, serial_ns: int) -> Costs:
    """Spread over all kernels by how much they take longer together, one after another, than when measured alone.

    Repeating one kernel flatters it: its code and data stay in the caches that are closest. What even the shortest
    kernel takes is launching; meanwhile a kernel fills nothing, so that its share of the device is less by as much.
    """
    extra_ns = (serial_ns - costs.total_ns) / max(len(costs.kernels), 1)
    durations = [max(round(cost.duration_ns + extra_ns), 1) for cost in costs.kernels]
    launch_ns = min(durations, default=0)
    kernels = (
        replace(cost, duration_ns=duration, compute_share=cost.compute_share * (1 - launch_ns / duration))
        for cost, duration in zip(costs.kernels, durations, strict=True)
    )
    return replace(costs, kernels=tuple(kernels))


def propose(graph: KernelGraph, costs: Costs, scheduling: Scheduling) -> list[CandidatePlan]:
    """Make the candidates: the serial plan first, then all others, the fastest by prediction first.

    Where the longest chain of kernels takes nearly all of the time, or only one stream is asked for, the serial plan is
    the only one.

    Raises:
        ArgumentError: The memory budget is too small for one stream.
    """
    serial = plan_serial(graph)
    budget = scheduling.budget_bytes(serial)
    candidate_plans = [_assess(serial, costs)]
    by_hand = scheduling.policy == "manual"
    if scheduling.serial or (not by_hand and critical_path_ns(graph, costs) > (1 - MARGIN) * costs.total_ns):
        return candidate_plans
    seen = {serial.steps}
    for recipe in _recipes(graph, scheduling):
        candidate = _propose_by(recipe, graph, costs, scheduling, budget)
        if candidate.plan.num_streams > 1 and candidate.plan.steps not in seen:
            seen.add(candidate.plan.steps)
            candidate_plans.append(candidate)
    return [candidate_plans[0], *sorted(candidate_plans[1:], key=lambda candidate: candidate.predicted_ns)]


def _recipes(graph: KernelGraph, scheduling: Scheduling) -> list[Recipe]:
    """The ways to make a plan with several streams that are considered."""
    counts = STREAM_COUNTS if scheduling.streams is None else (scheduling.streams,)
    policies = TRIED_POLICIES if scheduling.policy is None else (scheduling.policy,)
    if scheduling.policy is None and graph.has_hints:
        policies = (*policies, "manual")
    return [
        Recipe(policy, num_streams, *variant)
        for variant, num_streams, policy in product(VARIANTS, counts, policies)
        if variant is VARIANTS[0] or policy == policies[0]
    ]


def _propose_by(recipe: Recipe, graph: KernelGraph, costs: Costs, scheduling: Scheduling, budget: int) -> CandidatePlan:
    fewer = scheduling.streams is not None  # else they are candidates themselves
    return replace(_assess(plan_by(recipe, graph, costs, budget, fewer=fewer), costs), recipe=recipe)


def plan_by(recipe: Recipe, graph: KernelGraph, costs: Costs, budget: int, *, fewer: bool = False) -> Plan:
    """Make a plan, with small kernels apart from each other.

    Args:
        recipe: How.
        graph: Of what.
        costs: Of its kernels.
        budget: Bytes for temporaries and outputs.
        fewer: Whether fewer streams are taken where they take no longer.
    """
    priced = replace(costs, wait_ns=round(costs.wait_ns * recipe.wait_factor))
    limits = {"memory_bytes": budget, "packed": recipe.packed, "fewer": fewer}
    return replace(plan_graph(graph, priced, recipe.streams, recipe.policy, **limits), spread=Spread.APART)


def _assess(plan: Plan, costs: Costs) -> CandidatePlan:
    return CandidatePlan(plan, peak_bytes(plan), simulate(plan, costs).end_ns)


class Trial(Protocol):
    """Runs plans on the device, to time them.

    Attributes:
        error: Why one could not run, if one could not. For want of memory, perhaps: another time it may.
    """

    error: Exception | None

    def serial_ns(self) -> int | None:
        """Time the plan on one stream; ``None`` when it cannot run."""
        ...

    def compare(self, candidate: CandidatePlan, best: CandidatePlan) -> tuple[int, int] | None:
        """Time a plan and the best so far in turn; ``None`` when one of them cannot run."""
        ...


Result = TypeVar("Result")
Found = tuple[CandidatePlan, tuple[Candidate, ...]]


def at_once(steps: Generator[None, None, Result]) -> Result:
    """Do without a pause what may pause before each step."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def choose(candidate_plans: Sequence[CandidatePlan], trial: Trial, seconds: float) -> Found:
    """Do what ``choose_stepwise`` does without a pause."""
    return at_once(choose_stepwise(candidate_plans, trial, seconds))


def choose_stepwise(
    candidate_plans: Sequence[CandidatePlan], trial: Trial, seconds: float
) -> Generator[None, None, Found]:
    """Time the promising candidates and return the fastest, with what became of all of them.

    Each is timed in turn with the best so far, the first with one stream. (Not all with one stream: its graph may
    become a tenth slower in the middle of trials, so that later ones look better: docs/decisions/side-by-side.md.)
    Small kernels are kept apart in all of them; the fastest is tried in the other ways to spread kernels, too.

    Args:
        candidate_plans: As ``propose`` makes them.
        trial: Times one of them.
        seconds: After so long no further trial begins.

    Yields:
        Before each trial.
    """
    serial, others = candidate_plans[0], candidate_plans[1:]
    best, best_share = serial, 1.0  # of the time on one stream
    serial_ns: int | None = None
    deadline = time.monotonic() + seconds
    num_tried, most = 0, min(len(others), MOST_TRIALS) + len(Spread) - 1

    def measure(candidate: CandidatePlan) -> int | None:
        nonlocal best, best_share, serial_ns, num_tried
        check_plan(candidate.plan)
        num_tried += 1
        count("trying plan", num_tried, most, "")
        times = trial.compare(candidate, best)
        if times is None:
            return None
        own_ns, best_ns = times
        serial_ns = serial_ns or best_ns
        share = best_share * own_ns / best_ns
        if share < (best_share if best is not serial else 1 - MARGIN):
            best, best_share = candidate, share
        return round(share * serial_ns)

    told: dict[int, Candidate] = {}
    for index, candidate in enumerate(others):
        if candidate.predicted_ns > HOPEFUL * others[0].predicted_ns or candidate.predicted_ns > serial.predicted_ns:
            told[index] = candidate.describe("predicted to be slower")
        elif index >= MOST_TRIALS or time.monotonic() > deadline:
            told[index] = candidate.describe("no time left to try it")
        else:
            yield
            measured_ns = measure(candidate)
            told[index] = candidate.describe("could not be captured" if measured_ns is None else "slower", measured_ns)
    tried = [*candidate_plans]
    candidates = [serial.describe("slower", serial_ns), *(told[index] for index in range(len(others)))]
    for other in _spread_otherwise(best):
        if time.monotonic() > deadline:
            break
        yield
        if (measured_ns := measure(other)) is not None:
            tried.append(other)
            candidates.append(other.describe("slower", measured_ns))
    chosen = next(index for index, candidate in enumerate(tried) if candidate is best)
    candidates[chosen] = replace(candidates[chosen], outcome=CHOSEN)
    return best, tuple(candidates)


def _spread_otherwise(candidate: CandidatePlan) -> list[CandidatePlan]:
    """The same plan in the other ways to spread kernels; none of the serial one, whose kernels have no neighbours."""
    if candidate.plan.spread is Spread.PACKED:
        return []
    return [
        replace(candidate, plan=replace(candidate.plan, spread=spread))
        for spread in reversed(Spread)
        if spread is not candidate.plan.spread
    ]


def choice_key(program: Program, scheduling: Scheduling) -> str:
    """What a choice on disk is found by: everything that it depends on beside device and versions."""
    codes = [program.code(kernel.id) for kernel in program.graph.kernels]
    text = f"{format_graph(program.graph)}{codes}{scheduling}{STREAM_COUNTS}{TRIED_POLICIES}{VARIANTS}{SMALL}{BESIDE}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def to_json(best: CandidatePlan, candidates: Sequence[Candidate]) -> dict[str, object]:
    """Turn what was chosen, and what from, into plain data."""
    return {"recipe": best.recipe, "candidates": [asdict(each) for each in candidates]}


def from_json(
    noted: Mapping[str, Any], graph: KernelGraph, costs: Costs, scheduling: Scheduling, *, exactly: bool = True
) -> Found | None:
    """Make the plan again that was chosen before, and no other.

    Args:
        noted: By ``to_json``.
        graph: Of the same kernels.
        costs: Of them.
        scheduling: What the user asks of the schedule.
        exactly: Whether the plan is to be the one that was noted, which was made from the same costs; or else one made
            as that was.

    Returns:
        ``None`` where it does not come out so.
    """
    try:
        read = [Candidate(**entry) for entry in noted["candidates"]]
        candidates = tuple(replace(each, spread=Spread(each.spread)) for each in read)
        hash(candidates)  # one that holds anything but numbers and words has none
        recipe = None if noted["recipe"] is None else Recipe(*noted["recipe"])
        (chosen,) = (each for each in candidates if each.is_chosen)
    except (KeyError, TypeError, ValueError):
        return None
    serial = plan_serial(graph)
    if recipe is None:
        candidate = _assess(serial, costs)
    elif recipe in _recipes(graph, scheduling):
        candidate = _propose_by(recipe, graph, costs, scheduling, scheduling.budget_bytes(serial))
        candidate = replace(candidate, plan=replace(candidate.plan, spread=chosen.spread))
    else:
        return None
    fits = not exactly or candidate.describe() == replace(chosen, measured_ns=None, outcome="")
    return (candidate, candidates) if fits else None
