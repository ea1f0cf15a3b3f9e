"""The device that tensors live and kernels run on, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from millstream.errors import DeviceError

PlaceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A device by name: ``Place("cuda", 0)`` prints as ``cuda:0``, the one CPU place as ``cpu``.

    A place is only a name. Making one directly asks nothing of the machine (plans and tests name GPUs that are not
    there); ``Place.of`` also proves that the device exists.

    Attributes:
        kind: Family of the device.
        index: Number of the device in its family, 0 for the CPU.
    """

    kind: PlaceKind
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise DeviceError(f"Millstream knows no device of kind {self.kind!r}; it knows 'cpu' and 'cuda'.")
        if self.index < 0 or (self.kind == "cpu" and self.index != 0):
            allowed = "0" if self.kind == "cpu" else "0 or more"
            raise DeviceError(f"Index {self.index} of a {self.kind!r} place is not valid; it must be {allowed}.")

    @classmethod
    def of(cls, device: Place | torch.device | str | int) -> Place:
        """Find the place that ``device`` names and check that this machine has it.

        Args:
            device: A place, a ``torch.device``, the number of a CUDA device, or a string such as ``"cpu"``,
                ``"cuda:1"``, ``"cuda"``. A CUDA device without an index is the calling thread's current device (asking
                for it initialises CUDA).

        Raises:
            DeviceError: The name means nothing, or the device is not there; the message lists the places that are.
        """
        if isinstance(device, Place):
            kind, index = device.kind, device.index
        else:
            parsed = _parse(device)
            if parsed.type not in ("cpu", "cuda"):
                raise DeviceError(f"Millstream does not run on {str(parsed)!r}. {_describe_available()}")
            kind = "cpu" if parsed.type == "cpu" else "cuda"
            if kind == "cuda" and parsed.index is None:
                index = torch.cuda.current_device() if torch.cuda.device_count() else 0
            else:
                index = parsed.index or 0
        if kind == "cuda" and index >= torch.cuda.device_count():
            raise DeviceError(f"There is no cuda:{index} here. {_describe_available()}")
        return cls(kind, index)

    @property
    def torch_device(self) -> torch.device:
        """The same device as PyTorch writes it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


def available_places() -> tuple[Place, ...]:
    """List the places of this machine, the CPU first.

    Counting GPUs does not initialise CUDA, so a process that will fork may ask.
    """
    return (Place("cpu"), *(Place("cuda", index) for index in range(torch.cuda.device_count())))


def _parse(device: torch.device | str | int) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:  # a local rank
        return torch.device("cuda", device)
    if not isinstance(device, str):
        raise DeviceError(
            "A device is named by a string, a torch.device or the number of a CUDA device, not by "
            f"{device!r} ({type(device).__name__})."
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is not the name of a device. {_describe_available()}") from error


def _describe_available() -> str:
    return f"Available here: {', '.join(map(str, available_places()))}."
