"""State that is copied to other state, and written itself, is read first.

A graph ends in a ``copy_`` into each input that it writes, in the order of the inputs. What is copied may be another
input's old value, once Inductor has left out copies that change nothing (``remove_noop_ops``, ``x * 1``), or lie in its
memory, once an operator works in place. If that input comes first, the copy has its new value: a target network gets
the parameters that the optimizer has just written, and of two tensors that are swapped both become one.

**Contract**
- A graph is left alone in which no value that is copied may lie in another input's memory: that of a step which updates
each of its tensors from what was computed, as optimizers do.
- Otherwise those that read an input's memory come before the one that writes it. Only where that goes round in a
circle, as in a swap, does one value get memory of its own.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from millstream._torch.workarounds import Workaround
from millstream.lower.workarounds.post_grad.shared_storage import (
    Copy,
    before_reinplacing,
    clone,
    find_copies,
    find_homes,
    stays,
)


def _copy_before_writing(graph: fx.Graph) -> None:
    copies = find_copies(graph)
    homes = find_homes(graph, copies)
    readers: dict[fx.Node, list[Copy]] = defaultdict(list)
    for copy in copies:
        home = homes.get(copy.value)
        if home is not None and not (home is copy.written and stays(copy.value, home)):
            copy.node.args = (copy.written, clone(copy.value))
            readers[home].append(copy)
    if readers or _are_followed(copies, homes):
        for copy in _order(copies, readers):
            graph.output_node().prepend(copy.node)


def _are_followed(copies: list[Copy], homes: dict[fx.Node, fx.Node]) -> bool:
    """Return whether something is computed after the first copy that may lie in memory which the copies write."""
    known = {copy.node for copy in copies}
    node = copies[0].node if copies else None
    while node is not None and node.op != "output":
        if node not in known and not homes.keys().isdisjoint(node.all_input_nodes):
            return True
        node = node.next
    return False


def _order(copies: list[Copy], readers: dict[fx.Node, list[Copy]]) -> list[Copy]:
    """The copies, those that read an input before the one that writes it; in a circle the first comes last."""
    ordered: dict[Copy, None] = {}
    begun: set[Copy] = set()
    for first in copies:
        waiting = [first]
        while waiting:
            copy = waiting[-1]
            before = [] if copy in begun else [each for each in readers[copy.written] if each not in begun]
            begun.add(copy)
            waiting += reversed(before)
            if not before:
                ordered[waiting.pop()] = None
    return list(ordered)


WORKAROUND = Workaround(
    "pytorch#198131",
    "wrong copies of state that is written after it was copied, as of parameters to a target network, and swaps",
    lowering=lambda: before_reinplacing(_copy_before_writing),
)
