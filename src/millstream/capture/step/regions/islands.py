"""Steps with eager regions: captured parts, and the user's Python between them.

**Contract**
- The parts of a step run in the order of its function, each once a call, regions as plain Python on true tensors.
- No gradient is lost: where a backward pass would cross the edge of a region the step runs as plain Python, with the
  reason, if a first call shows it; later it is an error.
- What leaves a part is what eager Python would have there: where objects or memory have two names, and a graph would
  give each name a copy, that part runs as plain Python.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream._torch.autograd.backward_hooks import backward_watched, reaches_before
from millstream._torch.autograd.hooks import hook_leaf
from millstream._torch.compiler.dynamo import is_compiling
from millstream._torch.dispatcher import is_differentiated_outside
from millstream._torch.tensors import storage_id
from millstream._torch.tracing import next_sequence_number
from millstream.capture.kept.elsewhere import Job
from millstream.capture.lines import here, raise_refusal
from millstream.capture.step.calls import StepCall
from millstream.capture.step.graph import StepGraph
from millstream.capture.step.regions.split import UNBOUND, FunctionPart, split_function
from millstream.capture.step.step import P, R, Step
from millstream.capture.trace.numbers.scalars import is_scalar, is_size
from millstream.capture.trace.recorded_effects.effect_recorder import recorder_of_thread
from millstream.data_parallel.reduced_run import ReducedRun
from millstream.errors import ArgumentError, CaptureError, EmptyCaptureError
from millstream.tree.containers import is_open_container, parts_of
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import SCALARS, Reference, tree_unflatten

_first = threading.local()

MAX_WATCHED = 8
"""Calls that run eagerly until one has come to the last region."""


class Region:
    """The context of ``ms.eager_region()``: nothing where no step is traced."""

    def __enter__(self) -> None:
        recorder = recorder_of_thread()
        if recorder is not None:
            refuse = recorder.questions.refused.append
            if not _has_source(sys._getframe(1)):
                raise_refusal(
                    refuse,
                    "The step comes to an eager_region, and its source, by which to split it, cannot be read.",
                    "Put the step into a file, or into a cell of a notebook.",
                )
            raise_refusal(
                refuse,
                "The step comes to an eager_region that is not a statement of its own in the function's body.",
                "Write `with ms.eager_region():` into the function that ms.step takes, within no other block.",
            )
        self._note_edge()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._note_edge()

    def _note_edge(self) -> None:
        for watched in getattr(_first, "calls", ()):
            watched.note_edge()


def _has_source(frame: FrameType) -> bool:
    """Whether the source of what runs can be had: not that of what was typed in, or made by ``exec``."""
    try:
        return bool(inspect.getsource(frame.f_code))
    except (OSError, TypeError):
        return False


def eager_region() -> Region:
    """Run part of a captured step as plain Python, between two captured parts: graph, Python, graph.

    ::

        @ms.step
        def train_step(x, y):
            loss = loss_fn(model(x), y)
            loss.backward()
            with ms.eager_region():
                norm = clip_by_history(model)  # reads values, branches, keeps lists: anything
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

    The body runs once a call, in its place, on true tensors; local variables, state, gradients and random numbers are
    what they are in eager Python. The statement stands in the body of the function that ``ms.step`` takes, within no
    other block. No backward pass may cross its edges: that is found in the first call, and then the whole step runs as
    plain Python. An error inside leaves the step there, as in eager Python: what came before is done.

    Elsewhere, and within another region, it does nothing.
    """
    return Region()


class _FirstCall:
    """An eager call that is watched for gradients that cross the edges of regions."""

    def __init__(self) -> None:
        self.num_edges = 0
        self.error: CaptureError | None = None
        self._edge = 0

    def note_edge(self) -> None:
        """A region begins or ends."""
        self.num_edges += 1
        self._edge = next_sequence_number()

    def on_backward(self, roots: Sequence[Any]) -> None:
        """A backward pass begins."""
        if self.num_edges and self.error is None and reaches_before(roots, self._edge):
            self.error = _crossing()

    @contextmanager
    def watching(self) -> Iterator[None]:
        calls = _first.__dict__.setdefault("calls", [])
        calls.append(self)
        try:
            with backward_watched(self.on_backward):
                yield
        finally:
            calls.remove(self)


class IslandStep(Step[P, R]):
    """A step whose function has eager regions: its parts are steps of their own.

    Args:
        function: The user's.
        parts: It, split.
        refused: What forbids to run it in parts, if anything.
        how: As for ``Step``.
    """

    def __init__(
        self, function: Callable[P, R], parts: list[FunctionPart], refused: CaptureError | None, **how: Any
    ) -> None:
        super().__init__(function, **how)
        self._how = how
        self._shared = refused
        self._num_regions = sum(part.is_region for part in parts)
        self._num_watched = 0
        self._is_watched = False  # whether a call has shown that no gradient crosses an edge
        self._signature = inspect.signature(getattr(function, "__func__", function))
        kinds = {each.kind for each in self._signature.parameters.values()}
        is_plain = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._by_position = [*self._signature.parameters] if is_plain else None  # what may be passed by position alone
        self._parts: list[tuple[FunctionPart, Callable[..., Any]]] = []
        for part in parts:
            run = part.function if part.is_region or part.is_trivial else _PartStep(part, self, **how)
            self._parts.append((part, run))

    @property
    def graphs(self) -> list[StepGraph]:
        """Those of all parts, in order."""
        return [graph for _, run in self._parts if isinstance(run, Step) for graph in run.graphs]

    @property
    def history(self) -> list[str]:
        """Of all parts, in order."""
        return [line for _, run in self._parts if isinstance(run, Step) for line in run.history]

    @property
    def jobs(self) -> list[Job]:
        """What any part waits for."""
        return [*dict.fromkeys(job for _, run in self._parts if isinstance(run, Step) for job in run.jobs)]

    @property
    def regions(self) -> list[tuple[int, int]]:
        """First and last line of each region."""
        return [part.lines for part, _ in self._parts if part.is_region]

    def __deepcopy__(self, memo: dict[int, Any]) -> Step[P, R]:
        copied = super().__deepcopy__(memo)
        return step_of(copied.function, **self._how)

    def reset(self) -> None:
        """As of ``Step``, of all parts."""
        super().reset()
        self._num_watched, self._is_watched = 0, False
        for _, run in self._parts:
            if isinstance(run, Step):
                run.reset()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step."""
        if (torch.compiler.is_compiling() and is_compiling()) or torch.is_inference_mode_enabled():
            return self.function(*args, **kwargs)
        if is_differentiated_outside():
            return self._run_within_transform(args, kwargs)
        with ReducedRun().active():
            return self._run(args, kwargs)  # type: ignore[no-any-return]

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self._shared is not None and self._refusals.disabled is None:
            self._disable(self._shared)
        if self._refusals.disabled is not None:
            return self._plain.result_of(self.function(*args, **kwargs), args, kwargs)
        if not self._is_watched:
            return self._run_watched(args, kwargs)
        if isinstance(self.function, MethodType):
            args = (self.function.__self__, *args)
        if self._by_position is not None and len(args) == len(self._by_position) and not kwargs:
            return self._run_parts(dict(zip(self._by_position, args, strict=True)))
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return self.function(*args, **kwargs)  # which says it in Python's words
        bound.apply_defaults()
        return self._run_parts(dict(bound.arguments))

    def _run_parts(self, values: dict[str, Any]) -> Any:
        guarded: dict[int, Tensor] = {}
        for part, run in self._parts:
            is_done, left = run(*[values.get(name, UNBOUND) for name in part.inputs])
            if is_done:
                return _without_guards(left, guarded) if guarded else left
            if isinstance(run, _PartStep):
                left, graded = left
                if any(graded):
                    pairs = zip(left, graded, strict=True)
                    left = [_with_guards(value, which, guarded) if which else value for value, which in pairs]
            values.update(zip(part.outputs, left, strict=True))
        raise AssertionError("the last part returns")

    def _run_watched(self, args: Any, kwargs: Any) -> Any:
        """Run eagerly, and learn whether a gradient crosses an edge."""
        call = _FirstCall()
        self._num_watched += 1
        with call.watching():
            result = self.function(*args, **kwargs)
        self._is_watched = call.num_edges >= 2 * self._num_regions or self._num_watched == MAX_WATCHED
        if call.error is not None:
            self._disable(call.error)
        return self._plain.result_of(result, args, kwargs)

    def _disable(self, error: CaptureError) -> None:
        """From now on run as plain Python."""
        if self.strict:
            raise error
        self._refusals.disable(error)


