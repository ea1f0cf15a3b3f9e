"""``scatter_reduce`` with ``include_self=False`` leaves out what was there before.

Where PyTorch's own kernel computes it, as for all but sums, the FX wrapper passed on how to reduce and no more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.wrapper_fxir import FxConverter

from millstream._torch.workarounds import Workaround, replaced


@contextlib.contextmanager
def _pass_all_options() -> Iterator[None]:
    call = FxConverter._generate_fallback_call

    def call_with_options(self: Any, node: Any, args: Any = None, kwargs: Any = None) -> None:
        if isinstance(node, ir.ScatterFallback):
            known = {argument.name for argument in node.op_overload._schema.arguments}  # type: ignore[union-attr]
            kwargs = {name: value for name, value in node.kwargs.items() if name in known}
        call(self, node, args, kwargs)

    with replaced(FxConverter, "_generate_fallback_call", call_with_options):
        yield


WORKAROUND = Workaround(
    "pytorch#175860",
    "wrong numbers of scatter_reduce with include_self=False",
    until=(2, 12),
    lowering=_pass_all_options,
)
