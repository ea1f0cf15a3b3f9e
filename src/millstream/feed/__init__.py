"""Batches cross to the device while it computes, and results come back without stopping it."""

from millstream.feed.channel import Channel, ChannelClosed
from millstream.feed.feeder import Feed, feed
from millstream.feed.fetch import Fetched, fetch, fetch_each
from millstream.feed.ledger import Stats, draw_lanes
from millstream.feed.structure import register

__all__ = [
    "Channel",
    "ChannelClosed",
    "Feed",
    "Fetched",
    "Stats",
    "draw_lanes",
    "feed",
    "fetch",
    "fetch_each",
    "register",
]
