"""Batches cross to the device while it computes.

To follow one of them, read in this order:

| module | is |
|---|---|
| `feeding` | `Feed`: passes, options, resuming |
| `pipeline` | what is done next: a pure state machine |
| `run`, `worker` | one pass, and the feed's one thread, which carries it out |
| `source`, `generators` | asks the loader, from any position; notices who draws random numbers |
| `shaping`, `lengths` | batches and sequences made of few shapes |
| `transfer/base`, `transfer/device` | the way to the CPU, and to a GPU |
| `transfer/layout`, `transfer/staging` | where tensors lie in a batch's memory; its pinned buffers |
| `transfer/buffers`, `transfer/lending` | memory on the device, who has it, and the tensors over it |
| `transfer/outputs`, `transfer/refills` | results of transforms, objects that move; sources that fill memory again |
| `profiler`, `stats` | where the time went |
| `together` | a pass in several processes at once |
"""

from millstream.data.feeding import Feed, feed
from millstream.data.lengths import Padded
from millstream.data.shaping import num_valid
from millstream.data.stats import Stats
from millstream.tree.batches import register

__all__ = ["Feed", "Padded", "Stats", "feed", "num_valid", "register"]
