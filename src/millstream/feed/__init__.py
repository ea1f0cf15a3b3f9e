"""Batches cross to the device while it computes."""

from millstream.feed.feeder import Feed, feed

__all__ = ["Feed", "feed"]
