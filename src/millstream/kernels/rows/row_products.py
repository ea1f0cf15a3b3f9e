"""Products of a few rows with a weight, and what comes before and after them, by a kernel of our own.

One token of a text reads every weight once, and computes next to nothing: its time is that of memory. Libraries and
TorchInductor's sums read at half its speed, and each kernel begins only when the one before has ended. Ours asks for
its weight before that (``early_loads.py``), and computes the norm before it in every block anew, rather than
by a kernel of one block that all others wait for. Sums are in single precision and in a fixed order.

Tried on torch 2.11, Triton 3.6.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from millstream.graph import KernelKind
from millstream.kernels.conv2d.conv2d_tiles import ceil_div
from millstream.kernels.early_loads import may_load_early
from millstream.kernels.family import NodeWriter
from millstream.kernels.launches import TritonLaunch, dependent_launch_options
from millstream.kernels.nodes import arguments_of

MOST_ROWS = 8
"""More make the sums take longer than the weight."""

MOST_LENGTH = 24_576
"""Of a row: the registers of a block hold its whole part of the weight."""

NORMS = ("", "rms", "layer")
ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")
DTYPES = (torch.float16, torch.bfloat16)
_AT_ONCE = 16  # numbers: what rows are multiples of, so that all loads are of 16 bytes
_TILE_LENGTH = 2048
_SHORTEST_TILE, _MOST_TILES = 256, 16  # of those that divide a row
_HELD = 22 * _TILE_LENGTH
"""Numbers of the weight that a block holds at most, in 176 registers of each thread: with more, ptxas spills (Triton
3.6, sm_90), which cost a product of 5632 by 2048 17 µs on an H200."""
_HELD_WITH_MASKS, _HELD_WITH_ROWS = 16 * _TILE_LENGTH, 10 * _TILE_LENGTH
"""The same where tiles do not divide the weight, and where there is more than one row."""
_NUM_WARPS = 4
_FEW = 1024  # results, of which eight a block would leave multiprocessors without any


def is_row_product(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether our kernel can multiply these rows, in memory one after the other, with a weight's.

    Args:
        rows: Of ``[number, length]``, real or fake.
        weight: Of ``[width, length]``.
    """
    number, length = rows.shape
    return (
        0 < number <= MOST_ROWS
        and weight.dtype in DTYPES
        and length % _AT_ONCE == 0
        and 0 < length <= MOST_LENGTH
        and weight.shape[0] > 0
        and weight.is_contiguous()
    )


