"""Streams by hand: scopes of streams, branches side by side, auxiliary streams within operators.

- ``ordering`` decides: which waits a use needs, and what must be held. No torch.
- ``session`` acts: it sees every operator of an open scope and does what ``ordering`` says.
- ``scope``, ``branches``, ``auxiliary``, ``backward`` are what users see; ``hints`` what they are within a capture.
"""

from millstream.manual.auxiliary import aux_streams
from millstream.manual.branches import Parallel, parallel
from millstream.manual.dual_backward import dual_stream_backward
from millstream.manual.scope import streams

__all__ = ["Parallel", "aux_streams", "dual_stream_backward", "parallel", "streams"]