class _PartStep(Step[Any, Any]):
    """A captured part. What it leaves to others is as in eager Python, where it runs eagerly."""

    _is_part = True

    def __init__(self, part: FunctionPart, whole: IslandStep[Any, Any], **how: Any) -> None:
        self._part_name = "{}, lines {} to {},".format(whole._name, *part.lines)
        super().__init__(part.function, **how)
        self._refusals.list = whole.refusals

    def _find_name(self) -> str:
        return self._part_name

    def _with_region(self, error: CaptureError) -> CaptureError:
        return error

    def _fall_back(self, call: StepCall, error: CaptureError) -> Any:
        if isinstance(error, EmptyCaptureError):
            self._refusals.add_alike(call.key, error, self._served)
            return self._plain.run_call(call)
        if self.strict:
            raise error
        result = self._plain.run_call(call)  # says by itself where a gradient would cross an edge
        self._refuse(call, error)
        return result


def step_of(function: Callable[P, R], **how: Any) -> Step[P, R]:
    """The step of a function, in parts where it has eager regions; ``how`` as for ``Step``."""
    plain = getattr(function, "__func__", function)
    if isinstance(plain, FunctionType):
        parts, refused = split_function(plain, eager_region, _leave)
        if parts and how.get("data_parallel", False) is not False:
            raise ArgumentError("A step with eager regions takes no data_parallel; use DistributedDataParallel there.")
        if parts:
            return IslandStep(function, parts, refused, **how)
    return Step(function, **how)


