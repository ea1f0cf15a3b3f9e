"""Weights that kernels of ours may read before the kernel in front of them has ended.

A kernel that starts early (``early``) would wait for the kernel in front, and then for its weights, which have been
there for long. Only the plan knows whether they have: it may put the kernel that makes a weight right in front of the
one that reads it. So here it is noted what may be read sooner, and who issues the kernels decides
(``engine.early_reads``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millstream.lower.convolutions.dense import (
    convolve_dense,
    convolve_dense_partials,
    convolve_dense_together,
    reduce_dense_partials,
)
from millstream.lower.convolutions.siblings import FAMILIES
from millstream.lower.program import Call, Program


def note_early_reads(program: Program) -> Program:
    """Note for each kernel of ours which weights it could read early: those that the program does not change."""
    together = {family.together for family in FAMILIES.values()}
    ours = {convolve_dense_partials, reduce_dense_partials, *FAMILIES, *together}

    def noted(call: Call) -> Call:
        if call.target not in ours:
            return call
        weights = [weight.name for _, weight, *_ in _convolutions(call)]
        return replace(call, early=tuple(name for name in weights if program.base(name) not in program.mutated))

    return replace(program, calls=tuple(map(noted, program.calls)))


def _convolutions(call: Call) -> Sequence[Any]:
    """The convolutions of a call that can read early, as ``Dense`` has them."""
    if call.target is convolve_dense:
        return [call.args]
    return call.args if call.target is convolve_dense_together else ()
