"""What a call that runs as plain Python gives to its caller: what a graph would, detached and in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from millstream._torch.tensors import has_shared_memory
from millstream.capture.state.discover import Found
from millstream.capture.state.lift import find_unlifted, lift
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import tree_unflatten

MOST_SEARCHES = 3
"""Of a step: a search takes up to a tenth of a second, and every call of a step that runs as plain Python may ask."""


class OwnTensors:
    """The caller's own tensors, which are returned as they are: arguments, state and its gradients.

    State is searched in the first few calls that ask; after these, what was found is taken, and a tensor of which
    nothing is known is copied.
    """

    def __init__(self) -> None:
        self._num_searches = 0
        self._state: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def ids(self, arguments: Iterable[Tensor], search: Callable[[], Found]) -> set[int]:
        """Return their ids."""
        if self._num_searches < MOST_SEARCHES:
            self._num_searches += 1
            found = search()
            state = [*(entry.tensor for entry in lift(found)), *(each for _, each in find_unlifted(found).values())]
            self._state.update((id(each), each) for each in state)
        gradients = [each.grad for each in [*self._state.values()] if each.is_leaf]
        return {*map(id, arguments), *self._state, *(id(each) for each in gradients if each is not None)}


def detached(result: Any, own: Callable[[], set[int]]) -> Any:
    """A result as a graph would give it: without gradients, and sharing no memory with what the step keeps.

    Args:
        result: Of an eager call.
        own: Gives, by id, tensors of the caller's own, which are returned as they are.
    """
    if type(result) is Tensor and not result.is_leaf:  # as a loss is
        return result.detach().clone() if result._is_view() else result.detach()
    structure, leaves = tree_flatten(result)
    if all(leaf.is_leaf and not has_shared_memory(leaf) for leaf in leaves):
        return result
    kept = own() if any(leaf.is_leaf and has_shared_memory(leaf) for leaf in leaves) else ()

    def plain(leaf: Tensor) -> Tensor:
        if leaf.is_leaf:
            return leaf if id(leaf) in kept or not has_shared_memory(leaf) else leaf.detach().clone()
        return leaf.detach().clone() if leaf._is_view() else leaf.detach()

    return tree_unflatten(structure, [*map(plain, leaves)])