class RowProduct(NamedTuple):
    """A product of rows with a weight, the norm before it, and what follows.

    Attributes:
        rows: Contiguous, ``[number, length]``.
        weight: Contiguous, ``[width, length]``: a result is a row times one of its rows.
        gate: Another such weight, whose products, activated, are factors of the results.
        bias: Added to each row of results, before anything else.
        scale: By which rows are multiplied after the norm.
        shift: Which is then added to them.
        addend: Added to the results at last, of their shape.
        norm: One of ``NORMS``.
        eps: Of the norm.
        activation: One of ``ACTIVATIONS``.
        is_constant: Whether no kernel of the program writes the weights.
        out: Contiguous, ``[number, width]``.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    addend: torch.Tensor | None
    norm: str
    eps: float
    activation: str
    is_constant: bool
    out: torch.Tensor


def multiply_rows(*arguments: Any, out: torch.Tensor) -> None:
    """Compute what ``RowProduct`` says."""
    launch_product(RowProduct(*arguments, out=out)).run()


def launch_product(product: RowProduct) -> TritonLaunch:
    """Return how to compute a product."""
    from millstream.kernels.rows.row_products_kernel import multiply  # Triton is there where there is a GPU

    rows, weight, gate, bias, scale, shift, addend, norm, eps, activation, is_constant, out = product
    width, length = weight.shape
    tile_width, tile_length = tiles_of(rows.shape[0], width, length, has_gate=gate is not None)
    factors = (weight, gate) if gate is not None else (weight,)
    is_early = is_constant and all(map(may_load_early, factors))
    arguments = (*(rows if each is None else each for each in product[:7]), out, 0 if is_early else 2, eps)
    constants = {
        "NUM_ROWS": rows.shape[0],
        "LENGTH": length,
        "WIDTH": width,
        "NORM": NORMS.index(norm),
        "ACTIVATION": ACTIVATIONS.index(activation),
        "HAS_GATE": gate is not None,
        "HAS_BIAS": bias is not None,
        "HAS_SCALE": scale is not None,
        "HAS_SHIFT": shift is not None,
        "HAS_ADDEND": addend is not None,
        "TILE_WIDTH": tile_width,
        "TILE_LENGTH": tile_length,
        "NUM_TILES": ceil_div(length, tile_length),
        "IS_WHOLE": length % tile_length == width % tile_width == 0,
        **dependent_launch_options(rows.device),
        "num_warps": _NUM_WARPS,
    }
    return TritonLaunch(multiply, (ceil_div(width, tile_width), 1, 1), arguments, constants)


def tiles_of(num_rows: int, width: int, length: int, *, has_gate: bool) -> tuple[int, int]:
    """How many results a block has, as many as its registers hold the weights of; and numbers of a row at a time."""
    divides = length & -length  # the largest power of two that does
    is_whole = divides >= _SHORTEST_TILE and length <= _MOST_TILES * divides
    tile_length = min(_TILE_LENGTH, divides if is_whole else 1 << (length - 1).bit_length())
    held = _HELD_WITH_ROWS if num_rows > 1 else _HELD if is_whole else _HELD_WITH_MASKS
    tile = 4 if has_gate or width <= _FEW else 8
    while tile > 1 and tile * (1 + has_gate) * ceil_div(length, tile_length) * tile_length > held:
        tile //= 2
    return tile, tile_length


_library = torch.library.Library("millstream", "FRAGMENT")
_library.define(
    "multiply_rows(Tensor rows, Tensor weight, Tensor? gate, Tensor? bias, Tensor? scale, Tensor? shift, "
    "Tensor? addend, str norm, float eps, str activation, bool is_constant, ScalarType dtype) -> Tensor"
)
MULTIPLY = torch.ops.millstream.multiply_rows.default


@torch.library.impl(_library, "multiply_rows", "CompositeExplicitAutograd")
def _multiply(  # noqa: PLR0913  as the operator has them
    rows: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    addend: torch.Tensor | None,
    norm: str,
    eps: float,
    activation: str,
    is_constant: bool,  # noqa: ARG001  which is about when, not what
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return what the operator means; programs call ``multiply_rows`` in its place."""
    x = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if norm:
        x = x - x.mean(1, keepdim=True) if norm == "layer" else x
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    x = x if scale is None else x * scale
    x = x if shift is None else x + shift
    result = x @ weight.to(x.dtype).t()
    result = result if bias is None else result + bias
    if gate is not None:
        result = activated(x @ gate.to(x.dtype).t(), activation) * result
    else:
        result = activated(result, activation)
    return (result if addend is None else result + addend).to(dtype)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return what one of ``ACTIVATIONS`` makes of numbers."""
    functions: dict[str, Any] = {
        "": lambda x: x,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
    return functions[activation](x)  # type: ignore[no-any-return]


@torch.library.register_fake("millstream::multiply_rows", lib=_library)
def _(rows: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.empty(rows.shape[0], weight.shape[0], dtype=options[-1], device=rows.device)


@register_flop_formula(MULTIPLY.overloadpacket)
def _count_flops(rows: list[int], weight: list[int], gate: list[int] | None = None, **_: Any) -> int:
    return 2 * rows[0] * math.prod(weight) * (1 if gate is None else 2)


def bind_product(node: torch.fx.Node) -> NodeWriter | None:
    """Our kernel for a product of rows."""
    if node.target is not MULTIPLY:
        return None
    *arguments, _ = arguments_of(node)
    gate, bias, _, _, addend, norm, _, activation = arguments[2:10]
    parts = {f"{norm} norm": norm, "bias": bias, "gate": gate, activation: activation, "sum": addend}
    told = [part for part, given in parts.items() if given]
    name = multiply_rows.__name__ + (f" with {', '.join(told)}" if told else "")
    ops = (*[f"{norm}_norm"] * bool(norm), "linear", *[activation] * bool(activation), *["add"] * (addend is not None))
    tensors = tuple(each for each in arguments if isinstance(each, torch.fx.Node))
    return NodeWriter(multiply_rows, tuple(arguments), name, KernelKind.GEMM, ops, contiguous=tensors)
