"""An in-place operator of a list reads what it writes before it writes any of it.

Inductor makes the new values of all items first, as expressions that are not computed yet, and then lets one item after
another become its expression. The expression of a later item that reads an earlier one finds it written:
``torch._foreach_add_([a, b], [a * 2, a * 3])`` adds three times the new ``a``. Optimizers write all parameters by one
such operator, and the gradient of a parameter is an expression of others wherever no sum lies between: with a batch of
one row, or in products of parameters. An item that reads itself at other places, as ``[w], [w.T * 2]``, is read while
it is written.

So what reads such an item is computed before. Weight decay, which reads each item where it is written, is not.

On GPUs, where a list becomes one kernel, its results are computed before whatever else still has to read an item, the
forward pass of an element-wise loss for instance, which found the new weights. So those readers get the place that
Inductor gives them in front of any other operator that writes: before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

from millstream._torch.workarounds import Workaround, replaced
from millstream.lower.workarounds.lowerings.pending_reads import read_before

#: By device: the items of a list, each the number of its result, and the arguments for it, its destination first.
_Groups = Mapping[Any, list[tuple[int, Any]]]


@contextlib.contextmanager
def _read_before_writing() -> Iterator[None]:
    compute = lowering.foreach_group_loop

    def compute_apart(groups: _Groups, num_outputs: int, apply_fn: Callable[..., Any], realize_outputs: bool) -> Any:
        if V.graph.current_node.target in lowering.inplace_foreach_ops:
            written = {args[0].get_name() for group in groups.values() for _, args in group}
            groups = {
                key: [(number, _read_all(args, written)) for number, args in group] for key, group in groups.items()
            }
        return compute(groups, num_outputs, apply_fn, realize_outputs)

    with (
        replaced(lowering, "foreach_group_loop", compute_apart),
        replaced(lowering, "mutate_to", partial(_write_after_readers, lowering.mutate_to)),
    ):
        yield


def _write_after_readers(write: Callable[..., Any], changed: Any, value: Any, unsafe_alias: bool = False) -> Any:
    """Let an item become its new value, after all that reads the old one: Inductor computes that only now."""
    operations = V.graph.operations
    num_before = len(operations)
    result = write(changed, value, unsafe_alias)
    if unsafe_alias and len(operations) > num_before:  # otherwise the new value is copied, which comes last anyhow
        readers = operations[num_before:]
        made_by = value.data.data.get_defining_op() if isinstance(value.data, ir.StorageBox) else None
        if made_by is not None and made_by not in readers:
            place = operations.index(made_by)
            operations[place:] = [*readers, *operations[place:num_before]]
    return result


def _read_all(args: Sequence[Any], written: set[str]) -> tuple[Any, ...]:
    return args[0], *(read_before(arg, written, args[0]) for arg in args[1:])


WORKAROUND = Workaround(
    "foreach-reads",
    "wrong updates of parameters whose gradients are made from other parameters, as with a batch of one row, and, on "
    "GPUs, of what still reads parameters",
    lowering=_read_before_writing,
)
