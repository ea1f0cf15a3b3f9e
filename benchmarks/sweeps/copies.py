"""Random programs that copy, swap and update pieces of state, through ``ms.compile`` and ``ms.step``, against eager.

The cases are ``compiled-0`` to ``compiled-1999``, whose values are compared, and ``lowered-2000`` to ``lowered-19999``,
whose kernels are not compiled: of those it counts whether the check of old values refuses them, with operators of lists
lowered as on a GPU. The number is the seed of ``tests.capture.copies.programs.make_program``.
``tests/gpu/test_random_copies.py`` runs some of them on a GPU, with larger tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

# Before torch is imported: tensors are tiny, and each process compiles for itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("MILLSTREAM_WARM_START", "0")

from benchmarks.sweeps.sweep import Outcome, Result, Sweep, main
from tests.capture.copies.programs import make_program
from tests.capture.copies.running import WrongError, run
from tests.lower.workarounds.lists import lists_as_on_a_gpu

COMPILED, ALL = 2_000, 20_000


def list_cases() -> Iterator[str]:
    yield from (f"compiled-{seed}" for seed in range(COMPILED))
    yield from (f"lowered-{seed}" for seed in range(COMPILED, ALL))


def run_case(case: str, device: str) -> Result:  # noqa: ARG001  always the CPU
    """Run one program, and compare it with eager."""
    kind, _, seed = case.partition("-")
    program = make_program(int(seed))
    is_lowered = kind == "lowered"
    try:
        with lists_as_on_a_gpu() if is_lowered else nullcontext():
            outcome = run(program, lowered_only=is_lowered)
    except WrongError as error:
        return Result(case, Outcome.WRONG, str(error).partition("\n")[0])
    except (IndexError, RuntimeError) as error:
        if not (is_lowered and "out of bounds" in str(error)):
            raise
        return Result(case, Outcome.NOT_COMPARABLE, "a library's kernel indexes by what was not computed")
    if not outcome.is_valid:
        return Result(case, Outcome.NOT_COMPARABLE, "eager refuses it")
    if not outcome.is_captured:
        return Result(case, Outcome.FELL_BACK, "; ".join(outcome.refusals) or "nothing was captured")
    return Result(case, Outcome.EQUAL, program.wrap)


def load() -> None:
    """Let the compiler make its tables once, before cases fork."""
    run(make_program(0), lowered_only=True)


SWEEP = Sweep(
    "benchmarks.sweeps.copies",
    "Copies of state: random programs through `ms.compile` and `ms.step`",
    lambda: [*list_cases()],
    run_case,
    load=load,
    limit_s=300,
)

if __name__ == "__main__":
    main(SWEEP)
