"""Small inputs and results that a CUDA graph copies itself.

To copy two inputs and a loss around a graph takes three calls of the driver, each of which costs the host more than the
graph's own launch. As nodes of the graph they only need to be told where the caller's tensors are this time
(docs/decisions/cuda-graphs.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.tensors import place_of_implementation
from millstream.device.cuda_graphs.memcpy_nodes import GraphCopy, MemcpyLibrary, MemcpyNodes, memcpy_library
from millstream.device.tensor_specs import TensorSpecs
from millstream.engine.cuda.batched_copy import Forms, can_be_batched

MOST_BYTES = 1 << 20
"""So much is copied in this way, inputs and results together: to copy more takes longer than to ask for it."""


class GraphIO:
    """A graph's copies of its inputs and results: captured with it, and led elsewhere for each call.

    Args:
        library: Makes memcpy nodes.
        slots: The graph's, where inputs go.
        examples: Inputs of a caller; those with the same specs are recognised sooner.
    """

    def __init__(self, library: MemcpyLibrary, slots: Sequence[Tensor], examples: Sequence[Tensor]) -> None:
        self._library = library
        self._forms = Forms(slots)
        self._slots = slots
        self._copies: list[tuple[int, GraphCopy, bool]] = []
        self._outer: list[Tensor] = []  # what is copied from and to in the capture, and never read or written
        self._nodes: MemcpyNodes | None = None
        self._specs: TensorSpecs | None = None
        if self._forms.find(examples) is not None:
            with suppress(ValueError):
                self._specs = TensorSpecs(examples, place_of_implementation())

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
        if num_bytes > MOST_BYTES or not all(map(can_be_batched, results)):
            return False
        for result in results:
            self._add(result, leads_in=False)
        return True

    def _add(self, inner: Tensor, *, leads_in: bool) -> None:
        outer = torch.empty_like(inner)
        self._outer.append(outer)
        source, to = (outer, inner) if leads_in else (inner, outer)
        stream = current_stream_handle(inner.get_device())
        made = self._library.capture_copy(to.data_ptr(), source.data_ptr(), inner.nbytes, stream)
        if made is None:
            raise self._refused("capture a copy")
        self._copies.append((*made, leads_in))

    def settle(self, graph: torch.cuda.CUDAGraph) -> None:
        """Close it, now that the graph is instantiated: launches copy nothing.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._nodes = self._library.make_nodes(graph.raw_cuda_graph_exec(), self._copies)
        if self._nodes is None:
            raise self._refused("tell of a context")
        self.close()

    @property
    def is_shut(self) -> bool:
        """Whether it will open for no call any more."""
        return self._nodes is None

    # --- calls -------------------------------------------------------------------------------------------------------

    def open(self, sources: list[Tensor], targets: Sequence[Tensor]) -> bool:
        """Let the next launch copy in from some tensors and out to others; false where it cannot.

        Args:
            sources: One for each slot.
            targets: One for each result, of its size, strides and dtype.
        """
        if self._nodes is None:
            return False
        addresses = None if self._specs is None else self._specs.find(sources)
        if addresses is None:
            found = self._forms.find(sources)
            if found is None:
                return False
            addresses = array("Q", found)
        for target in targets:
            addresses.append(target.data_ptr())
        if self._nodes.open(addresses):
            return True
        self.close()
        self._nodes = None  # what it refuses now, it would refuse again
        return False

    def close(self) -> None:
        """Let launches copy nothing, until the next call is opened for.

        Raises:
            RuntimeError: The driver refuses.
        """
        if self._nodes is not None and not self._nodes.close():
            raise self._refused("switch a copy off")

    def _refused(self, what: str) -> RuntimeError:
        self._library.has_refused = True
        return RuntimeError(f"CUDA's driver refused to {what}.")


def can_be_made() -> bool:
    """Return whether the driver has what it takes, and has refused none of it yet."""
    library = memcpy_library()
    return library is not None and not library.has_refused


def make_graph_io(slots: Sequence[Tensor], examples: Sequence[Tensor]) -> GraphIO | None:
    """Copies to these slots; ``None`` where the driver has none, or it is not worth one."""
    library = memcpy_library()
    if (
        library is None
        or library.has_refused
        or not all(map(can_be_batched, slots))
        or sum(slot.nbytes for slot in slots) > MOST_BYTES
    ):
        return None
    return GraphIO(library, slots, examples)
