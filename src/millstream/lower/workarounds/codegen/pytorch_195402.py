"""Throw again, after a parallel region, what a C++ kernel throws within it.

Inductor checks indices in the loops that it shares among OpenMP threads. No exception may leave those: an index out of
range, for which a small kernel raises an error, ends the process where there is enough work for several threads.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from torch._inductor.codegen.cpp import KernelGroup

from millstream._torch.workarounds import Workaround, replaced

_DECLARE = "std::atomic<bool> has_failed{false}; std::exception_ptr failure;"
_TRY = "if (!has_failed.load(std::memory_order_relaxed)) try {"  # later loops would read what was not written
_CATCH = "} catch (...) { if (!has_failed.exchange(true)) failure = std::current_exception(); }"
_RETHROW = "if (failure) std::rethrow_exception(failure);"

_REGION = re.compile(r" *#pragma omp parallel\b")
_SHARED = re.compile(r" *#pragma omp (?:single|for(?:.* collapse\((?P<depth>\d+)\))?)")


def catch_in_regions(code: str) -> str:
    """The code of a kernel, with ``try`` in each part of a parallel region whose work is shared among threads."""
    if "TORCH_CHECK(" not in code or not _REGION.search(code):
        return code
    lines: list[str] = []
    ends: list[tuple[str, str, str]] = []  # the line that ends a block, and what comes before and after that
    within, depth = (_DECLARE, "", ""), 1  # what comes into the block so many braces further on, at its end, after it
    for line in code.splitlines():
        if ends and line == ends[-1][0]:
            _, before, after = ends.pop()
            lines += [before, line, after]
            continue
        lines.append(line)
        if _REGION.match(line):
            within, depth = ("", "", _RETHROW), 1
        elif shared := _SHARED.match(line):
            within, depth = (_TRY, _CATCH, ""), int(shared["depth"] or 1)
        elif line.strip() == "{" and depth:
            depth -= 1
            if not depth:
                first, before, after = within
                lines.append(first)
                ends.append((line.replace("{", "}"), before, after))
    return "\n".join(filter(None, lines)) + "\n"


@contextlib.contextmanager
def _catch() -> Iterator[None]:
    write = KernelGroup.codegen_group

    def write_and_catch(self: Any, *args: Any, **kwargs: Any) -> str:
        return catch_in_regions(write(self, *args, **kwargs))

    with replaced(KernelGroup, "codegen_group", write_and_catch):
        yield


WORKAROUND = Workaround(
    "pytorch#195402",
    "an index out of range ends the process, where a C++ kernel works on several threads",
    lowering=_catch,
)
