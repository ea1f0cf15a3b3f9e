"""``feed``: batches cross to the device while it computes."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from millstream.device import Place, context
from millstream.errors import ArgumentError, FeedError
from millstream.feed.checking import Checker
from millstream.feed.copy_lane import CopyLane
from millstream.feed.lane import HostLane, Lane, Transform
from millstream.feed.ledger import Ledger, Stats
from millstream.feed.many_lane import ManyLane
from millstream.feed.pace import PaceMaker
from millstream.feed.progress import Note, Progress, check_state, take_state
from millstream.feed.session import Prepare, Session
from millstream.feed.shaping import count_rows, deal, have_rows, make_sharing, make_transform, pad_rows
from millstream.graph import Timeline

Device = str | torch.device | Place


@dataclass(frozen=True)
class Options:
    """How a feed works; see ``feed`` for what they mean."""

    depth: int = 2
    max_bytes: int | None = None
    transform: Transform | None = None
    drop_last: bool = False
    pad_last: bool = False
    deal: bool = False
    threads: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        for name, least, meaning in (
            ("depth", 1, "the number of batches that may be under way"),
            ("max_bytes", 1, "the number of bytes that may be under way"),
            ("threads", 1, "the number of threads that stage a large batch"),
        ):
            value = getattr(self, name)
            if value is None and name != "depth":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}, {meaning}.")
        if self.drop_last and self.pad_last:
            raise ArgumentError("drop_last and pad_last exclude each other: a short batch is left out or padded.")


def feed(  # noqa: PLR0913 - one keyword per thing that a user may want
    loader: Iterable[Any],
    device: Device | Sequence[Device],
    depth: int = 2,
    *,
    max_bytes: int | None = None,
    cast: torch.dtype | None = None,
    channels_last: bool = False,
    transform: Transform | None = None,
    drop_last: bool = False,
    pad_last: bool = False,
    deal: bool = False,
    threads: int | None = None,
    check: bool = False,
) -> Feed:
    """Iterate over the batches of ``loader``, with their tensors on ``device``.

    A thread pulls batches ahead, stages their tensors in pinned memory and has them copied on a stream of their own, so
    that the next batches cross while the device computes with the present one::

        for x, y in ms.feed(loader, "cuda"):
            train_step(x, y)

    **What arrives.** Batches in the loader's order. Tensors and NumPy arrays arrive as tensors, wherever they are in
    tuples, lists, dicts, sets, named tuples, dataclasses, classes of attrs and pydantic, packed sequences and jagged
    tensors; strides, dtypes and shared memory are kept. Objects with a ``to`` are moved by it. Plain values stay as
    they are; anything else is an error until ``register`` of ``millstream.feed`` has taught it. On the CPU the loader's
    own objects arrive.

    **Whose a batch is.** Yours, for as long as you hold any tensor of it. Batches lie in slots; when you drop the last
    tensor of one (as the loop does when it gets the next) its slot is filled again, behind all work that you had queued
    by then. What you still hold when you ask for the next but one stays yours for good, and the feed takes new memory
    in its place. A batch belongs to the stream that is current when it is asked for, and may be used there without
    synchronising; where another stream uses it, that one must wait for the work there before you drop the batch.

    **The loader.** Anything that can be iterated, several times if it can. Its iterator is made in the thread that
    begins to iterate and then used in the worker thread only. At most ``depth + 1`` batches are pulled ahead, so a
    loader that is an iterator itself has advanced by as much when the loop is left early. Where the steps of a pass
    were so short, and its batches so cheap, that a thread may cost more than it hides, a later pass is tried without:
    then each batch is made in your thread when you ask for it (one further is pulled if the loader is a sequence, or a
    ``DataLoader`` over one), and what proves faster is kept. A loader that yields the
    same tensors or arrays again with new content is safe with a GPU, as long as they are plain and require no gradient;
    on the CPU, where nothing is copied, and where batches are dealt, it must yield new ones.
    Random numbers that the loader draws in this process come from the same global generator that the training loop
    uses, at times that vary: give it a generator of its own, or worker processes, where runs must repeat exactly.

    **Endings.** An error of the loader is raised where its batch would have come, with its traceback, after all batches
    before it. Leaving the loop in any way (``break``, an exception, Ctrl-C) ends the threads; ``close`` and ``with`` do
    so explicitly. ``iter`` returns when the first batch has been sent: a ``transform`` must not wait for the loop.
    Behind a pass to the loader's end slots wait for the next one, if those of this feed take no more than 256 MiB,
    until it is closed or gone.

    **Resuming.** ``state_dict()`` is that of the batch delivered last, not of those pulled ahead. A feed that has
    loaded it goes on behind that batch: by the loader's own state where it has one (as torchdata's
    ``StatefulDataLoader``), else by pulling and dropping what had been delivered.

    Args:
        loader: Yields batches.
        device: Where they go. With several devices, each batch is split along its first dimension, and a tuple with one
            part per device arrives.
        depth: How many batches may be under way, at least 1. That many slots, but at least 2, are taken on the device,
            the batch in use included, and one more in pinned memory, where large batches pass in sections.
        max_bytes: How many bytes may be under way in all.
        cast: What floating tensors become, on the device.
        channels_last: Give tensors of four dimensions this layout, on the device.
        transform: Called with each batch on the device after that, on the copy stream (on the CPU: in the worker);
            what it returns is delivered, copied once more if it is no plain tensor. It must not keep what it gets, nor
            hide it in objects that are registered to stay on the host, nor wait for the device. Tensors that require
            gradients reach it as the loader made them.
        drop_last: Leave out a batch that has fewer rows than the first.
        pad_last: Lengthen such a batch by repeating its last row; ``num_valid`` of the feed says how many are data.
        deal: With several devices: give them whole batches in turn.
        threads: How many threads stage a batch at most; by default as many as there are processors, up to 16.
        check: Verify every copy and poison every slot that was dropped, to find who reads or writes a batch when it is
            not his any more. Slow.

    Raises:
        ArgumentError: An argument is not acceptable, or ``loader`` cannot be iterated.
        DeviceError: The device does not exist.
    """
    options = Options(
        depth, max_bytes, make_transform(cast, channels_last, transform), drop_last, pad_last, deal, threads, check
    )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentError(
            f"The loader is a {type(loader).__name__}, which cannot be iterated; expected a DataLoader, "
            "a list, a generator or the like."
        )
    if isinstance(device, str) or not isinstance(device, Sequence):
        return Feed(loader, Place.of(device), options)
    places = tuple(Place.of(each) for each in device)
    if not places:
        raise ArgumentError("There is no device in the list of devices.")
    return Feed(loader, places, options)


class Feed:
    """Device batches of a loader; see ``feed``, which makes it.

    Every ``iter`` begins a new pass over the loader. There is one pass at a time: a new one ends the last, because two
    threads must not pull from one loader. Nor may two threads ask one pass: where several consume, let one of them send
    what it gets through a ``Channel``.

    Attributes:
        loader: Where batches come from.
        place: Where they go; the first of several.
        places: Where the parts of a batch go, if a list of devices was given; else ``None``.
        depth: How many may be under way.
    """

    def __init__(self, loader: Iterable[Any], place: Place | tuple[Place, ...], options: Options) -> None:
        self.loader = loader
        self.places = place if isinstance(place, tuple) else None
        self.place = place[0] if isinstance(place, tuple) else place
        self.depth = options.depth
        self._options = options
        self._closed = False
        self._progress = Progress()
        self._ledger: Ledger | None = None
        self._pace_maker = PaceMaker()
        self._lane: Lane[Any] | None = None
        self._shed = _Shed()
        self._finalizer = weakref.finalize(self, self._shed.end)
        # The end of the interpreter is the device context's to order.
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]
        # Weak: a loop that is left drops the pass, and with it must go the threads, although the feed lives on.
        self._last: weakref.ref[Session] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass.

        Raises:
            FeedError: The feed is closed.
        """
        if self._closed:
            raise FeedError("The feed is closed; make a new one with millstream.feed.")
        self._end_last("the feed has been iterated anew, and there is one pass at a time")
        iterator, skip, stateful = self._progress.begin(self.loader)
        take = partial(take_state, stateful) if stateful is not None else lambda: None
        if self.places is not None and self._options.deal:
            iterator = deal(islice(iterator, skip, None) if skip else iterator, len(self.places), take)
        lane, ledger = self._shed.find() or self._make_lane(), self._find_ledger()
        pace = self._pace_maker.begin_pass(may_be_alone=self.places is None and not self._options.check)
        ledger.begin_pass(is_alone=pace.alone)
        session = Session(
            iterator,
            lane,
            self.depth,
            max_bytes=self._options.max_bytes,
            prepare=self._make_prepare(skip, take),
            ledger=ledger,
            pace=pace,
            may_look_ahead=self.place.kind != "cpu" and _is_stored(self.loader),  # on the CPU nothing is staged
        )
        self._last = weakref.ref(session)
        begun = _Pass(session, self._progress, self.loader)
        self._shed.remove(lane)  # not before: until here an interrupt would have left the lane to nobody
        for place in self.places or (self.place,):
            for user in (session, self._shed):
                context(place).attach(user)
        self._lane = lane
        del iterator, stateful, take  # the worker's alone
        session.begin()
        return begun

    def _make_lane(self) -> Lane[Any]:
        if self.places is None:
            return self._make_one_lane(self.place)
        parts = len(self.places)
        lanes = [self._make_one_lane(place) for place in self.places]
        return ManyLane(lanes, list if self._options.deal else make_sharing(parts))

    def _make_one_lane(self, place: Place) -> Lane[Any]:
        options = self._options
        if place.kind == "cpu":
            return HostLane(options.transform)
        device = context(place)
        return CopyLane(
            device,
            self.depth,
            threads=options.threads,
            transform=options.transform,
            checker=Checker(device) if options.check else None,
            keep=_keep_in(weakref.ref(self._shed)),
        )

    def _find_ledger(self) -> Ledger:
        device = None if self.place.kind == "cpu" else context(self.place)
        if self._ledger is None or self._ledger.context is not device:  # the context may have been closed and made anew
            self._ledger = Ledger(device)
        return self._ledger

    def _make_prepare(self, skip: int, take: Callable[[], Any]) -> Prepare:
        """What the worker does with a batch as the source has made it."""
        options, progress = self._options, self._progress
        dealt = options.deal and self.places is not None
        is_plain = not (dealt or options.drop_last or options.pad_last)
        start = progress.position
        left = 0 if dealt else skip
        count = 0

        def prepare(batch: Any) -> tuple[Any, Note] | None:
            nonlocal left, count
            if left:
                left -= 1
                return None
            if is_plain:
                count += 1
                return batch, Note(start + count, take(), None)
            batches, state = batch if dealt else ([batch], None)
            count += len(batches)
            found = [_shape(each, options, progress) for each in batches]
            shaped, valid = [each for each, _ in found if each is not _LEFT_OUT], [rows for _, rows in found]
            if not shaped:
                return None
            num_valid = None if None in valid else sum(rows or 0 for rows in valid)
            batch = shaped if dealt else shaped[0]
            return batch, Note(start + count, state if dealt else take(), num_valid)

        return prepare

    # --- what became of it -------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Say where the time of the loop's steps went, over all passes so far; printing it shows a verdict."""
        ledger = self._find_ledger()
        ledger.num_kept = self._lane.num_kept if self._lane is not None else 0
        return ledger.stats()

    def timeline(self) -> Timeline:
        """The last measured steps in four lanes: source, staging, copies, steps; ``draw_lanes`` draws it."""
        return self._find_ledger().timeline()

    @property
    def num_valid(self) -> int | None:
        """Rows of what was delivered last that are data and not padding; only with ``pad_last`` or ``drop_last``."""
        return self._progress.num_valid

    @property
    def slot(self) -> int | None:
        """Number of the slot that the batch delivered last lies in; ``None`` where it lies in no slot.

        The tensors of a slot keep their addresses for as long as batches look alike and none is kept, so that a graph
        may be made for each slot and read its batch in place. Who does so must still compare addresses.
        """
        return self._lane.slot if self._lane is not None else None

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position behind the batch delivered last, and the loader's state there if it has one."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin where ``state`` was taken; a pass under way is ended.

        Raises:
            ArgumentError: This is not the state of a feed.
        """
        check_state(state)
        self._end_last("a state was loaded into the feed")
        self._progress.load_state_dict(state)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches of a whole pass, if the loader knows it; with ``drop_last`` there may be one less."""
        length = len(cast("Sized", self.loader))
        return -(-length // len(self.places)) if self.places is not None and self._options.deal else length

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the present pass, if there is one: no thread and no memory of it remain. Closing again does nothing.

        A worker that is inside the loader at this moment is waited for, but not for ever: if the loader takes long, the
        worker ends when the loader returns.
        """
        self._closed = True
        self._end_last("")
        self._shed.end()
        self._finalizer.detach()

    def _end_last(self, why: str) -> None:
        session = self._last() if self._last is not None else None
        if session is not None:
            session.close(why)
            if why:
                session.wait_for_worker()  # two threads must never pull from one loader
        self._last = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also in another process, is a feed of its own; it begins where this one's next pass would."""
        arguments = self.loader, self.places or self.place, self._options
        return Feed, arguments, {"_progress": copy.copy(self._progress)}

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        places = ", ".join(map(str, self.places or [self.place]))
        return f"<Feed of {type(self.loader).__name__} to {places}, depth {self.depth}{state}>"


def _is_stored(loader: Any) -> bool:
    """Whether its batches are made of what is there, so that none of them can depend on what the loop does."""
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, Sequence)


