"""Which classes are known to PyTorch's own trees. Tried on 2.11 and 2.13."""

from __future__ import annotations

from torch.utils import _pytree


def is_registered(kind: type) -> bool:
    """Whether ``torch.utils._pytree`` takes objects of a class apart."""
    return kind in _pytree.SUPPORTED_NODES
