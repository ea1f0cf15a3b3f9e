"""Shadow mode: what was recorded while a step was traced, beside what its guards look at and what was found changed.

What is reported is what was read and can be no condition, and what one of record and snapshot has missed of the writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from millstream.capture.guards.guards import Guards
from millstream.capture.guards.recorded import identity_of, is_of_library, place_of, unguarded
from millstream.capture.lines import is_users
from millstream.capture.record.reads import Kind, Read
from millstream.capture.record.recorder import Recorder
from millstream.capture.record.scope import Difference, is_shadow
from millstream.capture.state import snapshot as state
from millstream.capture.state.signature import is_same
from millstream.capture.state.snapshot import Change
from millstream.capture.step.request import Request, Traced
from millstream.capture.trace.patches.optimizers import is_schedulers

_log = logging.getLogger(__name__)


def report(request: Request, traced: Traced, guards: Guards) -> None:
    """Log the differences of a capture, if it was recorded."""
    if is_shadow():
        for difference in differences(traced.record, request, traced, guards):
            _log.warning("MILLSTREAM_RECORD: %s", difference)


def differences(record: Recorder, request: Request, traced: Traced, guards: Guards) -> list[Difference]:
    """Compare a record with the guards of a graph, and with what was found changed."""
    if record.failure:
        return [Difference("not recorded", record.failure)]
    unseen = unguarded(record, request, guards)
    return [*(Difference("read, but not guarded", str(read)) for read in unseen), *traced.differences]


def compare_writes(record: Recorder, changes: Callable[[], list[Change]]) -> list[Difference]:
    """Compare what was written with the changes that are found, before they are taken back."""
    if record.failure:
        return []
    found = changes()
    places = {place_of(change.location.holder, change.location.key) for change in found}
    holders = {identity_of(change.location.holder) for change in found}
    written = {place_of(write.holder, write.key) for write in record.writes}
    filled = {identity_of(write.holder) for write in record.writes if write.kind is Kind.CONTENTS}
    unseen = [
        write
        for write in record.writes
        if not (is_of_library(write, record) or _is_note(write) or is_same(write.now(), write.value))
        and place_of(write.holder, write.key) not in places
        and not (write.kind is Kind.CONTENTS and identity_of(write.holder) in holders)
    ]
    missed = [
        change
        for change in found
        # What optimizers and schedulers keep is put there by our own code.
        if change.kind in (state.Kind.PLAIN, state.Kind.MODULE)
        and not is_schedulers(change.after)
        and place_of(change.location.holder, change.location.key) not in written
        and identity_of(change.location.holder) not in filled
    ]
    return [
        *(Difference("written, but not found", str(write)) for write in unseen),
        *(Difference("found, but not written", f"{change.location}") for change in missed),
    ]


def _is_note(write: Read) -> bool:
    """Whether PyTorch notes something in an object of its own that does not matter to a graph."""
    return isinstance(write.owner, nn.Module | Optimizer | LRScheduler) and not is_users(write.code.co_filename)
