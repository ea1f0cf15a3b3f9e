"""Compiled Triton kernels as Inductor's own cache keeps them: machine code by name, and how it is launched.

From its source a kernel is found in Triton's cache only after the source was run, parsed and hashed: some 0.1 s each.
What is kept here skips that; the machine code stays in Triton's cache. Where it is gone, the source is compiled.

It is a pickle, which runs code when it is read. So is the source beside it, and both lie in a folder that is the user's
alone (``records.py``).

Private APIs of Inductor, those of its ``TritonBundler``; tried on torch 2.11 and 2.13, and without a GPU.
"""

from __future__ import annotations

import ast
import base64
import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import StaticAutotunerFuture
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

#: For each kernel the key that Inductor knows its source by, and the kernel.
KeptTuners = list[tuple[str, str]]


def encode_tuners(kernels: Iterable[tuple[Any, str]]) -> KeptTuners:
    """Write kernels, each given as compiled and as it was defined; those that Triton itself must launch are left out.

    The kernels may be in use meanwhile, and stay as they are.
    """
    kept = []
    for compiled, definition in kernels:
        with suppress(Exception):  # whatever cannot be written is compiled from its source
            if isinstance(compiled, CachingAutotuner) and compiled.is_statically_launchable():
                kept.append((_key_of(definition), base64.b64encode(_pickle(compiled)).decode()))
    return kept


def offer_tuners(kept: KeptTuners) -> None:
    """Let Inductor find these kernels when it is asked to compile their sources."""
    for key, data in kept:
        with suppress(Exception):  # of another version, or without its machine code: then it is compiled
            tuner = pickle.loads(base64.b64decode(data))  # noqa: S301  as trusted as the source, see above
            for result in tuner.compile_results:
                result.reload_cubin_path()
            tuner.restore_after_unpickle(None)
            CompiledTritonKernels._cache[key] = StaticAutotunerFuture(tuner)


def _key_of(definition: str) -> str:
    """The key for a definition ``async_compile.triton(name, source, ...)``."""
    call = ast.parse(definition.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    return str(CompiledTritonKernels.key(ast.literal_eval(call.args[1])))


def _pickle(tuner: CachingAutotuner) -> bytes:
    bare: Any = CachingAutotuner.__new__(type(tuner))
    vars(bare).update(vars(tuner), launchers=[], _reload_kernel=None)
    vars(bare).pop("benchmark_all_configs", None)  # ours, see ``tuning.py``
    before = bare.prepare_for_pickle()  # of the function, which both share
    try:
        return pickle.dumps(bare)
    finally:
        bare.restore_after_unpickle(before)
