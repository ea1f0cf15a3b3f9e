"""Choose a program's alternatives to the usual kernels: tried in the whole program, one after another.

Whoever can lower and run programs brings a ``Comparison``; here it is decided what is tried, and what is kept.

**Contract**
- The usual kernels are kept unless an alternative makes the whole program faster by more than the noise: ties are
  theirs.
- What is kept in the end is timed once more against the usual kernels, and given up where it is no faster.
- Nothing is tried twice, and at most ``MOST_TRIALS`` choices are.
- Where sites can have one alternative only, no other one is tried there once it is kept.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol

MOST_TRIALS = 16
MOST_ALONE = 3  # groups of sites of one alternative that are tried by themselves: those with most to gain
MARGIN = 0.01  # by so much a program must be faster: below it, nobody would notice
KEPT, SLOWER, USUAL = "kept", "not faster", "faster by itself, but not at last"

Choice = frozenset[tuple[str, str]]
"""Alternatives that a program has, each with the group of sites where it has it."""
NOTHING: Choice = frozenset()


class Offer(NamedTuple):
    """An alternative that can be had at some equal sites of a program.

    Attributes:
        alternative: Its name.
        group: What the sites have in common: operator, sizes and dtype.
        sites: How many they are.
        weight: What they take of the program's time, in any unit.
        is_alone: Whether there is no other alternative at a site that has this one.
    """

    alternative: str
    group: str
    sites: int = 1
    weight: float = 1.0
    is_alone: bool = False


@dataclass(frozen=True)
class Tried:
    """The outcome of an alternative.

    Attributes:
        alternative: Its name.
        groups: Where it was tried.
        sites: How many those are.
        usual_ns: Time of the program without it, or ``None`` where it never ran.
        own_ns: Time with it.
        outcome: Whether it was kept, or why not.
    """

    alternative: str
    groups: tuple[str, ...]
    sites: int
    usual_ns: int | None
    own_ns: int | None
    outcome: str


class Comparison(Protocol):
    """Runs a program with some alternatives, and with others, on the device."""

    def compare(self, choice: Choice, best: Choice) -> Sequence[tuple[int, int]] | str:
        """Time both in turn, each pair in ns, or say why the first is none to be chosen."""
        ...


def is_faster(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether the first of each pair is less by the margin in three of four pairs, and so by more than the noise."""
    ratios = [own / usual for own, usual in pairs]
    return len(ratios) > 1 and quantiles(ratios, n=4)[2] < 1 - MARGIN


def improve_stepwise(
    offers: Iterable[Offer], trial: Comparison
) -> Generator[None, None, tuple[Choice, tuple[Tried, ...]]]:
    """Try alternatives, each beside those kept before it.

    An alternative is tried at all its sites first; where that is not faster, at the groups with the largest weight
    alone.

    Args:
        offers: Those of one alternative stand together, in the order in which they are tried.
        trial: Times a choice.

    Yields:
        Before each trial.
    """
    best, told, num_tried = NOTHING, list[Tried](), 0
    for _, same in groupby(offers, lambda offer: offer.alternative):
        taken = {group for _, group in best}
        free = (offer for offer in same if not (offer.is_alone and offer.group in taken))
        group = sorted(free, key=lambda offer: -offer.weight)
        if not group:
            continue
        for tried in (group, *([each] for each in group[: MOST_ALONE if len(group) > 1 else 0])):
            if num_tried == MOST_TRIALS:
                break
            num_tried += 1
            yield
            choice = best | {(offer.alternative, offer.group) for offer in tried}
            told.append(_tell(tried, trial.compare(choice, best)))
            if told[-1].outcome == KEPT:
                best = choice
                if tried is group:
                    break
    if best:
        yield
        pairs = trial.compare(best, NOTHING)
        if isinstance(pairs, str) or not is_faster(pairs):
            best = NOTHING
            told = [replace(each, outcome=USUAL if each.outcome == KEPT else each.outcome) for each in told]
    return best, tuple(told)


def _tell(offers: Sequence[Offer], found: Sequence[tuple[int, int]] | str) -> Tried:
    name, groups = offers[0].alternative, tuple(offer.group for offer in offers)
    sites = sum(offer.sites for offer in offers)
    if isinstance(found, str):
        return Tried(name, groups, sites, None, None, found)
    own_ns, usual_ns = (round(median(times)) for times in zip(*found, strict=True))
    return Tried(name, groups, sites, usual_ns, own_ns, KEPT if is_faster(found) else SLOWER)


def to_json(choice: Choice, tried: Sequence[Tried]) -> dict[str, Any]:
    """Turn what was chosen, and what from, into plain data."""
    return {"choice": sorted(choice), "tried": [asdict(each) for each in tried]}


def from_json(noted: Mapping[str, Any]) -> tuple[Choice, tuple[Tried, ...]]:
    """Read what ``to_json`` has made.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    choice = frozenset((str(name), str(group)) for name, group in noted["choice"])
    tried = (Tried(**each) for each in noted["tried"])
    return choice, tuple(replace(each, groups=tuple(each.groups)) for each in tried)
