"""``ms.compile`` and the backend ``millstream`` of ``torch.compile``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

import torch

from millstream._torch.compiler.dynamo import (
    backend_that_calls,
    is_compiled_by_torch,
    name_being_compiled,
    torch_backend_of,
)
from millstream.api.torch_arguments import split_options, translate, with_mode
from millstream.capture.compiled_module import CompiledModule, compile_module
from millstream.capture.model import Builder, Compiled, Compiler
from millstream.capture.step.step import Step
from millstream.engine import BySize, Engine, Improving, OneOfMany, ProgramPair, build, check_devices
from millstream.errors import ArgumentError, names_are_suggested
from millstream.lower import Lowered, LoweredForSizes
from millstream.schedule import Tune
from millstream.settings import Settings

#: A module or a function; what it is compiled to is used like it.
Model = TypeVar("Model", bound=Callable[..., Any])

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypedDict  # whose dicts may be closed

    class CommonSettings(TypedDict, total=False):
        """Arguments that ``ms.step`` and ``ms.compile`` share."""

        engine: str | None
        streams: int | Literal["auto", "manual"]
        policy: str | None
        memory: float | int
        tune: Tune
        copy_outputs: bool
        strict: bool
        max_graphs: int
        options: dict[str, Any] | None
        devices: Sequence[str | torch.device] | None

    class StepSettings(CommonSettings, total=False, closed=True):
        """Arguments of ``ms.step``."""

        check: int | None
        data_parallel: bool | ProcessGroup
        shard_optimizer: bool
        shard_parameters: bool
        dynamic: bool | None
        micro_batches: int

    class CompileSettings(CommonSettings, total=False, closed=True):
        """Arguments of ``ms.compile``."""

        freeze: bool
        mode: str | None
        fullgraph: bool
        dynamic: bool | None
        backend: str | None


@overload
def compile(model: Model, **settings: Unpack[CompileSettings]) -> Model: ...


@overload
def compile(model: None = None, **settings: Unpack[CompileSettings]) -> Callable[[Model], Model]: ...


@names_are_suggested()
def compile(  # noqa: PLR0913  all but the first by name, each with a default
    model: Callable[..., Any] | None = None,
    *,
    engine: str | None = None,
    streams: int | Literal["auto", "manual"] = "auto",
    policy: str | None = None,
    memory: float | int = 1.25,
    tune: Tune = "auto",
    freeze: bool = False,
    copy_outputs: bool = True,
    strict: bool = False,
    max_graphs: int = 8,
    options: dict[str, Any] | None = None,
    devices: Sequence[str | torch.device] | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """Compile a module or a function of tensors into graphs of fused kernels, for inference and for training.

    The first call with new dtypes or modes compiles, and so does the first in which a size changes; after that, another
    size takes milliseconds. On a GPU the second call captures the kernels in a CUDA graph, and all later ones replay
    it; with symbolic sizes each size is captured when it comes again. Under autograd, the backward pass is compiled as
    well.

    Args:
        model: A module or a function. A compiled module stays a module in use: parameters, ``state_dict``, ``train()``
            and all attributes reach the original. Left out, a decorator is returned.
        engine: ``"graph"`` or ``"streams"`` (CUDA only), ``"threads"`` (CPU only), ``"serial"``, or ``None`` for the
            quickest that the device has. The environment variable ``MILLSTREAM_ENGINE`` overrides it.
        streams: At most so many streams; ``"auto"`` times several plans on the device and keeps the fastest, one stream
            included; ``"manual"`` takes those written by hand in the program. The environment variable
            ``MILLSTREAM_NSTREAMS`` overrides it.
        policy: How kernels are put on streams: ``"list"``, ``"slack"``, ``"chains"`` or ``"serial"``; ``None`` chooses.
        memory: Budget: for temporaries and outputs in bytes as an ``int``, or as a ``float`` a factor of all that the
            program holds when it runs on one stream, parameters and inputs included, where 2 MiB more than one stream
            takes (64 MiB on the CPU) are always allowed. Over it, plans take fewer streams.
        tune: When a plan is chosen on a GPU: by the first calls, or with ``"background"`` between later ones, within
            2 % of the time; one stream runs meanwhile. Results have the same bits, whichever plan runs. Alternatives to
            its kernels, which round otherwise, are tried between later calls, within 5 % of the time (2 % with
            ``"background"``), or with ``"now"`` by the first calls.
        freeze: Fold the parameters into the graph as constants (inference under ``torch.no_grad`` only): their later
            changes are not seen.
        copy_outputs: Whether results are the caller's own. With ``False``, on a GPU, the next call overwrites them.
        strict: Raise ``CaptureError`` where otherwise a warning is given and plain torch.compile or Python takes over.
        max_graphs: So many graphs keep their memory between calls; beyond, the one unused for longest gives its memory
            back.
        options: Options of TorchInductor, such as ``{"max_autotune": True}``; ``{"own_kernels": False}`` does without
            our kernels for convolutions and linear layers, ``{"alternatives": False}`` without alternatives, and with
            ``{"reproducible": True}`` no clock decides what rounds.
        devices: Devices that kernels may be placed on, the user's first: ``["cuda:0", "cuda:1"]``, or ``["cpu:0",
            "cpu:1"]``, two virtual ones of a CPU to try it on. Parameters and results stay on the first. Kept where it
            is measured to be faster than one device, where the engine is given, or where one has no room;
            ``memory=`` in bytes bounds each.
        mode: As for ``torch.compile``. ``"reduce-overhead"`` is what the engine ``graph`` does anyway;
            ``"max-autotune"`` stands for those options of TorchInductor.
        fullgraph: The same as ``strict``.
        dynamic: Whether sizes are symbolic, so that one graph serves all: ``None`` makes those symbolic that were seen
            to change, ``True`` all from the first call on, ``False`` none: every shape is compiled on its own.
        backend: ``"inductor"`` or ``"millstream"``, both of which it is; others are refused.

    Raises:
        ArgumentError: An argument has no meaning; the message lists the choices.
    """
    asked = Settings.of(
        streams,
        policy,
        memory,
        tune,
        engine=engine,
        copy_outputs=copy_outputs,
        strict=strict,
        max_graphs=max_graphs,
        options=options,
        freeze=freeze,
        dynamic=dynamic,
        devices=devices,
    )
    check_devices(asked.devices)
    settings = translate(asked, mode=mode, fullgraph=fullgraph, backend=backend)
    return functools.partial(_compile, settings) if model is None else _compile(settings, model)


def _compile(settings: Settings, model: Callable[..., Any]) -> Any:
    if not callable(model):
        raise ArgumentError(f"compile() takes a module or a function, not {type(model).__name__}.")
    if (compiled_by := _compiled_by(model)) is not None:
        raise ArgumentError(
            f"compile() was given what {compiled_by} has compiled already. Give it the {_kind_of(model)} itself, as it "
            "was before that, or use what it was given as it is."
        )
    compiler = _compiler(settings, getattr(model, "__name__", type(model).__name__))
    return compile_module(model, compiler) if isinstance(model, torch.nn.Module) else Compiled(model, compiler)


def _compiler(settings: Settings, name: str) -> Compiler:
    return Compiler(
        functools.partial(new_builder, settings),
        name=name,
        strict=settings.strict,
        max_graphs=settings.max_graphs,
        options=settings.options,
        freezes=settings.freeze,
        dynamic=settings.dynamic,
    )


def _compiled_by(model: Callable[..., Any]) -> str | None:
    """Return what has compiled a module or function already; ``None`` for one that is as the user wrote it."""
    if isinstance(model, Compiled) or issubclass(type(model), CompiledModule):
        return "ms.compile"
    if isinstance(model, Step):
        return "ms.step"
    return "torch.compile" if is_compiled_by_torch(model) else None


def _kind_of(model: Callable[..., Any]) -> str:
    return "module" if isinstance(model, torch.nn.Module) else "function"


def dynamo_backend(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="millstream")``.

    Args:
        gm: Graph that Dynamo captured.
        inputs: Example inputs.
        kwargs: ``mode`` and ``options`` of ``torch.compile``: among the options may be ``engine``, ``streams``,
            ``policy``, ``memory``, ``copy_outputs`` and ``strict``, as for ``ms.compile``; all others are
            TorchInductor's.

    Raises:
        ArgumentError: One of them has no meaning.
    """
    backend = backend_that_calls()
    compiler = _compiler_of_torch(kwargs) if backend is None else _compiler_kept_by(backend)
    if not compiler.graphs:
        compiler.name = name_being_compiled() or compiler.name
    return compiler(gm, inputs)