def _leave(*values: Any) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]:
    """What a part leaves to others, without gradients, and for each value which of its tensors, counted, had them.

    Where the part runs eagerly, containers are left as they are: another object may hold them.
    """
    recorder = recorder_of_thread()
    if recorder is not None:
        recorder.is_part = True
        met = {*recorder.given}
        for value in values:
            _check_passed(value, met, recorder.own)
    detached: dict[int, Tensor] = {}
    left, graded = [], []
    for value in values:
        is_open = recorder is not None or isinstance(value, Tensor)
        structure, leaves = tree_flatten(value) if is_open else (Reference(value), [])
        for leaf in leaves:
            if leaf.requires_grad and not leaf.is_leaf:
                detached.setdefault(id(leaf), leaf.detach())
        if recorder is not None:
            recorder.passed.update(map(storage_id, leaves))
        graded.append(tuple(index for index, leaf in enumerate(leaves) if id(leaf) in detached))
        left.append(tree_unflatten(structure, [detached.get(id(leaf), leaf) for leaf in leaves]))
    return tuple(left), tuple(graded)


def _check_passed(value: Any, met: set[int], own: Callable[[Any], bool]) -> None:
    """Refuse what a graph would give a copy of where eager Python has one object with several names."""
    if isinstance(value, (Tensor, *SCALARS, *_LASTING)) or is_scalar(value) or is_size(value) or value is UNBOUND:
        return
    if isinstance(value, FunctionType) and not value.__closure__:
        return
    if not is_open_container(value) or own(value) or (id(value) in met and not isinstance(value, tuple)):
        raise CaptureError(
            f"The step passes a {type(value).__name__} across the edge of an eager_region which may have another name.",
            where=here(),
            remedy="Read it again after the edge, or pass tensors and numbers, or new lists of them.",
        )
    met.add(id(value))
    for part in parts_of(value):
        _check_passed(part, met, own)


_LASTING = (nn.Module, Optimizer, LRScheduler, ModuleType, BuiltinFunctionType, torch.Generator, type)
"""Kinds of objects that were there before the step, and are known by what they hold."""


def _with_guards(value: Any, graded: Sequence[int], guarded: dict[int, Tensor]) -> Any:
    """Let tensors that had a gradient in a graph require one, and raise where it would be lost."""
    structure, leaves = tree_flatten(value)
    for index in graded:
        leaf = leaves[index].detach().requires_grad_()
        hook_leaf(leaf, _on_lost)
        guarded[id(leaf)] = leaves[index] = leaf
    return tree_unflatten(structure, leaves)


def _without_guards(result: Any, guarded: dict[int, Tensor]) -> Any:
    structure, leaves = tree_flatten(result)
    if not any(id(leaf) in guarded for leaf in leaves):
        return result
    return tree_unflatten(structure, [leaf.detach() if id(leaf) in guarded else leaf for leaf in leaves])


def _on_lost(_: Tensor) -> NoReturn:
    raise _crossing()


def _crossing() -> CaptureError:
    return CaptureError(
        "A backward pass crosses the edge of an eager_region.",
        where=here(),
        remedy="Put forward and backward on the same side of it, or detach what the other side uses.",
    )
