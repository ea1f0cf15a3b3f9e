"""``ms.compile``: a model or function, captured by Dynamo, run as programs of ours.

Dynamo captures and guards; AOT autograd splits forward from backward; ``lower`` turns each graph into a program. What
Dynamo cannot capture it runs as plain Python between the graphs, and what cannot be lowered runs on plain Inductor: the
results are right in any case, and one warning names the reason and the line. With ``strict`` the same reasons raise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from millstream._torch.autograd.hooks import HOOKS_OF_MODULE, count_hooks
from millstream._torch.compiler.compile_signals import COMPILE_SIGNALS
from millstream._torch.compiler.dynamo import (
    DuringCalls,
    guard_switches,
    is_compiling,
    known_obstacles,
    num_refused_forms,
    sizes_as_they_are,
)
from millstream._torch.compiler.dynamo_errors import drop_logs_of_fake_tensors, raised_before_running
from millstream._torch.compiler.lookups import compile_for
from millstream._torch.dispatcher import is_differentiated_outside
from millstream._torch.distributed.wrappers import call_around
from millstream._torch.modes.switches import IN_GRAPHS
from millstream.capture.dynamos_reasons import (
    MOST_TURNS,
    SCRIPTED,
    dynamos_reason,
    find_scripted,
    first_line,
    guess_obstacles,
    place_in_code,
    refusal_of,
    takes_no_more,
)
from millstream.capture.lines import COMES_TO, is_users
from millstream.capture.state.signature import RESOLVE_REMEDY, is_lazy_view
from millstream.capture.trace.refusing.unsupported import within_transform
from millstream.device.compiled_switches import install_later
from millstream.errors import ArgumentError, CaptureError, MillstreamError, warn_user, why_disabled
from millstream.lower import Lowered, LoweredForSizes, compile_graph, describe_failure
from millstream.progress import showing

#: Dynamo gives up on a function after this many versions; a user of many input shapes meets its default of 8 too soon.
RECOMPILE_LIMIT = 64

#: Likewise, of a recurrent network: each length of its sequences is a version of its own, whose turns are all traced.
RECURRENT_LIMIT = 8

#: After so many it is worth it to compile what asks for PyTorch's switches.
MANY_RUNS = 32

#: Parameters of a frozen model may be loaded so many times; each time it is compiled anew.
MAX_FOLDED_ANEW = 8

_VERSION = operator.attrgetter("_version")


class Runnable(Protocol):
    """The result of a builder for a lowered program."""

    def __call__(self, inputs: list[Any]) -> list[Any]: ...

    def release(self) -> None: ...


#: Makes executables for the programs (forward, backward) of one graph.
Builder = Callable[[Lowered | LoweredForSizes], Runnable]


class Graph:
    """One captured graph: its programs, in the order they were lowered, and when it was last used."""

    def __init__(self) -> None:
        self.executables: list[Any] = []
        self.last_used = 0


@dataclass(eq=False)
class Compiler:
    """A Dynamo backend that remembers what it compiled."""

    new_builder: Callable[[Callable[[str], None]], Builder]  # given what to call when a program runs in another way
    _: KW_ONLY
    name: str  # of what is compiled, for people
    strict: bool = False  # raise instead of falling back
    max_graphs: int = 8  # so many keep their memory; the one unused for longest gives it back until it runs again
    options: dict[str, Any] | None = None  # of Inductor
    freezes: bool = False  # fold parameters into the graphs
    dynamic: bool | None = None  # whether sizes are symbolic: from the second value of a size on, always, or never
    num_runs: int = field(default=0, init=False)  # of graphs; a clock for their use
    graphs: list[Graph] = field(default_factory=list, init=False)
    fallbacks: list[str] = field(default_factory=list, init=False)
    _folded: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _versions: list[int] = field(default_factory=list, init=False)  # of those, when they were folded in
    _num_folded_anew: int = field(default=0, init=False)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph that Dynamo captured."""
        guard_switches()
        if setter := next((node.target for node in gm.graph.nodes if node.target in IN_GRAPHS), None):
            self.warn(f"a graph runs as plain Python, as it calls {setter.__name__}, which no compiled graph does.")
            return gm.forward
        if any(isinstance(value, torch.Tensor) and is_lazy_view(value) for value in inputs):
            self.warn(f"a graph runs as plain Python, as an input is a conjugated or negated view. {RESOLVE_REMEDY}")
            return gm.forward
        if self.freezes and torch.is_grad_enabled() and any(isinstance(each, torch.nn.Parameter) for each in inputs):
            self.warn("freeze=True folds parameters in under torch.no_grad() only, and it was called without.")
        if self.freezes and not torch.is_grad_enabled():
            new = {id(each): each for each in (*gm.parameters(), *gm.buffers())}
            self._versions += (each._version for key, each in new.items() if key not in self._folded)
            self._folded |= new
        if is_differentiated_outside():  # where it is torch.compile's backend
            self.warn(str(within_transform()))
            return gm.forward
        builder, graph = self.new_builder(self.warn), Graph()

        def finish(lowered: Lowered | LoweredForSizes) -> Runnable:
            executable = builder(lowered)
            graph.executables.append(executable)
            return executable

        with showing(self.name, "compiled"):
            run = compile_graph(
                gm, inputs, finish, self._refuse, name=self.name, options=self.options, freeze=self.freezes
            )
        self.graphs.append(graph)
        graph.last_used = self.num_runs
        self._release_oldest()

        @functools.wraps(run)
        def call(*args: Any) -> Any:
            self.num_runs += 1
            if self.num_runs == MANY_RUNS:
                install_later()
            graph.last_used = self.num_runs
            COMPILE_SIGNALS.handle()
            return run(*args)

        return call

    @property
    def is_stale(self) -> bool:
        """Whether a tensor that was folded in has been written since. What writes through ``.data`` is not seen."""
        return [*map(_VERSION, self._folded.values())] != self._versions

    def fold_anew(self) -> None:
        """Forget what was compiled, as folded parameters have changed. If they do so again and again, fold no more."""
        for graph in self.graphs:
            for executable in graph.executables:
                executable.release()
        self.graphs, self._folded, self._versions = [], {}, []
        self._num_folded_anew += 1
        if self._num_folded_anew > MAX_FOLDED_ANEW:
            self.freezes = False
            self.warn("parameters are not folded in any more, as they change again and again: leave out freeze=True.")

    def warn(self, reason: str) -> None:
        """Note why something runs otherwise than asked for, and say so once a reason; raise if strict."""
        if self.strict:
            raise CaptureError(reason)
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            warn_user(f"{self.name}: {reason}")

    def _refuse(self, error: Exception, instead: str) -> None:
        failure = describe_failure(error)
        if self.strict or isinstance(error, ArgumentError):  # a wrong argument is nothing to work around
            raise (
                error
                if isinstance(error, MillstreamError)
                else CaptureError(f"{failure.reason}.", where=failure.where, remedy=failure.remedy)
            ) from error
        told = f"a graph runs {instead}, because it could not be lowered ({failure})."
        self.warn(f"{told} {failure.remedy}".rstrip())

    def _release_oldest(self) -> None:
        for graph in sorted(self.graphs, key=lambda graph: graph.last_used)[: -self.max_graphs]:
            for executable in graph.executables:
                executable.release()


