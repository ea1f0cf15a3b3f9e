"""What the rest of the library asks of these kernels: which nodes they compute, and what is compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from millstream.kernels.family import NodeWriter
from millstream.kernels.launches import TritonLaunch
from millstream.kernels.rows.attention import (
    AttentionPart,
    attend_parts,
    bind_attention,
    join_parts,
    launch_join,
    launch_parts,
)
from millstream.kernels.rows.head_products import HeadProduct, bind_heads, launch_heads, multiply_heads
from millstream.kernels.rows.row_products import RowProduct, bind_product, launch_product, multiply_rows
from millstream.program import Program


def bind_rows(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a product of a few rows, or for attention of a few queries."""
    return bind_product(node) or bind_heads(node) or bind_attention(node)


def find_row_launches(program: Program) -> Iterator[TritonLaunch]:
    """The launches of these kernels, for tensors that are not there yet."""
    for call in program.calls:
        if call.target in (multiply_rows, multiply_heads, attend_parts, join_parts):
            arguments = program.described([*call.args, call.kwargs["out"]])
            if call.target is multiply_rows:
                yield launch_product(RowProduct(*arguments))
            elif call.target is multiply_heads:
                yield launch_heads(HeadProduct(*arguments))
            elif call.target is attend_parts:
                yield launch_parts(AttentionPart(*arguments))
            else:
                parts, heads, out = arguments
                yield launch_join(parts, heads, out)