_LEFT_OUT = object()


def _shape(batch: Any, options: Options, progress: Progress) -> tuple[Any, int | None]:
    """What is to become of a batch that may be short, and how many of its rows are data, if that was asked for."""
    if not (options.drop_last or options.pad_last) or (rows := count_rows(batch)) is None:
        return batch, None
    if not progress.rows:  # a batch without any tells nothing
        progress.rows, progress.rowed = rows, have_rows(batch, rows)
    full = progress.rows
    if rows >= full:
        return batch, rows
    return (_LEFT_OUT, 0) if options.drop_last else (pad_rows(batch, rows, full, progress.rowed), rows)


class _Shed:
    """Holds a feed's lane between two passes."""

    def __init__(self) -> None:
        self._lanes: deque[CopyLane] = deque()  # one or none
        self._closed = False

    def put(self, lane: CopyLane) -> None:
        """Keep the lane until another pass takes it."""
        self._lanes.append(lane)
        if self._closed:
            self.close()

    def find(self) -> CopyLane | None:
        """The lane, for another pass of the calling thread's current stream, if there is one that can be used.

        It stays here until it is removed, when that pass will close it.
        """
        with suppress(IndexError):
            if (lane := self._lanes[0]).is_usable:
                lane.resume()
                return lane
            self.remove(lane)
        return None

    def remove(self, lane: Lane[Any]) -> None:
        """Forget the lane, if it is here."""
        with suppress(ValueError):
            self._lanes.remove(cast("CopyLane", lane))

    def end(self) -> None:
        """Close the lane that is here, and those to come: the feed is closed, or gone. Also in a finalizer."""
        self._closed = True
        self.close()

    def close(self) -> None:
        """Close the lane that is here. Any thread."""
        with suppress(IndexError):
            if (lane := self._lanes.popleft()).is_usable:
                lane.close()


