"""Public helpers for tests: graphs to try things on, plans to break."""

from millstream.testing.graphs import chain_graph, random_graph, towers_graph

__all__ = ["chain_graph", "random_graph", "towers_graph"]
