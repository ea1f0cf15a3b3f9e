"""Try on which communicator a step's collectives are captured, in all processes at once, as plans are.

The process group's own is always a candidate. Our own takes device memory as long as the group lives, by NCCL's
buffer sizes about 10 MiB for each thread block that it may take. So one that was tried in vain is closed at once.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.data_parallel.agreement import Agreement
from millstream.data_parallel.board import NotTogetherError
from millstream.data_parallel.communicators import AUTO, GROUP, OWN, Communicator, communicator_wanted, communicators_of
from millstream.data_parallel.exchange import Exchange
from millstream.engine.parallel.lockstep import WHAT, LockstepTrials, together
from millstream.schedule.choose import ON_GPU

TRIED = (None, 16, 8)
"""Most thread blocks (CTAs) of those that are tried; ``None``: as many as NCCL chooses, on an H100 up to 24. With fewer
a collective takes longer, which costs nothing where it is hidden, and leaves multiprocessors to other kernels."""


@dataclass(frozen=True)
class Settled:
    """The communicator that collectives are on from now on.

    Attributes:
        communicator: Our own, or ``None`` for the group's own.
        told: That and why, for people; empty where there was no choice.
    """

    communicator: Communicator | None
    told: str = ""

    @property
    def noted(self) -> dict[str, Any]:
        """As plain data, for another process of another run."""
        own = self.communicator
        return {"is_own": own is not None, "max_ctas": None if own is None else own.max_ctas}


def choose_communicator(
    agreement: Agreement,
    exchanges: Sequence[Exchange],
    trials: LockstepTrials[Communicator | None] | None,
    noted: Any = None,
) -> Settled:
    """Choose for the collectives of a step, in all processes at once, and use it from now on.

    Args:
        agreement: Of the processes.
        exchanges: The collectives; those of several groups stay where they are. What their own memory holds is lost.
        trials: Time the step on a communicator; ``None`` where nothing is timed.
        noted: What another run has chosen; the first process's counts.

    Raises:
        DataParallelError: A process is gone.
    """
    if len({id(each.group) for each in exchanges}) > 1:
        return Settled(None, "collectives on the process groups themselves, as there are several")
    group, device = exchanges[0].group, exchanges[0].memory.device
    known = communicators_of(group)
    wanted, noted = json.loads(agreement.board.share(json.dumps([communicator_wanted(), noted]).encode(), WHAT))
    candidates, is_given = _candidates(wanted, noted, is_timed=trials is not None)
    best, best_share, opened, times = None, 1.0, [], list[tuple[Communicator | None, float]]()
    for max_ctas in candidates:
        is_new = not known.is_open(max_ctas)
        try:
            own = together(agreement, lambda ctas=max_ctas: known.open(group, device, ctas))
            with known.on(own):
                together(agreement, lambda: _warm_up(exchanges))
        except NotTogetherError as error:  # what some processes have opened stays until the group ends
            known.current = None
            return Settled(None, f"collectives on the process group itself: {error}")
        if is_new:
            opened.append(max_ctas)
        if is_given:
            best = own
            break
        compared = None if trials is None else trials.time(own, best)
        if compared is None:
            break
        own_ns, best_ns = compared
        times = times or [(None, best_ns / 1e6)]
        share = best_share * own_ns / best_ns
        times.append((own, share * times[0][1]))
        if share < (best_share if best is not None else 1 - ON_GPU.margin):
            best, best_share = own, share
    if trials is not None and trials.ran:
        trials.forget()
        gc.collect()  # a graph that waits for that would have a communicator wait for it
    for max_ctas in opened:
        if best is None or max_ctas != best.max_ctas:
            known.close(group, max_ctas)
    known.current = best
    measured = ", ".join(f"{_name(each)} {ms:.3f} ms" for each, ms in times)
    told = f"collectives on {_name(best)}" + (f" ({measured})" if measured else "")
    return Settled(best, told if candidates else "")


def _candidates(wanted: str, noted: Any, *, is_timed: bool) -> tuple[tuple[int | None, ...], bool]:
    """Return what to open, and whether to take it without a trial."""
    if wanted == GROUP or (wanted == AUTO and not is_timed):
        return (), True
    if wanted == OWN:
        return (None,), True
    if wanted != AUTO:
        return (int(wanted),), True
    match noted:
        case {"is_own": False}:
            return (), True
        case {"is_own": True, "max_ctas": None | int() as max_ctas}:
            return (max_ctas,), True
    return TRIED, False


def _warm_up(exchanges: Sequence[Exchange]) -> None:
    """Do each kind of collective once: at first NCCL connects processes, which it had better not do in a capture."""
    done = set()
    for exchange in exchanges:
        key = exchange.memory.numel(), exchange.memory.dtype, exchange.operation
        if key not in done:
            done.add(key)
            exchange.held.make_ready()
            exchange.memory.zero_()
            exchange.perform(*exchange.memories)


def _name(communicator: Communicator | None) -> str:
    return "the process group itself" if communicator is None else str(communicator)
