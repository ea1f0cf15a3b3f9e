"""What a feed can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.data.lengths import Lengths
from millstream.data.shaping import check_switches
from millstream.data.together import CHOICES
from millstream.data.transfer.transfer import Transform
from millstream.errors import ArgumentError

_OF_LOADERS = "batch_size shuffle sampler batch_sampler num_workers collate_fn drop_last persistent_workers".split()
ELSEWHERE = {
    **dict.fromkeys(_OF_LOADERS, "It is an option of the DataLoader: give it to that."),
    "prefetch_factor": "It is an option of the DataLoader; depth= is the number of batches that a feed has under way.",
    "pin_memory": "A feed needs none: it pins the memory that it copies from by itself.",
    "non_blocking": "A feed needs none: its copies run beside the computation anyway.",
}
"""Arguments of PyTorch's DataLoader and ``Tensor.to``, and what a feed says of them."""


@dataclass(frozen=True)
class Options:
    """The options of a feed; see ``feed`` for what they mean."""

    depth: int = 2
    max_bytes: int | None = None
    transform: Transform | None = None
    pad_last: bool = False
    prefetch: bool = True
    uneven: str | None = None
    lengths: Lengths = Lengths(None, None, 0)  # noqa: RUF009  it never changes

    def __post_init__(self) -> None:
        for name, least, meaning in (
            ("depth", 1, "the number of batches that may be under way"),
            ("max_bytes", 1, "the number of bytes that may be under way"),
        ):
            value = getattr(self, name)
            if value is None and name != "depth":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}, {meaning}.")
        check_switches(pad_last=self.pad_last, prefetch=self.prefetch)
        if self.uneven is not None and self.uneven not in CHOICES:
            raise ArgumentError(f"uneven={self.uneven!r} is none of {', '.join(map(repr, CHOICES))}, nor None.")
