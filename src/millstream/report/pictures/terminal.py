"""A timeline in a few lines of text: one row of blocks for each stream."""

from __future__ import annotations

from millstream.graph import Timeline
from millstream.report.words import percent

_BLOCKS = " ▁▂▃▄▅▆▇█"


def sketch_streams(timeline: Timeline, width: int = 80) -> list[str]:
    """Show when each stream worked: the height of a block is the share of its time that was busy.

    Args:
        timeline: What ran.
        width: Blocks in a row.
    """
    busy = [[0.0] * width for _ in range(timeline.num_streams)]  # in blocks
    for span in timeline.spans:
        start, end = (time / max(timeline.end_ns, 1) * width for time in (span.start_ns, span.end_ns))
        for block in range(int(start), min(int(end) + 1, width)):
            busy[span.stream][block] += max(min(end, block + 1) - max(start, block), 0)
    if not timeline.spans:
        return []
    return [
        f"stream {stream} ▕{''.join(_BLOCKS[min(round(share * 8), 8)] for share in row)}▏ {percent(sum(row), width)}"
        for stream, row in enumerate(busy)
    ]
