"""``ms.step``: a whole training step as one graph."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

from millstream.api.compiling import improving, new_builder
from millstream.capture.kept.elsewhere import Lowering, takes_long
from millstream.capture.model import Runnable
from millstream.capture.step.regions.islands import step_of
from millstream.capture.step.step import P, R, Step
from millstream.capture.step.step_program import Compiling, StepProgram
from millstream.engine import AgreedEngine, check_devices
from millstream.engine import build as build_engine
from millstream.errors import ArgumentError, CaptureError, names_are_suggested, warn_user
from millstream.lower import Lowered, LoweredForSizes
from millstream.schedule import Tune
from millstream.settings import Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from millstream.api.compiling import StepSettings


_OF_COMPILE = {
    "mode": "A step needs none: on a GPU it is one CUDA graph anyway; options={'max_autotune': True} tunes kernels.",
    "fullgraph": "A step is one graph in any case; strict=True raises where it falls back.",
    "backend": "Its kernels are TorchInductor's in any case.",
    "freeze": "Parameters change in a step; ms.compile(model, freeze=True) is for inference.",
}
"""Arguments of ``ms.compile`` and ``torch.compile`` that a step does not take, and why."""


@overload
def step(fn: Callable[P, R], **settings: Unpack[StepSettings]) -> Step[P, R]: ...


@overload
def step(fn: None = None, **settings: Unpack[StepSettings]) -> Callable[[Callable[P, R]], Step[P, R]]: ...


@names_are_suggested(_OF_COMPILE)
def step(  # noqa: PLR0913  all but the first by name, each with a default
    fn: Callable[..., Any] | None = None,
    *,
    engine: str | None = None,
    streams: int | Literal["auto", "manual"] = "auto",
    policy: str | None = None,
    memory: float | int = 1.25,
    tune: Tune = "auto",
    copy_outputs: bool = True,
    strict: bool = False,
    max_graphs: int = 8,
    check: int | None = None,
    data_parallel: bool | ProcessGroup = False,
    shard_optimizer: bool = False,
    shard_parameters: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    devices: Sequence[str | torch.device] | None = None,
    micro_batches: int = 1,
) -> Any:
    """Capture a whole training step, forward, backward and optimizer, as one graph of fused kernels.

    Written once, above a function that does what one pass of the loop did::

        @ms.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss


        for x, y in ms.feed(loader, "cuda"):
            loss = train_step(x, y)

    The modules, optimizers and other tensors that the function uses are found by themselves. After each call they hold
    the new values, so checkpoints, schedulers and evaluation in between work as usual. The first call runs eagerly
    where optimizer state has yet to be made; the next captures.

    Args:
        fn: The user's function; what it returns comes back detached. Left out, a decorator is returned.
        engine: What runs the graph: ``"graph"`` or ``"streams"`` (CUDA only), ``"threads"`` (CPU only), ``"serial"``,
            or ``None`` for the quickest that the device has.
        streams: At most so many; ``"auto"`` times several plans and keeps the fastest; ``"manual"`` takes those written
            by hand in the step.
        policy: How kernels are put on streams: ``"list"``, ``"slack"``, ``"chains"`` or ``"serial"``; ``None`` chooses.
        memory: Budget, in bytes as an ``int``, or as a ``float`` a factor of what one stream takes.
        tune: When it is compiled, and a plan chosen on a GPU: by the first calls (``"first"``); or with
            ``"background"`` by another process, while calls run as plain Python, and between later ones. ``"auto"`` has
            another process compile what takes long on a GPU. Alternatives to kernels are tried between later calls, or
            with ``"now"`` by the first ones, too.
        copy_outputs: Whether results are the caller's own. With ``False``, on a GPU, the next call overwrites them.
        strict: Raise ``CaptureError`` where otherwise a warning is given and the function runs eagerly.
        max_graphs: At most so many graphs (input shapes, modes, numbers) are kept; the one unused longest is dropped.
        check: Every so many calls, capture the step again and compare: what has changed without being noticed, such as
            an item of a very long list, is a ``CaptureError`` that names the value and the line. For debugging: such a
            call takes as long as a capture. The environment variable ``MILLSTREAM_CHECK`` sets it where it is left out.
        data_parallel: Whether processes that ``torchrun`` has started train one model together, or which of them: what
            the first one has is copied to all at the first call, and gradients become their mean after each backward
            pass. The same parameters get gradients in every call; buffers stay each process's own. A step with
            a ``DistributedDataParallel`` model needs none of this.
        shard_optimizer: Whether those processes divide their optimizers: each holds the state of its share of the
            parameters and updates that alone, and then all get the others'. SGD, Adam, AdamW, RMSprop and Adagrad only.
            Each process has the gradients of its share; ``clip_grad_norm_`` knows that. See ``ms.full_state_dict``.
        shard_parameters: Whether those processes divide their models, and optimizers with them: at the first call
            PyTorch's ``fully_shard`` is applied to what the step trains, whose parameters are then ``DTensor``, and
            optimizers are given those. The same optimizers as with ``shard_optimizer``.
        dynamic: Whether sizes of arguments are symbolic, so that one graph serves all: ``None`` makes those symbolic
            that were seen to change, ``True`` all from the first capture on, ``False`` none.
        options: Options of TorchInductor, and ``own_kernels``, ``alternatives`` and ``reproducible``, as of
            ``ms.compile``.
        devices: Devices that kernels may be placed on, the user's first, as of ``ms.compile``.
        micro_batches: So many pieces the batch is divided into along the first dimension of the arguments: forward and
            backward pass of one after the other, gradients added in that order, and one update. Takes less memory, and
            with ``devices=`` one device can work on a piece while another has the next. What looks across the batch, as
            BatchNorm, forbids it.

    What it shares with ``ms.compile`` is told there at more length.

    Raises:
        ArgumentError: An argument has no meaning; the message lists the choices.
    """
    settings = Settings.of(
        streams,
        policy,
        memory,
        tune,
        engine=engine,
        copy_outputs=copy_outputs,
        strict=strict,
        max_graphs=max_graphs,
        options=options,
        dynamic=dynamic,
        devices=devices,
        micro_batches=micro_batches,
    )
    check_devices(settings.devices)
    if settings.has_several_devices and data_parallel is not False:
        raise ArgumentError("data_parallel= has a process for each device; leave out devices=.")
    shares = {"shard_optimizer": shard_optimizer, "shard_parameters": shard_parameters}
    _check_processes(data_parallel, shares)
    how = {"data_parallel": data_parallel, **shares, "check": _calls_between_checks(check)}
    make = functools.partial(_step, settings, how)
    return make if fn is None else make(fn)


def _step(settings: Settings, how: dict[str, Any], fn: Callable[..., Any]) -> Step[..., Any]:
    """Make the step; ``how`` as for ``Step``."""
    if not callable(fn):
        raise ArgumentError(f"step() takes a function that does a training step, not {type(fn).__name__}.")
    name = getattr(fn, "__name__", type(fn).__name__)
    if isinstance(fn, torch.nn.Module):
        raise ArgumentError(
            f"step() takes a function that does a training step (forward, backward, optimizer), not a model ({name}), "
            "whose results would have no gradients. Call ms.compile(model), or give step() a function that calls it."
        )
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise ArgumentError(
            f"step() takes a function that does a training step when it is called; {name} yields or awaits."
        )

    said: set[str] = set()

    def warn(reason: str) -> None:
        if settings.strict:
            raise CaptureError(reason)
        if reason not in said:
            said.add(reason)
            warn_user(f"{name}: {reason}")

    def build_step(gm: torch.fx.GraphModule, inputs: list[Any], static: frozenset[int]) -> StepProgram:
        for_sizes = new_builder(settings, warn)

        def build(lowered: Lowered | LoweredForSizes) -> Runnable:
            if not isinstance(lowered, Lowered):
                return for_sizes(lowered)
            return improving(lowered, settings, lambda lowered: build_engine(lowered, settings, warn=warn))

        def join(*args: Any, **kwargs: Any) -> AgreedEngine:
            if settings.has_several_devices:
                raise CaptureError("devices= are of one process, and the step exchanges gradients with others")
            return AgreedEngine(*args, settings=settings, **kwargs)

        tune, options = settings.scheduling.tune, settings.options
        # No clock may decide from which call on results are rounded otherwise.
        is_fixed = torch.are_deterministic_algorithms_enabled() or bool((options or {}).get("reproducible"))
        is_elsewhere = not is_fixed and (tune == "background" or (tune == "auto" and takes_long(gm)))
        begin = Lowering(gm, inputs, static, name, options).begin if is_elsewhere else None
        how = Compiling(options, tune == "now", begin)
        return StepProgram(gm, inputs, static, name=name, build=build, join=join, how=how)

    return step_of(
        fn,
        build=build_step,
        strict=settings.strict,
        max_graphs=settings.max_graphs,
        dynamic=settings.dynamic,
        options=settings.options,
        **how,
    )


def _check_processes(data_parallel: Any, shares: dict[str, Any]) -> None:
    if not isinstance(data_parallel, bool) and not hasattr(data_parallel, "allreduce"):
        raise ArgumentError(f"data_parallel={data_parallel!r} is neither True nor False nor a process group.")
    for name, value in shares.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={value!r} is neither True nor False.")
        if value and data_parallel is False:
            raise ArgumentError(f"{name}=True divides work between processes: give data_parallel=True as well.")


def _calls_between_checks(check: int | None) -> int:
    """The number of calls from one check to the next, 0 for no checks."""
    source, value = "check", check
    if check is None:
        source, value = "MILLSTREAM_CHECK", os.environ.get("MILLSTREAM_CHECK") or 0
    try:
        number = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1
    if isinstance(check, bool) or number < 0 or (check is not None and number != check):
        raise ArgumentError(f"{source} is a number of calls, 0 for no checks, not {value!r}.")
    return number
