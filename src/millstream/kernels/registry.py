"""All kernels of our own: the one list of their families, and what the rest of the library asks of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from millstream import kernels
from millstream._torch.workarounds import left_out
from millstream.kernels import channels_last, cudnn, horizontal_fusion
from millstream.kernels.conv2d import channels, conv2d, conv2d_writer, epilogues, linear, split_k
from millstream.kernels.depthwise import depthwise, prologues
from millstream.kernels.family import Epilogue, Family, Grouping, NodeWriter
from millstream.kernels.launches import TritonLaunch, compiling
from millstream.kernels.nodes import depths_of, values
from millstream.kernels.rows import attention_patterns, head_patterns, product_patterns
from millstream.kernels.rows.row_launches import bind_rows, find_row_launches
from millstream.kernels.weights import weight_layouts, weights
from millstream.program import Program

SWITCH = "own-kernels"
"""Switches all families off, as ``options={"own_kernels": False}`` does."""

ROWS = "rows"
"""What alternatives to the usual kernels compute by."""

FAMILIES: tuple[Family, ...] = (
    Family(
        "conv2d",
        "convolutions and linear layers with few products, and what follows them",
        rewrite_images=(channels.align_channels, epilogues.absorb_epilogues),
        rewrite=(linear.take_linear_layers,),
        operators=(conv2d.CONVOLVE,),
        bind=conv2d_writer.bind_conv2d,
        grouping=conv2d.GROUPING,
        kernels=frozenset({"conv2d", "reduce_partials"}),
    ),
    Family(
        "depthwise",
        "depthwise convolutions with few results, and what comes before them",
        rewrite_images=(prologues.absorb_prologues,),
        operators=(depthwise.CONVOLVE_DEPTHWISE,),
        bind=depthwise.bind_depthwise,
        grouping=depthwise.GROUPING,
        kernels=frozenset({"depthwise"}),
    ),
    Family(
        "weights",
        "copies of small weights with their channels last",
        rewrite_images=(weight_layouts.take_conversions,),
        bind=weights.bind_weight,
        grouping=weights.GROUPING,
        kernels=frozenset({"convert"}),
    ),
    Family(
        "cudnn",
        "cuDNN's convolutions write into the plan's memory, with bias and relu",
        bind=cudnn.bind_cudnn,
        absorb=cudnn.absorb_bias_and_relu,
    ),
    Family(
        "horizontal-fusion",
        "several of our kernels that are alike are one launch",
        fuse=lambda program: horizontal_fusion.fuse_horizontally(program, _groupings()),
        launches=lambda program: horizontal_fusion.find_joint_launches(program, _groupings()),
    ),
    Family(
        "split-k",
        "long sums of few results are split",
        fuse=split_k.split_long_sums,
        launches=split_k.find_split_launches,
    ),
    Family(
        ROWS,
        "products of a few rows, and attention of a few queries",
        bind=bind_rows,
        launches=find_row_launches,
        kernels=frozenset({"multiply", "multiply_heads", "attend", "join_attention"}),
    ),
)

PASSES = (
    channels_last.keep_strides,
    *(each for family in FAMILIES for each in family.rewrite_images),
    *(each for family in FAMILIES for each in family.rewrite),
)
"""What changes a graph for inference, in this order."""


def families() -> list[Family]:
    """Return those that are not switched off."""
    off = left_out()
    return [] if SWITCH in off else [each for each in FAMILIES if each.name not in off]


def _groupings() -> list[Grouping]:
    return [each.grouping for each in families() if each.grouping is not None]


@functools.cache
def _sources() -> str:
    """A digest of the code of all. A number that somebody has to raise would be forgotten, and old times believed."""
    digest = hashlib.sha256()
    for source in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def version() -> str:
    """Another name for other code, or other families: times of the one say nothing of the other."""
    return " ".join([_sources(), *(each.name for each in families())])


def is_generated(name: str) -> bool:
    """Return whether the code of this name on a GPU is Triton's, by TorchInductor or of our own, and no library's."""
    return name.startswith("triton_") or any(name in each.kernels for each in FAMILIES)


# --- before Inductor -------------------------------------------------------------------------------------------------


def rewrite(gm: torch.fx.GraphModule) -> bool:
    """Change a graph of aten operators for inference, in place, as our kernels compute it.

    Returns:
        Whether Inductor is to put the channels of images last, which it would decide of the graph as it was.
    """
    known = families()
    is_last = any(each.rewrite_images for each in known) and channels_last.puts_channels_last(gm)
    if is_last:
        channels_last.keep_strides(gm)
        for family in known:
            for each in family.rewrite_images:
                each(gm)
    for family in known:
        for each in family.rewrite:
            each(gm)
    return is_last


def known_to_inductor() -> AbstractContextManager[None]:
    """Let Inductor take our convolutions for its own where it decides which images are to have their channels last."""
    return channels_last.taken_for_convolutions([operator for each in families() for operator in each.operators])


def find_launches(graph: torch.fx.Graph) -> Iterator[TritonLaunch]:
    """The kernels of our own that a graph of aten operators probably comes to.

    Inductor's fusion and layouts are not known yet: it is assumed that what lies equally deep here, does so in the
    program, and that memory is laid out as our kernels need it. What is wrong about that costs only time to compile.
    """
    depths, tasks = depths_of(graph), []
    for node in graph.nodes:
        for family in families():
            writer = family.bind(node) if family.bind is not None and family.grouping is not None else None
            if writer is not None and family.grouping is not None:
                task = family.grouping.task(*values(writer.arguments), node.meta["val"])
                need = min((depths[user] for user in node.users), default=0)
                tasks.append(horizontal_fusion.Own(family.grouping, task, depths[node], need))
                break
    for group in horizontal_fusion.divide(tasks):
        yield from tasks[group[0]].grouping.launches([tasks[i].task for i in group])


# What alternatives compute by our kernels: where that can be had, and how it is put in place (``rows``).
find_row_products, rewrite_row_products = product_patterns.find_products, product_patterns.rewrite_products
find_row_heads, rewrite_row_heads = head_patterns.find_heads, head_patterns.rewrite_heads
find_row_attention, rewrite_row_attention = attention_patterns.find_attention, attention_patterns.rewrite_attention


# --- after Inductor --------------------------------------------------------------------------------------------------


def find_writer(node: torch.fx.Node) -> NodeWriter | None:
    """Return what computes a node into memory that it is given; ``None`` where nothing does."""
    for family in families():
        writer = family.bind(node) if family.bind is not None else None
        if writer is not None and writer.fits:
            return writer
    return None


def find_epilogue(node: torch.fx.Node) -> Epilogue | None:
    """Return what a generated kernel of the wrapper is part of, if another kernel can do it at once."""
    for family in families():
        found = family.absorb(node) if family.absorb is not None else None
        if found is not None and (writer := find_writer(found.result)) is not None and writer.function is found.of:
            return found
    return None


def fuse(program: Program) -> Program:
    """Let kernels of our own that are alike become one launch, and long sums two, and compile them."""
    for family in families():
        if family.fuse is not None:
            program = family.fuse(program)
    with compiling(launch for each in families() if each.launches for launch in each.launches(program)):
        return program
