"""Programs that copy state, run eagerly and through the library; after each call all values must be the same."""

from __future__ import annotations

import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch._inductor.codegen.wrapper import KernelDefinitionLine

import millstream as ms
from millstream.api.explaining import _compiler_of
from millstream.errors import FallbackWarning
from millstream.lower.inductor import fx_wrapper, generated_kernels
from millstream.lower.inductor.cpp_kernels import CppKernels
from tests.capture.copies.programs import Program

CALLS = 3
LARGEST = 2.0**21
"""Values beyond are not compared: float32 has halves up to here."""


@dataclass(frozen=True)
class Outcome:
    """How a program went.

    Attributes:
        is_valid: Whether eager runs it at all.
        is_captured: Whether there are graphs of it, and nothing ran eagerly.
        refusals: Why anything ran eagerly.
    """

    is_valid: bool = True
    is_captured: bool = False
    refusals: tuple[str, ...] = ()


class WrongError(AssertionError):
    """A result or a piece of state is not eager's."""


def run(program: Program | str, device: str = "cpu", *, lowered_only: bool = False, wrap: str = "") -> Outcome:
    """Call a program eagerly and through the library, and compare after each call all that it returns or changes.

    Args:
        program: What to run, or its source; it is made twice.
        device: Where its tensors are.
        lowered_only: Whether its kernels do nothing; then nothing is compared.
        wrap: As ``Program.wrap``, for a source.

    Raises:
        WrongError: Something differs; the message has the seed and the source.
    """
    source = program if isinstance(program, str) else program.source
    wrap = wrap if isinstance(program, str) else program.wrap
    make = _load(source)
    with torch.device(device):
        (ours, our_arguments, our_state), (theirs, their_arguments, their_state), tried = make(), make(), make()
    if not _runs(*tried):
        return Outcome(is_valid=False)
    torch._dynamo.reset()
    is_step = wrap in ("step", "training")
    wrapped: Any = ms.step(ours) if is_step else ms.compile(ours)
    earlier: list[tuple[Any, Any, Any, Any]] = []
    reasons: dict[str, None] = {}
    for call in range(CALLS):
        our_inputs, their_inputs = (
            _inputs(each, call) for each in ((our_arguments, our_state), (their_arguments, their_state))
        )
        with _reasons(reasons), kernels_do_nothing() if lowered_only else nullcontext():
            found = wrapped(*our_inputs)
        if lowered_only:
            if call or wrap != "training":  # whose first call runs eagerly, as the optimizer has no state yet
                break
            continue
        expected = theirs(*their_inputs)
        pairs = [*zip((*found, *our_inputs, *our_state), (*expected, *their_inputs, *their_state), strict=True)]
        if any(their.abs().max() > LARGEST for _, their in pairs if their.numel()):
            break
        try:
            for number, (our, their) in enumerate(pairs):
                _compare(
                    our, their, f"tensor {number} of {len(found)} results, {len(our_inputs)} arguments and the state"
                )
            for our, their, our_copy, their_copy in earlier:
                if torch.equal(their, their_copy):
                    _compare(our, our_copy, "a result of an earlier call")
        except AssertionError as error:
            seed = "" if isinstance(program, str) else f"seed {program.seed}, "
            raise WrongError(f"{seed}{wrap}, call {call}: {error}\n{source}") from None
        earlier += [(our, their, our.clone(), their.clone()) for our, their in zip(found, expected, strict=True)]
    graphs = wrapped.graphs if is_step else _compiler_of(wrapped).graphs
    return Outcome(is_captured=bool(graphs) and not reasons, refusals=tuple(reasons))


def _runs(function: Callable[..., Any], arguments: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> bool:
    """Whether eager takes a program."""
    try:
        results = function(*_inputs((arguments, state), 0))
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    return all(isinstance(each, torch.Tensor) for each in results)


def _inputs(given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]], call: int) -> list[torch.Tensor]:
    """The arguments of a call: state as it is, and batches of its own."""
    arguments, state = given
    return [each if any(each is held for held in state) else each.clone() + call for each in arguments]


@contextmanager
def _reasons(found: dict[str, None]) -> Iterator[None]:
    """Note why anything ran eagerly."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    for each in warned:
        if issubclass(each.category, FallbackWarning):
            found[str(each.message)] = None


def _compare(our: torch.Tensor, their: torch.Tensor, name: str) -> None:
    same = our.dtype == their.dtype and our.shape == their.shape and torch.equal(our, their)
    assert same, f"{name}: {_shown(our)} instead of {_shown(their)}"


def _shown(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {value.detach().flatten()[:24].tolist()}"


@contextmanager
def kernels_do_nothing() -> Iterator[None]:
    """Lower without compiling C++: what was lowered computes nothing. Not for a process that goes on to compute."""

    def pretend(prologue: str, lines: Sequence[Any], _: Any) -> Any:
        definitions = [line for line in lines if isinstance(line, KernelDefinitionLine)]
        kernels = {line.kernel_name: (lambda *args: None, line.kernel_body) for line in definitions}
        return kernels, generated_kernels.Sources(prologue, ())

    with patch.object(fx_wrapper, "import_kernels", pretend), patch.object(CppKernels, "add", lambda *args: None):
        yield


def _load(source: str) -> Callable[[], Any]:
    name = f"copies_{crc32(source.encode())}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = sys.modules["copies"] = types.ModuleType("copies")  # where Dynamo looks
    exec(compile(source, name, "exec"), vars(module))
    return module.make  # type: ignore[no-any-return]
