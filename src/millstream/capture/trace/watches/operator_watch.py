"""The operator mode: sees the aten operators that calls become, backward included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.autograd.checkpointing import RandomRecords
from millstream._torch.compiler.node_notes import current_stream_hint, note_stream_hint
from millstream._torch.dispatcher import is_expanded_later
from millstream._torch.seeded_randoms import DRAW
from millstream._torch.tensors import FakeTensor, asks_device, device_of_fake, is_real, is_unknown
from millstream._torch.tracing import (
    VALUE_NEEDED,
    graph_being_traced,
    is_higher_order,
    next_sequence_number,
    root_being_traced,
    running_sequence_number,
)
from millstream.capture.lines import (
    describe,
    here,
    module_path,
    raise_refusal,
    user_frames,
)
from millstream.capture.record.interpreter.instructions import unseen
from millstream.capture.trace.numbers.known_values import LIFTS
from millstream.capture.trace.twins import Twins
from millstream.capture.trace.watches.asked_values import READ_REMEDY, VALUE_READERS
from millstream.capture.trace.watches.flows import FLOWS, why_not_a_body
from millstream.capture.trace.watches.function_watch import FunctionWatch
from millstream.capture.trace.watches.given_tensors import ForeignTensor, leaves_in, tensors_in
from millstream.capture.trace.watches.replaced_operators import REPLACEMENTS, check_targets
from millstream.capture.trace.watches.uniform_draws import UniformDraws

aten = torch.ops.aten

SHAPE_REMEDY = (
    "Use torch.where or a mask that multiplies, so that shapes do not depend on values; of a mask that stays the same,"
    " take the positions outside of the step: mask.nonzero(as_tuple=True)."
)


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices tensors that were not lifted, notes source lines, and reuses random results in recomputation.

    Args:
        refuse: Told of each refusal, because the user's function may swallow the exception.
        twins: Those of the user's tensors.
        functions: The function mode in force, for the names of what users call.
        randoms: Random results of checkpointed regions.
        write_numbers_down: Has the graph depend on the user's numbers as they are.
        check_switches: Called with each operator and its arguments; may raise an error there.
        choose: Gives the outcome of a branch on a tensor's value, with which the trace goes on; ``None`` where there is
            none.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether PyTorch is to switch Dynamo off at each operator. It is off as long as a step is traced."""
        return False

    def __init__(
        self,
        refuse: Callable[[Exception], None],
        twins: Twins,
        functions: FunctionWatch,
        randoms: RandomRecords,
        write_numbers_down: Callable[[], None],
        check_switches: Callable[[Any, Sequence[Any]], None],
        choose: Callable[[Tensor], bool | None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse
        self._check_switches = check_switches
        self._choose = choose
        self._write_numbers_down = write_numbers_down
        self._functions = functions
        self._randoms = randoms
        self._graph = graph_being_traced()
        self._uniform = UniformDraws()
        self._twins = twins
        self._forward_lines: dict[int, tuple[str, str | None, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is asks_device and isinstance(args[0], FakeTensor):
            return device_of_fake(args[0])
        # Most of the Python that tracing runs is PyTorch's within an operator. Operators and tensor subclasses of the
        # user's may lead to their code.
        if getattr(func, "namespace", "") in _PYTORCHS and all(map(issubclass, types, repeat(FakeTensor))):
            # Itself, as in its place there is another: what the operator consists of is none of the function mode's.
            with DisableTorchFunction():
                return unseen(self._dispatch, func, args, kwargs or {})
        if is_expanded_later(func):  # its Python is called once more, and reads numbers as they are then
            self._write_numbers_down()
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_targets(func, args)
        self._check_switches(func, args)
        if func not in LIFTS:
            args, kwargs = self._fakes_in(args, kwargs)
        self._check_captured(func, args)
        last = next(iter(reversed(self._graph.nodes)))
        try:
            replacement = REPLACEMENTS.get(func)
            if replacement is not None:
                return replacement(*args, **kwargs)
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or func is DRAW:
                result = self._run_random(func, args, kwargs)
            elif (known := self._functions.values.computed(func, args, kwargs)) is not NotImplemented:
                return known
            elif (outcome := self._outcome(func, args)) is not None:
                return outcome
            else:
                result = func(*args, **kwargs)
            return self._followed(func, args, kwargs, result)
        except VALUE_NEEDED:
            self._fail_at(func)
        finally:
            self._note_line(last)
            if is_higher_order(func):
                self._check_bodies(func, last)

    def _check_captured(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse operators that are no part of a graph."""
        if getattr(func, "overloadpacket", None) is aten.set_:
            self._functions.fail_at_memory("set_")
        if getattr(func, "namespace", "") in _COLLECTIVES:
            self._fail(
                f"The step calls the collective {func.__name__}, which is not captured.",
                "Captured are torch.distributed.all_reduce and broadcast, by these names.",
            )
        if is_higher_order(func) and func.name() == "while_loop_stack_output":
            self._fail(
                "The step asks for gradients of a while_loop, which are as many as it turns.",
                "Use scan, whose length is known.",
            )
        devices = _devices_of(args) if is_higher_order(func) and func.name() in FLOWS else []
        if len(devices) > 1:
            self._fail(
                f"The step gives {func.name()} tensors on {' and '.join(devices)}.",
                "Make all of them on one device, its counters too.",
            )
        may_decide = all(device.startswith(("cpu", "cuda")) for device in devices)
        if is_higher_order(func) and func.name() not in (_HIGHER_ORDER | FLOWS if may_decide else _HIGHER_ORDER):
            self._fail(
                f"The step uses the higher-order operator {func.name()}, which is not captured.",
                "Use torch.where, or write out what it does.",
            )

    def _followed(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result of an operator, noted where its values are known."""
        self._uniform.see(operator, args, result, self._graph)
        if not self._functions.flows.is_inside:
            self._functions.values.see(operator, args, kwargs, result)
        return result

    def _check_bodies(self, operator: Any, last: fx.Node) -> None:
        """Refuse functions that are no part of the graph."""
        for node in reversed(self._graph.nodes):
            if node is last:
                return
            in_backward = running_sequence_number() is not None
            if node.target is operator and (why := why_not_a_body(node, root_being_traced(), in_backward=in_backward)):
                self._fail(
                    f"Functions that {operator.name()} is given {why}.",
                    "Draw random numbers before it, and pass it all that they use.",
                )

    def _outcome(self, operator: Any, args: tuple[Any, ...]) -> bool | None:
        """With which value the trace goes on, where the program asks a tensor for one; ``None`` where there is none."""
        if operator is not aten._local_scalar_dense.default:
            return None
        outcome = self._uniform.outcome(args[0])
        if outcome is None and self._functions.calling == "__bool__" and is_unknown(args[0]):
            outcome = self._choose(args[0])
        return outcome

    def _fakes_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An operator's arguments: with twins of the user's tensors, where it was called past the function mode."""
        real = [tensor for tensor in tensors_in(leaves_in((*args, *kwargs.values()))) if is_real(tensor)]
        for tensor in real:
            if not self._twins.holds(tensor):
                foreign = ForeignTensor(tensor, here())
                self._refuse(foreign)
                raise foreign
            # Autograd has seen the tensor and not its twin, which may have been given a gradient meanwhile.
            if torch.is_grad_enabled() and (tensor.requires_grad or self._twins.fake(tensor).requires_grad):
                self._fail(
                    "The step calls a function that no mode sees with a tensor that requires a gradient.",
                    "Pass it x.view_as(x) instead.",
                )
        return self._twins.given(args, kwargs) if real else (args, kwargs)

    def _run_random(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("generator") is not None:
            self._fail(
                "The step draws random numbers from a generator of its own.",
                "Use the default generator, seeded by torch.manual_seed.",
            )
        return self._randoms.run(operator, args, kwargs)

    def _fail_at(self, operator: Any) -> NoReturn:
        """Refuse an operator that needs a value."""
        reason = VALUE_READERS.get(self._functions.calling)
        self._functions.asked_values.note_conversion(self._functions.calling)
        if operator in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            self._fail(reason or "The step reads a tensor's value.", READ_REMEDY)
        name = self._functions.calling or operator.__name__
        self._fail(f"The shape of a result depends on values ({name}: {operator}).", SHAPE_REMEDY)

    def _fail(self, reason: str, remedy: str) -> NoReturn:
        raise_refusal(self._refuse, reason, remedy)

    def _note_line(self, last: fx.Node) -> None:
        """Give the nodes after ``last`` the user's line; nodes of backward get that of their forward."""
        node = next(iter(reversed(self._graph.nodes)))
        if node is last:
            return
        sequence = running_sequence_number()
        if sequence is None:
            text, hint, module = describe(user_frames()), current_stream_hint(), module_path()
            self._forward_lines[next_sequence_number() - 1] = text, hint, module
        else:
            text, hint, module = self._forward_lines.get(sequence) or (describe(user_frames()), None, "")
        while node is not last:
            node.meta["stack_trace"] = text
            if module:
                node.meta["nn_module_stack"] = {module: (module, torch.nn.Module)}  # what FX keeps, by that name
            if hint is not None:
                note_stream_hint(node, hint)
            node.meta["in_backward"] = sequence is not None
            node = node.prev


def _devices_of(args: tuple[Any, ...]) -> list[str]:
    """Return where the operands of an operator are."""
    return sorted({str(each.device) for each in tensors_in(leaves_in(args))})


_PYTORCHS = frozenset({"aten", "prims"})
"""Namespaces of operators that PyTorch alone implements."""

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of operators between processes."""

_HIGHER_ORDER = frozenset({"flex_attention", "flex_attention_backward"})
"""Operators with functions for arguments that TorchInductor compiles within a graph."""
