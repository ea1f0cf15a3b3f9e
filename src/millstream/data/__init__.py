"""Batches cross to the device while it computes."""

from millstream.data.feeding import Feed, feed, num_valid
from millstream.data.lengths import Padded
from millstream.data.stats import Stats
from millstream.tree import register

__all__ = ["Feed", "Padded", "Stats", "feed", "num_valid", "register"]
