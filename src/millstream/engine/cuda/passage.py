"""Small inputs and results that a CUDA graph copies itself.

To copy two inputs and a loss around a graph takes three calls of the driver, each of which costs the host more than the
graph's own launch. As nodes of the graph they only need to be told where the caller's tensors are this time
(docs/decisions/0013).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from millstream._torch.devices.streams import current_stream_handle
from millstream._torch.tensors import place_of_implementation
from millstream.device.cuda_graphs.gates import Gatekeeper, Gates, GraphCopy, gatekeeper
from millstream.device.likeness import Likeness
from millstream.engine.cuda.carrier import Forms, can_be_carried

MOST_BYTES = 1 << 20
"""So much is copied in this way, inputs and results together: to copy more takes longer than to ask for it."""


class Passage:
    """A graph's copies of its inputs and results: captured with it, and led elsewhere for each call.

    Args:
        keeper: Makes gates.
        slots: The graph's, where inputs go.
        examples: Inputs of a caller; those of the same looks are recognised sooner.
    """

    def __init__(self, keeper: Gatekeeper, slots: Sequence[Tensor], examples: Sequence[Tensor]) -> None:
        self._keeper = keeper
        self._forms = Forms(slots)
        self._slots = slots
        self._copies: list[tuple[int, GraphCopy, bool]] = []
        self._outer: list[Tensor] = []  # what is copied from and to in the capture, and never read or written
        self._gates: Gates | None = None
        self._likeness: Likeness | None = None
        if self._forms.find(examples) is not None:
            with suppress(ValueError):
                self._likeness = Likeness(examples, place_of_implementation())

    # --- while the graph is captured ---------------------------------------------------------------------------------

    def lead_in(self) -> None:
        """Let the graph begin with the copies of its inputs.

        Raises:
            RuntimeError: The driver refuses.
        """
        for slot in self._slots:
            self._add(slot, leads_in=True)

    def lead_out(self, results: Sequence[Tensor]) -> bool:
        """Let it end with those of its results; false, and nothing is copied, where it had better not."""
        num_bytes = sum(tensor.nbytes for tensor in (*self._slots, *results))
        if num_bytes > MOST_BYTES or not all(map(can_be_carried, results)):
            return False
        for result in results:
            self._add(result, leads_in=False)
        return True

    def _add(self, inner: Tensor, *, leads_in: bool) -> None:
        outer = torch.empty_like(inner)
        self._outer.append(outer)
        source, to = (outer, inner) if leads_in else (inner, outer)
        stream = current_stream_handle(inner.get_device())
        made = self._keeper.capture_copy(to.data_ptr(), source.data_ptr(), inner.nbytes, stream)
        if made is None:
            raise self._refused("capture a copy")
        self._copies.append((*made, leads_in))

    def settle(self, graph: torch.cuda.CUDAGraph) -> None:
        """Close it, now that the graph is instantiated: launches copy nothing.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._gates = self._keeper.gates(graph.raw_cuda_graph_exec(), self._copies)
        if self._gates is None:
            raise self._refused("tell of a context")
        self.close()

    @property
    def is_shut(self) -> bool:
        """Whether it will open for no call any more."""
        return self._gates is None

    # --- calls -------------------------------------------------------------------------------------------------------

    def open(self, sources: list[Tensor], targets: Sequence[Tensor]) -> bool:
        """Let the next launch copy in from some tensors and out to others; false where it cannot.

        Args:
            sources: One for each slot.
            targets: One for each result, of its size, strides and dtype.
        """
        if self._gates is None:
            return False
        addresses = None if self._likeness is None else self._likeness.find(sources)
        if addresses is None:
            found = self._forms.find(sources)
            if found is None:
                return False
            addresses = array("Q", found)
        for target in targets:
            addresses.append(target.data_ptr())
        if self._gates.open(addresses):
            return True
        self.close()
        self._gates = None  # what it refuses now, it would refuse again
        return False

    def close(self) -> None:
        """Let launches copy nothing, until the next call is opened for.

        Raises:
            RuntimeError: The driver refuses.
        """
        if self._gates is not None and not self._gates.close():
            raise self._refused("switch a copy off")

    def _refused(self, what: str) -> RuntimeError:
        self._keeper.has_refused = True
        return RuntimeError(f"CUDA's driver refused to {what}.")


def can_be_made() -> bool:
    """Whether the driver has what it takes, and has refused none of it yet."""
    keeper = gatekeeper()
    return keeper is not None and not keeper.has_refused


def make_passage(slots: Sequence[Tensor], examples: Sequence[Tensor]) -> Passage | None:
    """A passage to these slots; ``None`` where the driver has none, or it is not worth one."""
    keeper = gatekeeper()
    if (
        keeper is None
        or keeper.has_refused
        or not all(map(can_be_carried, slots))
        or sum(slot.nbytes for slot in slots) > MOST_BYTES
    ):
        return None
    return Passage(keeper, slots, examples)
