"""Work on another device for a while, and leave the thread as it was."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from millstream.device.place import Place


class guard(AbstractContextManager[Place]):  # noqa: N801 - reads as a verb
    """Make ``place`` the calling thread's current device; afterwards restore the device and the current streams.

    Whatever the body does to the current device, to the current stream of ``place`` or to that of the device that was
    current before, all three are afterwards what they were, also when the body raises. On the CPU there is nothing to
    set. ``with guard(place) as place:`` gives the place.

    Args:
        place: The device to work on.

    Raises:
        DeviceError: The device does not exist.
    """

    __slots__ = ("_device", "_place", "_streams")

    def __init__(self, place: Place | torch.device | str | int) -> None:
        self._place = Place.of(place)

    def __enter__(self) -> Place:
        place = self._place
        if place.kind != "cpu":
            self._device = device = torch.cuda.current_device()
            stream = torch.accelerator.current_stream(place.index)
            self._streams = [stream]
            if device != place.index:
                self._streams.insert(0, torch.accelerator.current_stream(device))
            torch.cuda.set_device(place.index)  # also where it is: a new thread has no context of CUDA's before
        return place

    def __exit__(self, *_: object) -> None:
        if self._place.kind == "cpu":
            return
        # Nearly always they are what they were: to look is quicker than to set them again.
        for stream in self._streams:
            if torch.accelerator.current_stream(stream.device_index) != stream:
                torch.accelerator.set_stream(stream)
        # Setting a stream also makes its device current, so the device comes last.
        if torch.cuda.current_device() != self._device:
            torch.cuda.set_device(self._device)
