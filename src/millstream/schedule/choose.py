"""Choose the plan that runs, on a GPU or a CPU: make and simulate candidates, and time the promising ones.

Whoever can run plans brings a ``Trial``; here it is decided what is tried, and what wins.

**Contract**
- The plan on one stream is always a candidate, and wins a tie: one with several must be faster by a margin.
- A plan that needs more memory than the budget is no candidate.
- What is tried is checked before.
- The same costs give the same candidates: what was chosen can be noted, and made again in another process.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar

from millstream.check import check_plan
from millstream.cost import Costs
from millstream.graph import CHOSEN, Candidate, KernelGraph, Plan, Spread, Wait
from millstream.progress import count
from millstream.schedule.memory.lifetimes import peak_bytes
from millstream.schedule.policies import plan_graph
from millstream.schedule.ranking import critical_path_ns
from millstream.schedule.scheduling import Scheduling
from millstream.schedule.serial import plan_serial
from millstream.simulate import simulate

STREAM_COUNTS = (8, 6, 4, 3, 2)
TRIED_POLICIES = ("list", "slack", "chains")  # the first with all variants, the others with the first one
#: What a wait is taken to cost, as a factor, and whether memory is packed: what is right differs from graph to graph.
VARIANTS = ((1.0, True), (1.0, False), (4.0, True))
HOPEFUL = 1.15  # candidates predicted within this factor of the best one are timed
MOST_TRIALS = 12
HOST_GRANULE_BYTES = 64 << 20  # of memory: so much more never counts as too much, unless a budget is given in bytes


@dataclass(frozen=True)
class Rules:
    """The rules by which a plan with several streams is tried and wins on a kind of device.

    Attributes:
        slack: Where the longest chain of kernels leaves less of the time on one stream, nothing is planned.
        promise: By so much it must be faster in the simulator to be tried.
        margin: By so much it must be faster in fact: below it the difference is noise.
    """

    slack: float
    promise: float
    margin: float

    def leaves_nothing_to_gain(self, graph: KernelGraph, costs: Costs, serial_ns: int) -> bool:
        """Return whether the longest chain of kernels takes nearly all of the time on one stream."""
        return critical_path_ns(graph, costs) > (1 - self.slack) * serial_ns


ON_GPU = Rules(slack=0.01, promise=0.0, margin=0.01)
ON_CPU = Rules(slack=0.10, promise=0.10, margin=0.03)  # its machine does other things, too


class PlanRecipe(NamedTuple):
    """The parameters that a plan is made with.

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
    recipe: PlanRecipe | None = None

    def is_promising(self, serial: CandidatePlan, rules: Rules) -> bool:
        """Return whether it is predicted to be as much faster than one stream as it takes to be tried."""
        return self.predicted_ns <= (1 - rules.promise) * serial.predicted_ns

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
    candidate_plans = [assess(serial, costs)]
    by_hand = scheduling.policy == "manual"
    if scheduling.serial or (not by_hand and ON_GPU.leaves_nothing_to_gain(graph, costs, costs.total_ns)):
        return candidate_plans
    seen = {serial.steps}
    for recipe in _recipes(graph, scheduling):
        candidate = _propose_by(recipe, graph, costs, scheduling, budget)
        if candidate.plan.num_streams > 1 and candidate.plan.steps not in seen:
            seen.add(candidate.plan.steps)
            candidate_plans.append(candidate)
    return [candidate_plans[0], *sorted(candidate_plans[1:], key=lambda candidate: candidate.predicted_ns)]


def propose_threads(
    serial: Plan, serial_ns: int, costs: Costs, scheduling: Scheduling, num_streams: int
) -> list[CandidatePlan]:
    """Make the candidates for a CPU: the serial plan, then the one on so many streams, if it has several.

    Args:
        serial: The plan on one stream.
        serial_ns: What its kernels took with all intra-op threads.
        costs: Of kernels as they run on a stream.
        scheduling: What the user asks of the schedule.
        num_streams: How many there may be.
    """
    limits = {"memory_bytes": scheduling.budget_bytes(serial, HOST_GRANULE_BYTES), "packed": True}
    plan = plan_graph(serial.graph, costs, num_streams, scheduling.policy or "list", **limits)
    others = [assess(plan, costs)] if plan.num_streams > 1 else []
    return [CandidatePlan(serial, peak_bytes(serial), serial_ns), *others]


def _recipes(graph: KernelGraph, scheduling: Scheduling) -> list[PlanRecipe]:
    """The ways to make a plan with several streams that are considered."""
    counts = STREAM_COUNTS if scheduling.streams is None else (scheduling.streams,)
    policies = TRIED_POLICIES if scheduling.policy is None else (scheduling.policy,)
    if scheduling.policy is None and graph.has_hints:
        policies = (*policies, "manual")
    return [
        PlanRecipe(policy, num_streams, *variant)
        for variant, num_streams, policy in product(VARIANTS, counts, policies)
        if variant is VARIANTS[0] or policy == policies[0]
    ]


