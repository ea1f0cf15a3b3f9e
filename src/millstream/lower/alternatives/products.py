"""Products by Inductor's Triton templates in place of cuBLAS, each with what follows it as its epilogue.

Inductor chooses between the two by timing products alone, where cuBLAS nearly always wins; that the template also saves
the kernel after it, only the whole program shows.

Private APIs, tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config, utils
from torch._inductor.lowering import lowerings

from millstream.lower.alternatives.alternative import PRODUCTS, Alternative, Sites, name_product, on_gpu, products_of

FEWEST_ROWS = 16  # of a tile of tensor cores

Options = Mapping[str, Mapping[str, Any]]
"""Of Inductor, by what products have in common."""


@contextmanager
def with_options(options: Options) -> Iterator[None]:
    """Let Inductor lower some products under options of their own. Not for several threads at once."""
    usual: dict[Any, Any] = {target: lowerings[target] for target in PRODUCTS if options and target in lowerings}
    for target, lower in usual.items():
        lowerings[target] = _choosing(lower, options)
    try:
        yield
    finally:
        lowerings.update(usual)


def _choosing(lower: Callable[..., Any], options: Options) -> Callable[..., Any]:
    def lower_product(*args: Any, **kwargs: Any) -> Any:
        rows, columns = args[-2:]
        found = options.get(name_product(rows.get_size(), columns.get_size(), rows.get_dtype()))
        if found is None:
            return lower(*args, **kwargs)
        getattr(utils.use_decompose_k_choice, "cache_clear", lambda: None)()  # it remembers by sizes alone
        with config.patch(dict(found)):
            return lower(*args, **kwargs)

    return lower_product


def _find(graph: torch.fx.Graph) -> Sites:
    sites: dict[str, list[float]] = defaultdict(list)
    for node, group, weight in products_of(graph) if on_gpu(graph) else ():
        value = node.meta["val"]
        if min(*value.shape, node.args[-1].meta["val"].shape[0]) >= FEWEST_ROWS:  # type: ignore[union-attr]
            sites[group].append(weight)
    return sites


_TRITON = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.num_decompose_k_splits": 0,  # of those TorchInductor makes a graph within the graph, which is no kernel
}

TEMPLATES = Alternative(
    "triton-products",
    "products are Triton's, with what follows as their epilogue",
    _find,
    of_products=_TRITON,
)
