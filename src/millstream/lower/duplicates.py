"""What a graph for inference computes twice is computed once.

Autograd's partitioner and Inductor's freezing see to it in their graphs; nobody does in a plain one for inference. Each
of NASNet-A's cells applies relu to what the one before it has done as well: 6.6 MB written twice.

Private APIs, tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch
from torch._functorch.compile_utils import fx_graph_cse

from millstream.lower.operators import draws_random_numbers


def compute_once(graph: torch.fx.GraphModule) -> None:
    """Leave out what is there already. Results stay tensors of their own, and random numbers are drawn anew."""
    if not any(draws_random_numbers(node.target) for node in graph.graph.nodes):
        graph.graph = fx_graph_cse(graph.graph)
