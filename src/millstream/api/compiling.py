"""``ms.compile`` and the backend ``millstream`` of ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from millstream.capture.compile import Builder, Compiled, CompiledModule, Compiler
from millstream.engine import ENGINES, Family, build
from millstream.errors import ArgumentError


def compile(
    model: Callable[..., Any] | None = None,
    *,
    engine: str | None = None,
    freeze: bool = False,
    copy_outputs: bool = True,
    strict: bool = False,
    max_graphs: int = 8,
    options: dict[str, Any] | None = None,
) -> Any:  # of the kind of ``model``, or a decorator
    """Compile a module or a function of tensors into graphs of fused kernels, for inference and for training.

    The first call with new input shapes, dtypes or modes compiles; on a GPU the second captures the kernels in a CUDA
    graph, and all later ones replay it. Under autograd, the backward pass is compiled as well.

    Args:
        model: A module or a function. A compiled module stays a module in use: parameters, ``state_dict``, ``train()``
            and all attributes reach the original. Left out, a decorator is returned.
        engine: ``"graph"`` (CUDA only), ``"serial"``, or ``None`` for the quickest that the device has. The environment
            variable ``MILLSTREAM_ENGINE`` overrides it.
        freeze: Fold the parameters into the graph as constants (inference under ``torch.no_grad`` only): their later
            changes are not seen.
        copy_outputs: Whether results are the caller's own. With ``False`` the next call overwrites them.
        strict: Raise where otherwise a warning is given and plain torch.compile or eager Python takes over.
        max_graphs: So many graphs keep their memory between calls; beyond, the one unused for longest gives its memory
            back.
        options: Options of TorchInductor, such as ``{"max_autotune": True}``.

    Raises:
        ArgumentError: An argument has no meaning; the message lists the choices.
    """
    check_arguments(engine, max_graphs)
    if model is None:
        return functools.partial(
            compile,
            engine=engine,
            freeze=freeze,
            copy_outputs=copy_outputs,
            strict=strict,
            max_graphs=max_graphs,
            options=options,
        )
    if not callable(model):
        raise ArgumentError(f"compile() takes a module or a function, not {type(model).__name__}.")
    compiler = Compiler(
        lambda warn: new_builder(engine, copy_outputs, warn),
        name=getattr(model, "__name__", type(model).__name__),
        strict=strict,
        max_graphs=max_graphs,
        options=options,
    )
    if isinstance(model, torch.nn.Module):
        return CompiledModule(model, compiler, freeze=freeze)
    return Compiled(model, compiler, freeze=freeze)


def dynamo_backend(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="millstream")``; ``options`` go to TorchInductor."""
    options = kwargs.get("options")
    compiler = Compiler(lambda warn: new_builder(None, True, warn), name="millstream", options=options)
    return compiler(gm, inputs)


def new_builder(engine: str | None, copy_outputs: bool, warn: Callable[[str], None]) -> Builder:
    """A builder for the programs of one graph, whose forward and backward know each other."""
    family = Family()
    return lambda lowered: build(lowered, engine=engine, copy_outputs=copy_outputs, family=family, warn=warn)


def check_arguments(engine: str | None, max_graphs: int) -> None:
    """Refuse an unknown engine and a bound below one."""
    if engine is not None and engine not in ENGINES:
        raise ArgumentError(f"Unknown engine {engine!r}; choose one of {', '.join(map(repr, ENGINES))}, or None.")
    if max_graphs < 1:
        raise ArgumentError(f"max_graphs={max_graphs} leaves no graph to run; give 1 or more.")
