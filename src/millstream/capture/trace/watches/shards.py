"""Sharded parameters in a trace: this process's rows stand for the whole, where each element counts for itself.

An optimizer that computes each element from that element alone, and what only scales gradients, may be given rows in
the place of the parameter. Anything else (a norm, a product) would be that of the rows, and is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from millstream._torch.distributed.fully_sharded import is_shard
from millstream.capture.lines import is_part_of_project
from millstream.capture.trace.twins import Twins

_FOLDER = Path(torch.__file__).parent
_ELEMENTWISE = frozenset(
    f"{_FOLDER}{os.sep}{name}"
    for name in (
        *(
            f"optim/{each}.py"
            for each in "sgd adam adamw rmsprop adagrad adadelta adamax nadam radam rprop asgd".split()
        ),
        "optim/optimizer.py",
        "utils/_foreach_utils.py",
        "nn/modules/module.py",
    )
)
"""Code of PyTorch's that computes each element of a parameter, its gradient and its state for itself."""

_OF_WHOLE = frozenset({"shape", "size", "numel", "nelement", "stride", "ndim", "dim", "__len__"})
"""What is told of the whole."""

_HARMLESS = frozenset(
    """
    grad requires_grad is_leaf dtype device layout is_sparse is_cuda is_cpu is_meta is_complex is_floating_point
    __hash__ zero_ mul_ div_ add_ sub_ __imul__ __itruediv__ __iadd__ __isub__ clamp_ clamp_min_ clamp_max_ copy_ lerp_
    nan_to_num_ detach_ _foreach_mul_ _foreach_div_ _foreach_add_ _foreach_zero_ requires_grad_ grad_fn
    """.split()
)
"""What is the same of rows, or done to each element in its place."""


class Shards:
    """Tensors of a trace that are rows, and what may be done with them.

    Args:
        twins: Those of the user's tensors.
        fail: Refuses, given a reason and a remedy.
    """

    def __init__(self, twins: Twins, fail: Callable[[str, str], Any]) -> None:
        self._known = {id(each) for each in twins.tensors if is_shard(each)}
        self._gradients: dict[int, Tensor] = {}  # made in the trace
        self._fail, self._is_trusted = fail, False

    def holds(self, tensor: Tensor) -> bool:
        """Return whether it is the user's own, and the trace has a twin of its rows."""
        return id(tensor) in self._known

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Within the context anything may be done: what is made of it takes account of all processes."""
        before, self._is_trusted = self._is_trusted, True
        try:
            yield
        finally:
            self._is_trusted = before

    def answer(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], leaves: Sequence[Any], caller: FrameType
    ) -> Any:
        """Return what the user's code asks of a whole's shape; ``NotImplemented`` where it does not.

        Args:
            function: That is called.
            name: Of it or the attribute.
            args: Of the function, as PyTorch is given them.
            leaves: What it is given, in the user's terms.
            caller: Calls it.

        Raises:
            CaptureError: It would be done to rows and not to the whole.
        """
        if not self._known or self._is_trusted or name in _HARMLESS:
            return NotImplemented
        filename = caller.f_code.co_filename
        if filename in _ELEMENTWISE or is_part_of_project(filename):
            return NotImplemented
        if not any(id(each) in self._known or id(each) in self._gradients for each in leaves):
            return NotImplemented
        if name in _OF_WHOLE and id(leaves[0]) in self._known:
            with DisableTorchFunction():
                return function(leaves[0], *args[1:])
        return self._fail(
            f"The step computes with a parameter or gradient under fully_shard ({name}), of which each process has "
            "some rows.",
            "Use clip_grad_norm_ and an optimizer of torch.optim that treats each element for itself.",
        )

    def noted(self, name: str, given: Any, result: Any) -> Any:
        """A result; a gradient that the trace has made is known again."""
        if name == "grad" and isinstance(result, Tensor) and id(given) in self._known:
            self._gradients[id(result)] = result
        return result
