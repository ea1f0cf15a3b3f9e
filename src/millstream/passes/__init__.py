"""Graph → graph, before lowering: what makes a better kernel graph than the one that PyTorch traced."""

from millstream.passes.gradients import split_gradients
from millstream.passes.joint_norms import join_norms

__all__ = ["join_norms", "split_gradients"]
