"""A step's function run as it is: in first calls, while a graph is compiled elsewhere, and where it falls back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from millstream._torch.autograd.hooks import OwnHook
from millstream._torch.distributed.wrappers import is_distributed_run
from millstream.capture.guards import native
from millstream.capture.record.interpreter.instructions import begin_early
from millstream.capture.state.discover import Found
from millstream.capture.step.calls import Calls, StepCall
from millstream.capture.step.plain.plain_results import OwnTensors, detached
from millstream.data_parallel.reduced_run import ReducedRun, adopt_sharded
from millstream.data_parallel.reducer import Reducer
from millstream.lower import ask_early

MAX_UNREADY = 20
"""Calls that may run eagerly while an optimizer has no state: a GradScaler skips steps until it finds its scale."""


class PlainRuns:
    """Runs the function of a step, and keeps what such runs show.

    Args:
        calls: Of the step.
        replicate: Has several processes train what was found, before the first run; ``None`` for one process.
        is_part: Whether the function is a part of a step, whose results are its locals and left as they are.

    Attributes:
        replica: Reduces all gradients between processes, once there is one.
        has_run: Whether the function has run to make the state that a capture needs.
        num_unready: How often it has.
    """

    def __init__(self, calls: Calls, replicate: Callable[[Found], Reducer] | None, *, is_part: bool = False) -> None:
        self.replica: Reducer | None = None
        self._replicate = replicate
        self._is_part = is_part
        self.begin(calls)

    def begin(self, calls: Calls) -> None:
        """Forget what runs have shown, but for processes, which stay joined."""
        self._calls = calls
        self._own = OwnTensors()
        self._stepped: dict[int, Optimizer] = {}
        self.has_run = False
        self.num_unready = 0

    def is_unready(self, found: Found, *, is_trial: bool) -> bool:
        """Whether an eager call must come first, to create what only an eager call can create.

        In a trial optimizers have what state they take, which may be none.
        """
        if self._replicate is not None and self.replica is None:
            return True
        lazy = (is_lazy(each) for _, module in found.modules for each in (*module.parameters(), *module.buffers()))
        if not self.has_run and any(lazy):  # later, the trace tells whether the step uses one
            return True
        if any(scaler._scale is None for _, scaler in found.scalers):
            return True
        if is_trial:
            return False
        empty = [optimizer for _, optimizer in found.optimizers if not optimizer.state]
        if not self.has_run:
            return bool(empty)
        is_scaled = bool(found.scalers) and self.num_unready < MAX_UNREADY
        return is_scaled and any(id(optimizer) not in self._stepped for optimizer in empty)

    def run_watching(self, call: StepCall) -> Any:
        """Run, and note which optimizers step."""
        self.has_run = True
        self.num_unready += 1
        begin_early()  # for the call that captures, before which this one comes
        native.begin_early(call.arguments)
        ask_early(call.arguments)

        def note(optimizer: Optimizer, *_: Any) -> None:
            self._stepped[id(optimizer)] = optimizer

        with contextlib.ExitStack() as hooks:
            for optimizer in call.optimizers():  # one for all would be seen by other threads
                hooks.callback(optimizer.register_step_post_hook(OwnHook(note)).remove)
            return self.run_call(call)

    def run_call(self, call: StepCall) -> Any:
        """Run for a call."""
        return self.run(call.args, call.kwargs, call.arguments)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Sequence[Tensor]) -> Any:
        """Run the user's function as it is, but for gradients of DDP models, which all runs reduce alike.

        Args:
            args: Of the call.
            kwargs: Likewise.
            arguments: Tensors among both.
        """
        if self._replicate is not None and self.replica is None:
            found = self._calls.make(args, kwargs).search()
            self.replica = self._replicate(found)
            adopt_sharded(module for _, module in found.modules)

        is_open = not all(argument.is_leaf for argument in arguments)  # gradients are to reach beyond the step
        if is_distributed_run():
            with ReducedRun(self.replica, lambda: self._calls.make(args, kwargs).optimizers()).active():
                result = self._calls.function(*args, **kwargs)
        else:
            result = self._calls.function(*args, **kwargs)
        return result if is_open else self.result_of(result, args, kwargs)

    def result_of(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an eager call gives to the caller."""
        if self._is_part:
            return result

        def own() -> set[int]:
            call = self._calls.make(args, kwargs)
            return self._own.ids(call.arguments, call.search)

        return detached(result, own)
