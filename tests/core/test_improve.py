"""Which alternatives a program gets, decided by a pretended clock."""

import json

import pytest

from millstream.schedule.choose import at_once
from millstream.schedule.improve import (
    KEPT,
    MOST_TRIALS,
    NOTHING,
    SLOWER,
    USUAL,
    Offer,
    from_json,
    improve_stepwise,
    is_faster,
    to_json,
)


class Clock:
    """A program whose time is what is usual, plus what each alternative adds; timed choices are written down."""

    def __init__(self, added, usual_ns=1000, noise=(0, 0, 0, 0, 0, 0)):
        self.added, self.usual_ns, self.noise, self.timed = added, usual_ns, noise, []

    def compare(self, choice, best):
        self.timed.append(choice)
        failed = [self.added[each] for each in choice if isinstance(self.added[each], str)]
        if failed:
            return failed[0]
        own, usual = (self.usual_ns + sum(self.added[each] for each in chosen) for chosen in (choice, best))
        return [(own + noise, usual) for noise in self.noise]


def decide(offers, **clock):
    trial = Clock(**clock)
    return (*at_once(improve_stepwise(offers, trial)), trial)


A, B, C = Offer("wide", "a", 3, 9.0), Offer("wide", "b", 1, 1.0), Offer("long", "c")


@pytest.mark.parametrize(
    ("added", "outcome", "chosen"),
    [(-100, KEPT, {("long", "c")}), (100, SLOWER, set()), (0, SLOWER, set()), ("failed: x", "failed: x", set())],
)
def test_it_is_kept_where_the_whole_is_faster(added, outcome, chosen):
    choice, tried, _ = decide([C], added={("long", "c"): added})
    assert choice == chosen
    assert [each.outcome for each in tried] == [outcome]


def test_a_gain_within_the_noise_is_none():
    noisy = decide([C], added={("long", "c"): -30}, noise=(-200, 0, 0, 0, 60, 60))
    assert noisy[0] == NOTHING
    assert decide([C], added={("long", "c"): -30})[0] != NOTHING


def test_a_site_has_one_alternative():
    first, other, free = Offer("first", "a", is_alone=True), Offer("other", "a", is_alone=True), Offer("free", "a")
    added = {("first", "a"): -50, ("other", "a"): -90, ("free", "a"): -50}
    assert decide([first, other, free], added=added)[0] == {("first", "a"), ("free", "a")}
    added["first", "a"] = 50
    assert decide([first, other, free], added=added)[0] == {("other", "a"), ("free", "a")}


def test_groups_of_sites_are_tried_alone_where_all_lose():
    choice, tried, trial = decide([B, A, C], added={("wide", "a"): -50, ("wide", "b"): 200, ("long", "c"): -50})
    assert choice == {("wide", "a"), ("long", "c")}
    assert [(each.groups, each.sites, each.outcome) for each in tried] == [
        (("a", "b"), 4, SLOWER), (("a",), 3, KEPT), (("b",), 1, SLOWER), (("c",), 1, KEPT)
    ]  # fmt: skip
    assert (tried[-1].usual_ns, tried[-1].own_ns) == (950, 900)  # beside what was kept before
    assert trial.timed[-1] == choice  # once more, against the usual kernels


def test_all_sites_together_are_enough():
    _, tried, trial = decide([A, B], added={("wide", "a"): -50, ("wide", "b"): 10})
    assert [each.groups for each in tried] == [("a", "b")]
    assert len(trial.timed) == 2


def test_what_is_no_faster_at_last_is_given_up():
    trial = Clock({})
    answers = iter([[(900, 1000)] * 5, [(1000, 1000)] * 5])
    trial.compare = lambda choice, best: next(answers)
    choice, tried = at_once(improve_stepwise([C], trial))
    assert (choice, tried[0].outcome) == (NOTHING, USUAL)


def test_trials_are_bounded():
    offers = [Offer(f"way {number}", "a") for number in range(3 * MOST_TRIALS)]
    _, tried, trial = decide(offers, added={(each.alternative, "a"): 5 for each in offers})
    assert len(tried) == len(trial.timed) == MOST_TRIALS


def test_one_sample_says_nothing():
    assert not is_faster([(1, 1000)])


def test_a_choice_is_read_as_it_was_written():
    choice, tried, _ = decide([A, C], added={("wide", "a"): -50, ("long", "c"): 7})
    assert from_json(json.loads(json.dumps(to_json(choice, tried)))) == (choice, tried)
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json({"choice": [["a"]], "tried": []})
