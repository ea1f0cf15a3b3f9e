"""Graph → graph, before lowering: what makes a better kernel graph than the one that PyTorch traced."""

from millstream.passes.gradients import split_gradients

__all__ = ["split_gradients"]
