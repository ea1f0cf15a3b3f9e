"""Work on another device for a while, and leave the thread as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from millstream.device.place import Place


@contextmanager
def guard(place: Place | torch.device | str) -> Iterator[Place]:
    """Make ``place`` the calling thread's current device; afterwards restore the device and the current streams.

    Whatever the body does to the current device, to the current stream of ``place`` or to that of the device that was
    current before, all three are afterwards what they were, also when the body raises. On the CPU there is nothing to
    set.

    Args:
        place: The device to work on.

    Yields:
        The place.

    Raises:
        DeviceError: The device does not exist.
    """
    place = Place.of(place)
    if place.kind == "cpu":
        yield place
        return
    device = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(index) for index in {device, place.index}]
    torch.cuda.set_device(place.index)
    try:
        yield place
    finally:
        # Setting a stream also makes its device current, so the device comes last.
        for stream in streams:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)
