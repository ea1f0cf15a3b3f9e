"""Places and their contexts: streams, events, pinned staging memory and the lock that protects captures.

Everything that needs a stream, an event or pinned memory takes it from ``context(place)``; there is no
second pool.
"""

from millstream.device.context import DeviceContext, context
from millstream.device.guard import guard
from millstream.device.handles import Event, Stream
from millstream.device.markers import StreamMarker, wait_until_reached
from millstream.device.place import Place, available_places
from millstream.device.pools.stream_pool import MAX_STREAMS

__all__ = [
    "MAX_STREAMS",
    "DeviceContext",
    "Event",
    "Place",
    "Stream",
    "StreamMarker",
    "available_places",
    "context",
    "guard",
    "wait_until_reached",
]
