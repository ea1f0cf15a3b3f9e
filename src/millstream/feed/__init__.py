"""Batches cross to the device while it computes."""

from millstream.feed.channel import Channel, ChannelClosed
from millstream.feed.feeder import Feed, feed
from millstream.feed.structure import register

__all__ = ["Channel", "ChannelClosed", "Feed", "feed", "register"]