def compiler_of(compiled: Any) -> Compiler | None:
    """Return what has compiled the graphs of a result of ``ms.compile``, or of ``torch.compile`` with our backend.

    A module that compiles in place, by ``module.compile(backend="millstream")``, is one of these. ``None`` for others.
    """
    if issubclass(type(compiled), CompiledModule):
        return compiled._millstream.compiler  # type: ignore[no-any-return]
    if isinstance(compiled, Compiled):
        return compiled.compiler
    backend = torch_backend_of(compiled)
    if getattr(backend, "compiler_fn", None) is not dynamo_backend:
        return None
    own = _compiler_kept_by(backend)
    alike = (vars(each)[_COMPILER] for each in _backends.values() if each == backend)
    return own if own.graphs else next((each for each in alike if each.graphs), own)


def _compiler_kept_by(backend: Any) -> Compiler:
    """One for all graphs of one call of ``torch.compile``, which lives as long as what that returned."""
    if (compiler := vars(backend).get(_COMPILER)) is None:
        vars(backend)[_COMPILER] = compiler = _compiler_of_torch(backend.kwargs)
        _backends[id(backend)] = backend
    return compiler  # type: ignore[no-any-return]


_backends: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Of calls of ``torch.compile`` with ours: Dynamo has a graph once for all with the same options that it serves."""
_COMPILER = "_millstream_compiler"


def _compiler_of_torch(kwargs: dict[str, Any]) -> Compiler:
    ours, inductors = split_options(kwargs.get("options"))
    settings = Settings.of(**ours, options=with_mode(kwargs.get("mode"), inductors) or None)
    return _compiler(settings, "millstream")


def improving(lowered: Lowered, settings: Settings, make: Callable[[Lowered], Engine]) -> Engine | Improving:
    """Return what runs a program, and tries alternatives to its kernels where there may be some."""

    def make_variant(variant: Lowered, usual: Engine) -> Engine:  # with as many streams: no plans are tried for it
        scheduling = replace(settings.scheduling, streams=settings.scheduling.streams or usual.num_streams)
        return build(variant, replace(settings, scheduling=scheduling))

    if lowered.variants is None or settings.has_several_devices:
        return make(replace(lowered, variants=None))
    return Improving(lowered, make, make_variant, settings.scheduling.tune)


def new_builder(settings: Settings, warn: Callable[[str], None]) -> Builder:
    """A builder for the programs of one graph, whose forward and backward know each other."""
    families: WeakValueDictionary[Hashable, ProgramPair] = WeakValueDictionary()
    own = ProgramPair()

    def make(lowered: Lowered, family: ProgramPair, one_of_many: OneOfMany | None = None) -> Engine:
        return build(lowered, settings, family=family, one_of_many=one_of_many, warn=warn)

    def make_for_size(lowered: Lowered, key: Hashable, one_of_many: OneOfMany) -> Engine:
        return make(lowered, families.setdefault(key, ProgramPair()), one_of_many)

    def finish(lowered: Lowered | LoweredForSizes) -> Engine | BySize | Improving:
        if isinstance(lowered, Lowered):
            return improving(lowered, settings, lambda lowered: make(lowered, own))
        at_once = settings.engine is not None or bool(os.environ.get("MILLSTREAM_ENGINE"))
        return BySize(lowered, make_for_size, at_once=at_once)

    return finish