class _Hooks:
    """Hooks of a module and of those within it: Dynamo misses later ones, unless it asks for each in every call."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._count = -1
        self._counted: list[tuple[Any, int]] = []

    def changed(self) -> tuple[int, ...] | None:
        """The numbers of all hooks, ``None`` if they are those of the last look."""
        count = count_hooks()
        if count == self._count and all(len(hooks) == number for hooks, number in self._counted):
            return None
        self._count = count
        held = (getattr(module, key) for module in self._root.modules() for key in HOOKS_OF_MODULE)
        own = [hooks for hooks in held if hooks]
        self._counted = [(hooks, len(hooks)) for hooks in own]
        return tuple(number for hooks in own for number in hooks)


_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


_ISOLATED: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)
"""Since 2.13: what others compile of the same code, that of ``nn.Sequential`` say, counts toward no limit of ours."""

_GIVES_UP = ("Hard failure due to fullgraph", "found no compiled frames")
"""Of Dynamo's errors with ``fullgraph=True``: nothing of the user's went wrong, but nothing is compiled either."""


class Compiled:
    """A function compiled by ``ms.compile``.

    Args:
        function: What to compile, a module too.
        compiler: Compiles the graphs that Dynamo captures.

    Attributes:
        compiler: What was compiled for it.
    """

    def __init__(self, function: Callable[..., Any], compiler: Compiler) -> None:
        functools.update_wrapper(self, function, updated=())
        self.compiler = compiler
        self._is_recurrent = _is_recurrent(function)
        self._limit = RECOMPILE_LIMIT
        self._settings = DuringCalls(freezes=compiler.freezes, is_recurrent=self._is_recurrent)
        self._reported = 0
        self._has_nothing = False
        self._scripted = find_scripted(function)
        disabled = why_disabled()
        self._is_disabled = disabled is not None
        compiler.fallbacks += [] if disabled is None else [str(disabled)]
        self._num_refused = num_refused_forms()
        self._function = function
        self._hooks = _Hooks(function) if isinstance(function, torch.nn.Module) else None
        self._calls: dict[tuple[int, ...], Callable[..., Any]] = {}
        drop_logs_of_fake_tensors(Compiled.__call__.__code__)
        self._numbers: tuple[int, ...] = ()  # of the hooks
        self._call = self._call_for(())

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """The same of a copy of what is compiled; nothing is compiled for it yet."""
        return Compiled(copy.deepcopy(self._function, memo), replace(self.compiler))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A function compiled in a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or self._is_disabled:  # the first: part of another capture
            return self._function(*args, **kwargs)
        if is_differentiated_outside():
            self.compiler.warn(str(within_transform()))
            return self._function(*args, **kwargs)
        if self._scripted:
            self.compiler.warn(self._scripted)
        breaks, num_runs = len(dynamo_utils.graph_break_reasons), self.compiler.num_runs
        obstacles = None if self.compiler.graphs else known_obstacles()
        self._refresh()
        traces_turns = self._is_recurrent and _longest((args, kwargs)) <= MOST_TURNS
        self._limit = RECURRENT_LIMIT if traces_turns else RECOMPILE_LIMIT
        settings = self._settings.begin(self._limit, traces_turns=traces_turns)
        COMPILE_SIGNALS.begin_call()
        try:
            with self._first_sizes():
                result = self._call(*args, **kwargs)
        except BackendCompilerFailed as failure:  # Dynamo's wrapping of what our backend raised
            if isinstance(failure.inner_exception, MillstreamError):
                raise failure.inner_exception from None
            raise
        except (Unsupported, UserError) as error:  # with ``fullgraph=True`` only
            raise refusal_of(error) from error
        except Exception as error:
            if self.compiler.strict and any(told in str(error) for told in _GIVES_UP):
                raise CaptureError(
                    f"Dynamo captures no more of it ({first_line(error)}). {takes_no_more(self._limit)}"
                ) from error
            has_begun = self.compiler.num_runs > num_runs or len(dynamo_utils.graph_break_reasons) > breaks
            if has_begun or not raised_before_running(error, is_users):
                raise
            refused = error
        else:
            self._report_call(breaks, num_runs, obstacles)
            return result
        finally:
            self._settings.end(settings)
            COMPILE_SIGNALS.end_call()
        # It is mostly the user's own mistake: raised as in eager mode, without twenty lines of Dynamo's.
        result = self._function(*args, **kwargs)
        if self.compiler.strict:
            raise refusal_of(refused) from refused
        told = f"{type(refused).__name__}: {first_line(refused)}"
        self.compiler.warn(f"a call has run as plain Python, as Dynamo cannot trace it ({told}).")
        return result

    def _first_sizes(self) -> AbstractContextManager[Any]:
        """The first sizes are compiled as they are, whatever Dynamo has seen in other models with the same code."""
        if self.compiler.graphs or self.compiler.dynamic is not None:
            return _NOTHING
        return sizes_as_they_are()

    def _refresh(self) -> None:
        """Call what was compiled for the hooks and the folded parameters that there are now."""
        if self.compiler.freezes and self.compiler.is_stale:
            self.compiler.fold_anew()
            self._calls.clear()
            self._call = self._call_for(self._numbers)
        if self._hooks is not None and (numbers := self._hooks.changed()) is not None:
            self._numbers = numbers
            self._call = self._call_for(numbers)

    def _report_call(self, breaks: int, num_runs: int, obstacles: Counter[str] | None) -> None:
        """Tell the user what became of a call, if that is news."""
        if obstacles is not None and not self.compiler.graphs:
            self._report_nothing([*(known_obstacles() - obstacles)])
        elif len(self.compiler.graphs) != self._reported or len(dynamo_utils.graph_break_reasons) > breaks:
            self._report(breaks)
        elif self.compiler.num_runs == num_runs and num_refused_forms() > self._num_refused:
            self._num_refused = num_refused_forms()
            self.compiler.warn(f"new forms of inputs run as plain Python. {takes_no_more(self._limit)}")

    def _call_for(self, hooks: tuple[int, ...]) -> Callable[..., Any]:
        """Return what to call with these hooks. Dynamo takes what it captured for one backend for no other."""
        if isinstance(self._function, SCRIPTED):
            return self._function
        if hooks not in self._calls:
            backend, function = functools.partial(self.compiler), self._function
            is_wrapper = isinstance(function, DistributedDataParallel)  # whose own forward is Python by design
            call = compile_for(
                function.module if is_wrapper else function,
                backend,
                dynamic=self.compiler.dynamic,
                fullgraph=self.compiler.strict,
                **_ISOLATED,
            )
            self._calls[hooks] = call_around(function, call) if is_wrapper else call
        return self._calls[hooks]

    def _report(self, breaks: int) -> None:
        """Tell the user what Dynamo left to Python while it captured."""
        self._reported = len(self.compiler.graphs)
        for reason in dynamo_utils.graph_break_reasons[breaks:]:
            where, why, remedy = "", dynamos_reason(reason.reason), ""
            if reason.user_stack and reason.user_stack[-1].filename == __file__:
                why = "a part is compiled already"
            elif reason.user_stack:
                where, remedy = place_in_code(reason.user_stack)
            inner = f"{where.removeprefix(' at ').rpartition(COMES_TO)[2]} ({why})"
            is_told = any(inner in each for each in self.compiler.fallbacks)
            if not is_told:  # also with the line that comes to it, which Dynamo knows for the first part only
                self.compiler.warn(f"the graph is cut{where} ({why}); the parts run one after another.{remedy}")

    def _report_nothing(self, obstacles: list[str]) -> None:
        """Tell the user once that Dynamo captured nothing at all, if there was something to capture."""
        is_recurrent = any("LSTM" in each for each in obstacles)
        if (not obstacles or is_recurrent) and isinstance(self._function, torch.nn.Module):
            obstacles = [*obstacles, *guess_obstacles(self._function)]
        if self._scripted:
            return  # that was told
        if obstacles and not self._has_nothing:
            self._has_nothing = True
            reasons = ", ".join(dict.fromkeys(map(first_line, obstacles)))
            self.compiler.warn(f"nothing of it is captured ({reasons}); it runs as plain Python.")

    def tell_unwrapped(self, module: torch.nn.Module, name: str) -> None:
        """Say that a method which calls the module does not call what is compiled.

        Raises:
            CaptureError: It is Lightning that calls: nothing at all of the training would be compiled.
        """
        if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
            raise CaptureError(
                f"Lightning's Trainer calls {name}, which is not compiled: ms.compile compiles the call of a module.",
                remedy="Compile what is inside, self.net = ms.compile(net), and give the Trainer the module itself.",
            )
        self.compiler.warn(f"{name}() is not compiled: it calls the original model, and what calls this one is.")


def _longest(arguments: Any) -> int:
    """The length of the longest sequence, or the size of the largest batch: either may come first."""
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return max((size for tensor in tensors for size in tensor.shape[:2]), default=0)


def _is_recurrent(function: Callable[..., Any]) -> bool:
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    return any(isinstance(each, torch.nn.RNNBase) for each in modules)