def _propose_by(
    recipe: PlanRecipe, graph: KernelGraph, costs: Costs, scheduling: Scheduling, budget: int
) -> CandidatePlan:
    fewer = scheduling.streams is not None  # else they are candidates themselves
    return replace(assess(plan_by(recipe, graph, costs, budget, fewer=fewer), costs), recipe=recipe)


def plan_by(recipe: PlanRecipe, graph: KernelGraph, costs: Costs, budget: int, *, fewer: bool = False) -> Plan:
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


def assess(plan: Plan, costs: Costs) -> CandidatePlan:
    """Simulate a plan."""
    return CandidatePlan(plan, peak_bytes(plan), simulate(plan, costs).end_ns)


class Trial(Protocol):
    """Runs plans on the device, to time them."""

    def compare(self, candidate: CandidatePlan, best: CandidatePlan) -> tuple[int, int] | str:
        """Time a plan and the best so far in turn, in ns, or say what came of it where it is none to be chosen."""
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


def take_predicted(candidate_plans: Sequence[CandidatePlan]) -> Found:
    """Take the plan with several streams that is best by prediction, where the user wants one."""
    best = candidate_plans[min(1, len(candidate_plans) - 1)]
    check_plan(best.plan)
    return best, tuple(each.describe(CHOSEN if each is best else "not asked for") for each in candidate_plans)


def choose(candidate_plans: Sequence[CandidatePlan], trial: Trial, seconds: float, rules: Rules = ON_GPU) -> Found:
    """Do what ``choose_stepwise`` does without a pause."""
    return at_once(choose_stepwise(candidate_plans, trial, seconds, rules))


def choose_stepwise(
    candidate_plans: Sequence[CandidatePlan], trial: Trial, seconds: float, rules: Rules = ON_GPU
) -> Generator[None, None, Found]:
    """Time the promising candidates and return the fastest, with what became of all of them.

    Each is timed in turn with the best so far, the first with one stream. (Not all with one stream: its graph may
    become a tenth slower in the middle of trials, so that later ones look better: docs/decisions/side-by-side.md.)
    Small kernels are kept apart in all of them; the fastest is tried in the other ways to spread kernels, too.

    Args:
        candidate_plans: As ``propose`` makes them.
        trial: Times one of them.
        seconds: After so long no further trial begins.
        rules: By what one is tried and wins.

    Yields:
        Before each trial.
    """
    serial, others = candidate_plans[0], candidate_plans[1:]
    best, best_share = serial, 1.0  # of the time on one stream
    serial_ns: int | None = None
    deadline = time.monotonic() + seconds
    num_tried, most = 0, min(len(others), MOST_TRIALS) + len(Spread) - 1

    def measure(candidate: CandidatePlan) -> int | str:
        nonlocal best, best_share, serial_ns, num_tried
        check_plan(candidate.plan)
        num_tried += 1
        count("trying plan", num_tried, most, "")
        times = trial.compare(candidate, best)
        if isinstance(times, str):
            return times
        own_ns, best_ns = times
        serial_ns = serial_ns or best_ns
        share = best_share * own_ns / best_ns
        if share < (best_share if best is not serial else 1 - rules.margin):
            best, best_share = candidate, share
        return round(share * serial_ns)

    told: dict[int, Candidate] = {}
    for index, candidate in enumerate(others):
        if candidate.predicted_ns > HOPEFUL * others[0].predicted_ns or not candidate.is_promising(serial, rules):
            told[index] = candidate.describe("predicted to be slower")
        elif index >= MOST_TRIALS or time.monotonic() > deadline:
            told[index] = candidate.describe("no time left to try it")
        else:
            yield
            found = measure(candidate)
            told[index] = candidate.describe(found) if isinstance(found, str) else candidate.describe("slower", found)
    tried = [*candidate_plans]
    candidates = [serial.describe("slower", serial_ns), *(told[index] for index in range(len(others)))]
    for other in _spread_otherwise(best):
        if time.monotonic() > deadline:
            break
        yield
        if not isinstance(found := measure(other), str):
            tried.append(other)
            candidates.append(other.describe("slower", found))
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
        recipe = None if noted["recipe"] is None else PlanRecipe(*noted["recipe"])
        (chosen,) = (each for each in candidates if each.is_chosen)
    except (KeyError, TypeError, ValueError):
        return None
    serial = plan_serial(graph)
    if recipe is None:
        candidate = assess(serial, costs)
    elif recipe in _recipes(graph, scheduling):
        candidate = _propose_by(recipe, graph, costs, scheduling, scheduling.budget_bytes(serial))
        candidate = replace(candidate, plan=replace(candidate.plan, spread=chosen.spread))
    else:
        return None
    fits = not exactly or candidate.describe() == replace(chosen, measured_ns=None, outcome="")
    return (candidate, candidates) if fits else None
