"""All alternatives to the usual kernels, in the order in which they are tried."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from millstream._torch.workarounds import left_out, without
from millstream.kernels import registry
from millstream.lower.alternatives.alternative import WHOLE, Alternative, Sites, on_gpu
from millstream.lower.alternatives.few_rows import FEW_ROWS, TUNED_ROWS
from millstream.lower.alternatives.products import TEMPLATES, with_options
from millstream.lower.alternatives.row_kernels import HEAD_PRODUCTS, ROW_PRODUCTS, SPLIT_ATTENTION
from millstream.lower.alternatives.siblings import SIBLINGS
from millstream.schedule.improve import NOTHING, Choice, Offer

SWITCH = "alternatives"
"""Switches all of them off, as ``options={"alternatives": False}`` does."""

FIXED: Choice = NOTHING
"""What a program has where no clock may decide: the usual kernels, as none is known to be faster on every device."""


def _whole_on_gpu(graph: torch.fx.Graph) -> Sites:
    return {WHOLE: [1.0]} if on_gpu(graph) else {}


def _with_own_kernels(graph: torch.fx.Graph) -> Sites:
    """Graphs that our own families have something to do in: asked of a copy, which they change."""
    if registry.SWITCH in left_out() or not on_gpu(graph):
        return {}
    twin = torch.fx.GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph))
    registry.rewrite(twin)
    return {WHOLE: [1.0]} if any(True for _ in registry.find_launches(twin.graph)) else {}


ALTERNATIVES: tuple[Alternative, ...] = (
    SIBLINGS,
    SPLIT_ATTENTION,
    ROW_PRODUCTS,
    HEAD_PRODUCTS,
    FEW_ROWS,
    TUNED_ROWS,
    TEMPLATES,
    Alternative(
        "combo-kernels",
        "small kernels that do not wait for each other are one",
        _whole_on_gpu,
        options={"combo_kernels": True},
    ),
    Alternative(
        "coordinate-descent",
        "block sizes of generated kernels are searched for one by one",
        _whole_on_gpu,
        options={"coordinate_descent_tuning": True},
    ),
    Alternative(
        "library-kernels",
        "convolutions and linear layers are libraries' where kernels of our own compute them",
        _with_own_kernels,
        without=tuple(each.name for each in registry.FAMILIES if each.name != registry.ROWS),  # which others choose
    ),
)


def alternatives() -> list[Alternative]:
    """Return those that are not switched off."""
    off = left_out()
    return [] if SWITCH in off else [each for each in ALTERNATIVES if each.name not in off]


def find_offers(graph: torch.fx.Graph, *, is_step: bool, is_all: bool) -> tuple[Offer, ...]:
    """Return where in a graph of aten operators there are alternatives.

    Steps have no kernels of our own to do without.
    """
    return tuple(
        Offer(each.name, group, len(weights), sum(weights), is_alone=group != WHOLE)
        for each in alternatives()
        if (is_all or each.is_usual) and not (is_step and each.without)
        for group, weights in each.find(graph).items()
    )


def rewrite_for(choice: Choice, gm: torch.fx.GraphModule) -> None:
    """Change a graph of aten operators, in place, as the alternatives of a choice have it."""
    for each in ALTERNATIVES:
        if each.rewrite is not None and (groups := _groups_of(each, choice)):
            each.rewrite(gm, groups)


@contextmanager
def options_of(choice: Choice) -> Iterator[Mapping[str, Any]]:
    """Options of Inductor for a choice, in whose ``with`` block it is lowered."""
    chosen = [each for each in ALTERNATIVES if _groups_of(each, choice)]
    of_products: dict[str, Mapping[str, Any]] = {}
    for each in chosen:
        if each.of_products:
            of_products.update(dict.fromkeys(_groups_of(each, choice), each.of_products))
    with ExitStack() as stack:
        stack.enter_context(without(name for each in chosen for name in each.without))
        stack.enter_context(with_options(of_products))
        yield {name: value for each in chosen for name, value in each.options.items()}


def _groups_of(alternative: Alternative, choice: Choice) -> Collection[str]:
    return {group for name, group in choice if name == alternative.name}