def _keep_in(shed: weakref.ref[_Shed]) -> Callable[[CopyLane], bool]:
    """What puts a lane into a shed, if that has not gone with its feed, and tells."""

    def keep(lane: CopyLane) -> bool:
        found = shed()
        if found is not None:
            found.put(lane)
        return found is not None

    return keep


class _Pass(Iterator[Any]):
    """The iterator that a loop holds. When the loop drops it, the session ends."""

    def __init__(self, session: Session, progress: Progress, loader: Any) -> None:
        self.session = session
        self._progress = progress
        self._loader = loader
        self._is_over = False
        # The session must not refer back to this object, or leaving a loop would not end the threads. Nor do they.
        self._finalizer = weakref.finalize(self, session.close, "")
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]

    def __next__(self) -> Any:
        session, progress = self.session, self._progress
        try:
            item = session.next_batch()
        except BaseException as error:
            if isinstance(error, StopIteration) and session.finished and not self._is_over:
                progress.finish(self._loader)
                self._is_over = True
            if session.closed:
                # The finalizer is reachable for ever. By way of the session it leads to the error, to the frames that
                # the error has passed, and to all their variables.
                self._finalizer.detach()
            raise
        finally:
            del self, session  # as in ``next_batch``: an error's traceback must not lead back to the error
        # In one, without a call that an interrupt could come behind: the batch is the user's, and the position follows.
        batch, item.batch, item.load, progress.note = item.batch, None, None, item.note
        return batch
