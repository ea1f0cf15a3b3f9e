"""Both ways of a branch on a tensor's value, each traced, become one graph."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import fx

from millstream.capture.effects.expressions import Ask, computes_the_same
from millstream.capture.effects.host_effects import Way
from millstream.capture.trace.branches.value_branches import (
    Ways,
    are_effects_alike,
    check_alike,
    join_effects,
    join_gradients,
)
from millstream.capture.trace.numbers.questions import Questions
from millstream.capture.trace.outcome.traced_tensors import Leaving
from millstream.capture.trace.per_call.draws import are_alike
from millstream.capture.trace.recorded_effects.effect_recorder import EffectRecorder, text_changed
from millstream.capture.trace.request import Request
from millstream.passes.selecting import DifferentWays, merge_ways, results_of, set_results


class TracedWay(Protocol):
    """What there is of one way, besides its graph.

    Attributes:
        request: What was traced.
        ways: The branches that it has met.
        questions: What it asks of the step's numbers.
        recorder: Its effects.
        leaving: What it returns and leaves.
        exchanges: With other processes.
        unsettled: Why it cannot be captured, known only at the end.
        num_results: Of its graph; values of branches come after them.
        has_text: Whether other ways that it contains have text with values in it.
        looked_at: Tensors that were looked at, by id.
        asked: Those whose gradients were.
        wrapper_reads: Of modules that others wrap.
        stepped: Optimizers.
    """

    request: Request
    ways: Ways
    questions: Questions
    recorder: EffectRecorder
    leaving: Leaving
    exchanges: list[Any]
    unsettled: Exception | None
    num_results: int
    has_text: bool
    looked_at: set[int]
    asked: set[int]
    wrapper_reads: dict[Any, Any]
    stepped: list[Any]


SomeWay = TypeVar("SomeWay", bound=TracedWay)


def merge(
    one: SomeWay, gm: fx.GraphModule, other: SomeWay, its: fx.GraphModule, number: int
) -> tuple[SomeWay, fx.GraphModule]:
    """Have one graph for both ways of a branch.

    Args:
        one: The way that was traced first.
        gm: Its graph.
        other: The other way.
        its: The graph of that.
        number: Of the branch, among those of the step.

    Returns:
        What there is of both, which is the way that reads more numbers, and the graph.

    Raises:
        DifferentWays: They cannot be one graph; says in a few words why not.
    """
    if len(other.questions.inputs) > len(one.questions.inputs):
        return merge(other, its, one, gm, number)
    if other.unsettled is not None:
        raise other.unsettled
    if len(other.ways.values) <= number:  # something decides that is not in the graph
        raise DifferentWays("are not the same up to there")
    if one.exchanges or other.exchanges:
        raise DifferentWays("communicate with other processes")
    inputs = zip(one.questions.inputs, other.questions.inputs, strict=False)  # the other way may read fewer
    if not all(computes_the_same(one.of, two.of) for one, two in inputs):
        raise DifferentWays("read different numbers")
    draws, others = one.questions.draws, other.questions.draws
    if len(draws) != len(others) or not all(map(are_alike, draws, others)):
        raise DifferentWays("draw different random numbers")
    check_alike(one.leaving, other.leaving)
    is_alike = are_effects_alike(one.recorder, other.recorder)
    num_both = one.num_results if is_alike else one.leaving.num_tensors
    results, others = map(results_of, (gm, its))
    for each, tracer, all_results in ((gm, one, results), (its, other, others)):
        values = all_results[tracer.num_results :][: number + 1]
        set_results(each, [*all_results[:num_both], *values])
    outcome = one.ways.taken[number]
    own = merge_ways(gm, its, _inputs_of_both(len(one.request.arguments), gm, its), num_both + number, outcome=outcome)
    *both, value = results_of(gm)
    kept = [*both[:num_both], *results[num_both : one.num_results]]
    way = Way(one.num_results, outcome)
    dropped = join_gradients(one.leaving, other.leaving, way, one.ways.lines[number])
    if not is_alike:
        num_items = sum(kept[stack].meta["val"].shape[0] for stack in one.leaving.effects.stacks)
        _join_effects(one, other, way, number, num_items)
    if dropped or not is_alike:
        kept += (value, *(own[each] for each in others[num_both : other.num_results]))
    one.recorder.program += dropped
    one.num_results = len(kept)
    set_results(gm, [*kept, *both[num_both:]])
    _join_questions(one, other)
    lines = (one.ways.lines[number], *one.leaving.effects.branches, *other.leaving.effects.branches)
    one.leaving.effects.branches = [*dict.fromkeys(lines)]
    return one, gm


def _inputs_of_both(num_last: int, gm: fx.GraphModule, its: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each input of the other way's graph that of this one's, which may read more numbers."""
    mine, others = (each.graph.find_nodes(op="placeholder") for each in (gm, its))
    first, last = others[: len(others) - num_last], others[len(others) - num_last :]
    return {**dict(zip(first, mine, strict=False)), **dict(zip(last, mine[len(mine) - num_last :], strict=True))}


def _join_effects(one: TracedWay, other: TracedWay, way: Way, number: int, num_items: int) -> None:
    if (where := other.questions.texts.unshown()) is not None:
        raise text_changed(where)
    num_before = one.ways.num_effects[number]
    shift = one.num_results + 1 - other.leaving.num_tensors
    join_effects(one.leaving, other.leaving, num_before, way, num_items, shift)
    one.leaving.effects.waits = sorted({*one.leaving.effects.waits, one.ways.lines[number]})
    one.recorder.outline = [one.recorder.outline, other.recorder.outline]


def _join_questions(one: TracedWay, other: TracedWay) -> None:
    """The graph depends on what either way has asked and used."""
    for step in other.questions.steps:
        if isinstance(step, Ask):
            one.questions.add(step)
    one.has_text |= other.has_text or bool(other.questions.texts.made)
    one.looked_at |= other.looked_at
    one.asked |= other.asked
    one.wrapper_reads |= other.wrapper_reads
    one.stepped += [each for each in other.stepped if each not in one.stepped]
