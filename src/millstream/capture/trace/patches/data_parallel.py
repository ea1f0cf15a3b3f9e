"""DDP models in a step that is traced: their reductions become nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from millstream._torch.data_parallel import why_not_ours
from millstream.capture.lines import here
from millstream.capture.step.request import FoundLate, StateMissing
from millstream.errors import CaptureError
from millstream.parallel.reducer import Reducer
from millstream.parallel.session import Session, reducer_known


class TracedSession(Session):
    """A run on fake tensors.

    What processes have to agree on they agree on in an eager run, which all of them begin with: a trace waits for
    nobody, and may be repeated.

    Args:
        modules: Those whose tensors are fake.
        report: Raises what it is given, and remembers it.
    """

    def __init__(self, modules: Callable[[], list[nn.Module]], report: Callable[[Exception], NoReturn]) -> None:
        super().__init__()
        self._modules, self._report = modules, report

    def reducer_of(self, wrapper: DistributedDataParallel) -> Reducer:
        """The reducer that an eager run has made."""
        if not any(wrapper is module for root in self._modules() for module in root.modules()):
            self._report(FoundLate(type(wrapper).__name__, wrapper, here()))
        if (obstacle := why_not_ours(wrapper)) != "":
            self._report(uses_own_reducer(type(wrapper.module).__name__, obstacle))
        reducer = reducer_known(wrapper)
        if reducer is None or (reducer.settings.is_static and reducer.notes_use):
            self._report(StateMissing(f"{type(wrapper).__name__}'s buckets"))
        return reducer

    def used_by_all(self, reducer: Reducer, used: list[bool]) -> frozenset[int]:
        """What is known for good; where it is not, this process has to use all parameters."""
        if not reducer.notes_use:
            return reducer.unused or frozenset()
        if not all(used):
            name = reducer.names[used.index(False)]
            self._report(
                CaptureError(
                    f"{name} of {reducer.name} gets no gradient, and find_unused_parameters=True lets each step decide "
                    "anew which processes use it.",
                    where=here(),
                    remedy="Give DistributedDataParallel static_graph=True if it is the same in every step.",
                )
            )
        reducer.exchange_use(used, self._count(reducer, "use"))
        return frozenset()


def uses_own_reducer(name: Any, obstacle: str) -> CaptureError:
    """A wrapper is not reduced in our way, in no process."""
    return CaptureError(
        f"{name} is in a DistributedDataParallel with {obstacle}, which is not captured.",
        remedy="Compile the model instead, ms.compile(model), and leave the step to Python.",
    )
