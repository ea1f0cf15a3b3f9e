"""Copies between a caller's tensors and a graph's memory, by the driver.

An operator of PyTorch takes 5 to 15 µs of the host's time for each small tensor that it copies, which for a small graph
is longer than launching it. The driver takes 2 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream.device.copying import FixedCopies, enqueuer


class Forms:
    """Memory forms of a graph's tensors, so that others can be copied to them as the bytes that they are.

    Args:
        tensors: On one CUDA device; they are not kept alive.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._forms = [(tensor.get_device(), tensor.stride(), tensor.dtype, tensor.nbytes) for tensor in tensors]

    def find(self, sources: Sequence[Tensor]) -> list[int] | None:
        """The addresses of as many tensors; ``None`` where one of them lies otherwise, or elsewhere."""
        for source, form in zip(sources, self._forms, strict=True):
            if (source.get_device(), source.stride(), source.dtype, source.nbytes) != form:
                return None
            if source.is_neg() or source.is_conj():  # bytes of which the values are yet to be made
                return None
        return [source.data_ptr() for source in sources]


class BatchedCopy:
    """Copies tensors of one form into the memory of a graph, or out of it, on the current stream.

    Args:
        tensors: The graph's, on one CUDA device; they are not kept alive.
        copies: For their bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], copies: FixedCopies) -> None:
        self._index = tensors[0].get_device()
        self._copies = copies
        self._forms = Forms(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]

    def bring(self, sources: Sequence[Tensor]) -> bool:
        """Copy tensors into the graph's memory; false, and nothing is copied, where the driver cannot."""
        found = self._forms.find(sources)
        return found is not None and self._carry(found, self._addresses)

    def fetch(self, targets: Sequence[Tensor]) -> bool:
        """Copy the graph's memory to new tensors of the same forms; false where the driver refuses."""
        return self._carry(self._addresses, [target.data_ptr() for target in targets])

    def _carry(self, sources: Sequence[int], to: Sequence[int]) -> bool:
        copies = self._copies
        for i, (source, target) in enumerate(zip(sources, to, strict=True)):
            copies.sources[i], copies.to[i] = source, target
        return copies.enqueue(current_stream_handle(self._index)) == 0


def make_batched_copy(tensors: Sequence[Tensor]) -> BatchedCopy | None:
    """A batched copy for these tensors; ``None`` without a driver, or where one of them has gaps."""
    driver = enqueuer()
    if driver is None or not tensors or not all(map(can_be_batched, tensors)):
        return None
    return BatchedCopy(tensors, driver.prepare([tensor.nbytes for tensor in tensors]))


def can_be_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device, and a stretch of bytes there that says all about it."""
    return _on_device(tensor) and _is_stretch(tensor)


def _on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_stretch(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor follow each other in memory in some order, without gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0 and not tensor.is_neg() and not tensor.is_conj()
