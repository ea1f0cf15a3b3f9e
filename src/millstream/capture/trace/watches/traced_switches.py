"""Changes of a traced step to PyTorch's switches, and what it computes while one is not as it was.

A graph holds for the switches of its call. So a step that computes with another setting of one which its operators
obey at run time is refused; one that leaves a switch otherwise runs as plain Python, and the next call is captured
with that. What a trace shows by itself (which attention was chosen) matters to neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from millstream._torch.modes.switches import Decides, Switch, SwitchSettings, present, put_back, remember
from millstream.capture.trace.request import FirstChange
from millstream.errors import CaptureError

_PRODUCTS = re.compile(
    r"(^|_)(add|badd|b|int_|addb|scaled_|grouped_)?mm(_|$)|mv(_|$)|dot|conv|rnn|lstm|gru|cudnn|miopen|mkldnn|linear"
    r"|batch_norm|grid_sampler|attention|linalg|cholesky|lu_|svd|eig|lstsq|triangular|cdist|ctc|trace|quantize"
)
"""Names of operators that libraries compute."""


class SwitchWatch:
    """Watches a step's use of switches while it is traced.

    Args:
        settings: The switches of the call.
    """

    def __init__(self, settings: SwitchSettings) -> None:
        self._settings = settings
        self._before: list[tuple[Switch, Any]] = []  # once the step sets one
        self._line: str | None = None  # of the step's that was the last to do so
        self._refusal: CaptureError | None = None

    def note_set(self, line: str) -> None:
        """The step is about to set a switch."""
        self._before = self._before or remember()
        self._line = line

    def check(self, operator: Any, args: Sequence[Any]) -> None:
        """Note an operator that is recorded under other switches than those of the call, if it obeys them."""
        if self._line is None or self._refusal is not None:  # what other threads set a graph obeys when it runs
            return
        for switch in present().changed_since(self._settings):
            if _obeys(switch, operator, args):
                self._refusal = _refuse(switch, self._line)

    def settle(self) -> FirstChange | CaptureError | None:
        """Put back what the step has set and left otherwise; returns why there is no graph, if that is why."""
        changed = present().changed_since(self._settings)
        if not changed:
            return self._refusal
        if self._line is not None:
            put_back(self._before)
        return FirstChange(
            CaptureError(
                f"{changed[0].name} is set while the step runs, again and again to something else.",
                where=self._line or "",
                remedy="Set it outside of the step.",
            )
        )


def _refuse(switch: Switch, line: str) -> CaptureError:
    return CaptureError(
        f"The step sets {switch.name} for some of its operators, which a graph would not do again.",
        where=line,
        remedy="Set it outside of the step, or put what is to obey it into `with ms.eager_region():`.",
    )


def _obeys(switch: Switch, operator: Any, args: Sequence[Any]) -> bool:
    """Return whether what an operator computes at run time depends on a switch."""
    if switch.decides is Decides.NOTHING:
        return False
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    if switch.device and not any(tensor.device.type == switch.device for tensor in tensors):
        return False
    name = getattr(operator, "overloadpacket", operator).__name__
    return switch.decides is Decides.ANYTHING or _PRODUCTS.search(name) is not None
