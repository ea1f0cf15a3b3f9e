"""``feed``: batches cross to the device while it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from millstream._torch.distributed.wrappers import is_distributed_run
from millstream.data.feed_engine import FeedEngine, PassHandle
from millstream.data.feed_options import ELSEWHERE, Options
from millstream.data.lengths import Lengths, Value
from millstream.data.passes.pipeline import IN_STEP, Pipeline
from millstream.data.passes.run import FeedRun
from millstream.data.profiler import Profiler
from millstream.data.shaping import Shaper, make_transform
from millstream.data.sources.generators import DrawWatch
from millstream.data.sources.position import Position
from millstream.data.sources.source import Source, begins_in_caller, is_stored
from millstream.data.stats import Stats
from millstream.data.together import Together
from millstream.data.transfer.refills import RefillWatch
from millstream.data.transfer.to_gpu import DeviceTransfer
from millstream.data.transfer.transfer import HostTransfer, Transfer, Transform
from millstream.data_parallel.roll_call import RollCall, roll_call_of
from millstream.device import Place, context
from millstream.errors import ArgumentError, FeedError, names_are_suggested

Device = str | int | torch.device | Place
T = TypeVar("T")
U = TypeVar("U")

if TYPE_CHECKING:
    from typing_extensions import TypedDict  # whose dicts may be closed

    class FeedSettings(TypedDict, total=False, closed=True):
        """Arguments of ``feed`` by name; see there."""

        max_bytes: int | None
        cast: torch.dtype | None
        channels_last: bool
        pad_last: bool
        pad_to: int | Sequence[int] | None
        pad_multiple: int | None
        pad_value: Value | Mapping[str, Value]
        prefetch: bool
        uneven: str | None


@overload
def feed(
    loader: DataLoader[T], device: Device, depth: int = 2, *, transform: None = None, **settings: Unpack[FeedSettings]
) -> Feed[T]: ...
@overload
def feed(
    loader: DataLoader[T],
    device: Device,
    depth: int = 2,
    *,
    transform: Callable[[T], U],
    **settings: Unpack[FeedSettings],
) -> Feed[U]: ...
@overload
def feed(
    loader: Iterable[T], device: Device, depth: int = 2, *, transform: None = None, **settings: Unpack[FeedSettings]
) -> Feed[T]: ...
@overload
def feed(
    loader: Iterable[T],
    device: Device,
    depth: int = 2,
    *,
    transform: Callable[[T], U],
    **settings: Unpack[FeedSettings],
) -> Feed[U]: ...
@names_are_suggested(ELSEWHERE)
def feed(  # noqa: PLR0913 - one keyword per thing that a user may want
    loader: Iterable[Any],
    device: Device,
    depth: int = 2,
    *,
    max_bytes: int | None = None,
    cast: torch.dtype | None = None,
    channels_last: bool = False,
    transform: Transform | None = None,
    pad_last: bool = False,
    pad_to: int | Sequence[int] | None = None,
    pad_multiple: int | None = None,
    pad_value: Value | Mapping[str, Value] = 0,
    prefetch: bool = True,
    uneven: str | None = None,
) -> Feed[Any]:
    """Iterate over the batches of ``loader``, with their tensors on ``device``.

    A thread pulls batches ahead, stages their tensors in pinned memory and has them copied on a stream of their own, so
    that the next batches cross while the device computes with the present one::

        for x, y in ms.feed(loader, "cuda"):
            train_step(x, y)

    **What arrives** are the loader's batches, as in a plain loop, random draws included. Tensors and NumPy arrays
    arrive as tensors, wherever they are in containers; a type that is not known is an error until ``register`` of
    ``millstream.data`` has taught it. On the CPU the loader's own objects arrive.

    **Whose a batch is.** Yours, for as long as you hold any tensor of it. It belongs to the stream that is current when
    it is asked for; where another stream uses it, that one must be waited for before you drop the batch.

    **Endings.** An error of the loader is raised where its batch would have come, once; then the pass is over. Leaving
    the loop in any way ends the pass; ``close`` and ``with`` end the thread, too. ``state_dict()`` is that of the batch
    delivered last. What else the loader has, such as ``dataset`` and ``set_epoch``, the feed has.

    The page *Feeding* of the documentation has the rest.

    Args:
        loader: Yields batches.
        device: Where they go; a number is that of a CUDA device.
        depth: How many batches may be under way, at least 1. That many buffers, but at least 2, are taken on the
            device, the batch in use included, and one more in pinned memory, where large batches pass in chunks.
        max_bytes: How many bytes may be under way in all.
        cast: What floating tensors become, on the device.
        channels_last: Give tensors of four dimensions this layout, on the device.
        transform: Called with each batch on the device after that, on the copy stream (on the CPU: in the worker);
            what it returns is delivered, copied once more if it is no plain tensor. It must not keep what it gets, nor
            hide it in objects that are registered to stay on the host, nor wait for the device. Tensors that require
            gradients reach it as the loader made them.
        pad_last: Lengthen a batch that has fewer rows than the first by repeating its last row, and lists that have an
            item for each row by repeating the last; ``num_valid`` says of a batch, and of the feed, how many rows are
            data.
        pad_to: Pad sequences to the least of these lengths that holds the longest of a batch, so that there are few
            shapes. Sequences are lists of tensors or of numbers within a batch, and packed sequences. In a dict the
            padded tensor stays under its key, with ``attention_mask`` beside ``input_ids`` and ``KEY_lengths`` beside
            others where the batch has no ``attention_mask``; elsewhere ``millstream.data.Padded`` arrives.
        pad_multiple: Or pad to multiples of this.
        pad_value: What is padded with. A dict of values by key also pads tensors under these keys, in dimension 1.
        prefetch: Whether a thread makes batches ahead. Without, each is made in your thread when you ask for it, which
            is faster where steps take less than some 0.3 ms; one further is pulled if the loader is a sequence, or a
            ``DataLoader`` over one.
        uneven: What all processes of ``torch.distributed`` do when one of them has no further batch and others have:
            ``"drop"`` theirs and end the pass, ``"pad"`` by repeating its last batch, or raise an ``"error"``. They
            tell each other before each batch. ``None``: each goes its own way.

    Raises:
        ArgumentError: An argument is not acceptable, or ``loader`` cannot be iterated.
        DeviceError: The device does not exist.
    """
    options = Options(
        depth,
        max_bytes,
        make_transform(cast, channels_last, transform),
        pad_last,
        prefetch,
        uneven,
        Lengths(pad_to, pad_multiple, pad_value),
    )
    if isinstance(loader, (str, int, torch.device)) and isinstance(device, Iterable) and not isinstance(device, str):
        raise ArgumentError(
            f"The loader is {loader!r} and the device a {type(device).__name__}: they are the wrong way round. "
            "Call feed(loader, device)."
        )
    if isinstance(loader, str | bytes):
        raise ArgumentError(
            f"The loader is the text {loader!r}, of which each letter would be a batch; expected a DataLoader, a list, "
            "a generator or the like."
        )
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise ArgumentError(
            f"The loader is a dataset ({type(loader).__name__}), which has single samples: give feed() a "
            "DataLoader(dataset, batch_size=...). Where each item is a batch already, batch_size=None says so."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ArgumentError(
            f"The loader is a {type(loader).__name__}, which cannot be iterated; expected a DataLoader, "
            "a list, a generator or the like."
        )
    return Feed(loader, Place.of(device), options)


class Feed(Generic[T]):
    """Device batches of a loader; see ``feed``, which makes it.

    Every ``iter`` begins a new pass over the loader. There is one pass at a time: a new one ends the last, because two
    threads must not pull from one loader. Nor may two threads ask one pass: where several consume, let one of them put
    what it gets into a ``queue.Queue``.

    Attributes:
        loader: Where batches come from.
        place: Where they go.
        depth: How many may be under way.
    """

    _closed = True  # where an interrupt has met ``__init__``

    def __init__(self, loader: Iterable[T], place: Place, options: Options) -> None:
        self.loader, self.place = loader, place
        self.depth = options.depth
        self._options = options
        self._position = Position()
        self._profiler: Profiler | None = None
        self._roll_call: RollCall | None = None
        self._draws, self._refills = DrawWatch(), RefillWatch(options.depth + 1)
        self._shaper = Shaper(pad_last=options.pad_last, lengths=options.lengths)
        self._engine = FeedEngine()
        self._closed = False

    def __iter__(self) -> Iterator[T]:
        """Begin a pass.

        Raises:
            FeedError: The feed is closed.
        """
        if self._closed:
            raise FeedError("The feed is closed; make a new one.")
        engine = self._engine
        engine.leave("the feed has been iterated again, and there is one pass at a time")
        begun = _Pass(self)
        engine.handle = begun.handle
        if engine.run is None or engine.run.goes_on or engine.run.is_over:
            begun.begin()
        roll_call = self._find_roll_call()
        if roll_call is None or self._options.uneven is None:
            return begun
        return Together(begun, roll_call, self._options.uneven, partial(self._finish, begun.handle), self._note_repeat)

    def _find_roll_call(self) -> RollCall | None:
        """By what processes tell each other of batches, if there are several, and they are to."""
        if self._options.uneven is None or not is_distributed_run() or dist.get_world_size() == 1:
            return None
        if self._roll_call is None:
            group: Any = dist.group.WORLD
            self._roll_call = roll_call_of(group)
        return self._roll_call

    def _finish(self, handle: PassHandle) -> None:
        """The pass is over for all processes, whatever this one still has."""
        if self._engine.handle is handle:
            self._engine.leave("")
            self._position.finish(self.loader)

    def _note_repeat(self) -> None:
        self._position.info.num_valid = 0

    def _begin(self) -> FeedRun:
        """A run for a new pass: the last one if that continues; else a new one, when its thread has left the source."""
        engine = self._engine
        if engine.run is not None:
            if engine.run.goes_on and engine.is_usable:
                engine.run.join_stream()
                return engine.run
            engine.run.leave()
            if not engine.run.is_inherited:
                engine.run.wait()  # two threads must never pull from one loader
        if not engine.is_usable:
            engine.transfer = self._make_transfer()
        assert engine.transfer is not None
        context(self.place).attach(engine)
        options, profiler = self._options, self._find_profiler()
        worker = engine.find_worker() if options.prefetch else None
        is_on_cpu = self.place.kind == "cpu"
        # On the CPU nothing is staged, so that nothing is gained by pulling early in the loop's own thread.
        looks_ahead = not is_on_cpu and is_stored(self.loader) and self.depth > 1
        look_ahead = None if worker is not None else int(looks_ahead)
        # Of a list all batches are there, and none is made where another was, nor by any random numbers.
        is_list = type(self.loader) in (list, tuple)
        # What workers send is in memory of its own; without a thread all is as in the plain loop.
        may_refill = is_on_cpu and not is_list and look_ahead != 0 and not begins_in_caller(self.loader)
        source = Source(
            self.loader,
            self._position,
            self._draws.begin_pass(may_draw=not is_list),
            self._refills.begin_pass() if may_refill else None,
            partial(self._shaper.shape, self._position) if self._shaper.is_needed else None,
        )
        in_step, num_buffers = 0 if is_list else IN_STEP, engine.transfer.num_buffers
        profiler.begin_pass(has_worker=worker is not None)
        engine.run = run = FeedRun(
            source,
            engine.transfer,
            Pipeline(self.depth, options.max_bytes, look_ahead, in_step, num_buffers),
            worker=worker,
            profiler=profiler,
        )
        run.begin(in_caller=is_list or begins_in_caller(self.loader))
        return run

    def _make_transfer(self) -> Transfer:
        transform = self._options.transform
        is_on_cpu = self.place.kind == "cpu"
        return HostTransfer(transform) if is_on_cpu else DeviceTransfer(context(self.place), self.depth, transform)

    def _find_profiler(self) -> Profiler:
        device = None if self.place.kind == "cpu" else context(self.place)
        if self._profiler is None or self._profiler.context is not device:  # which may have been closed and made again
            self._profiler = Profiler(device)
        return self._profiler

    # --- what became of it -------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return where the time of the loop's steps went, in the current pass or the last."""
        transfer = self._engine.transfer
        num_kept = transfer.num_kept if transfer is not None else 0
        return self._find_profiler().stats(num_kept=num_kept, in_step=self._draws.name)

    @property
    def num_valid(self) -> int | None:
        """Rows of what was delivered last that are data and not padding.

        0 for a batch that ``uneven="pad"`` repeats; for others ``None`` unless ``pad_last`` was given.
        """
        return self._position.num_valid

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch delivered last, and the loader's state there if it has one."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin where ``state`` was taken; a pass under way is ended.

        Raises:
            ArgumentError: This is not the state of a feed.
        """
        position = copy.copy(self._position)
        position.load_state_dict(state)
        self._engine.leave("a state was loaded into the feed", forever=True)
        self._position.load_state_dict(state)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """What else the loader has is the feed's: ``dataset``, ``sampler``, ``batch_size``, ``set_epoch``, ..."""
        if name.startswith("_") or name == "loader":  # as where a copy is made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.loader, name)
        except AttributeError:
            kind = type(self.loader).__name__
            raise AttributeError(f"Neither the feed nor its {kind} has an attribute {name!r}.") from None

    def __len__(self) -> int:
        """Number of batches of a whole pass, if the loader knows it."""
        return len(cast("Sized", self.loader))

    def __enter__(self) -> Feed[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the present pass, if there is one: no thread and no memory of it remain. Closing again does nothing.

        A thread that is inside the loader at this moment is not waited for: it ends when the loader returns.
        """
        self._closed = True
        self._engine.close("")

    def __del__(self) -> None:
        # Not by weakref.finalize, which keeps the engine alive: what its source is of may lead back to this feed.
        if not self._closed:
            self._engine.close("")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also in another process, is a feed of its own; it begins where this one's next pass would."""
        return Feed, (self.loader, self.place, self._options), {"_position": copy.copy(self._position)}

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Feed of {type(self.loader).__name__} to {self.place}, depth {self.depth}{state}>"


class _Pass(Iterator[Any]):
    """The iterator that a loop holds. When the loop drops it, the pass ends."""

    _run: FeedRun | None = None  # also where an interrupt has met ``__init__``

    def __init__(self, feed: Feed[Any]) -> None:
        self._feed = feed
        self.handle = PassHandle()
        self._next: Callable[[], Any] = self._begin_and_ask

    def begin(self) -> None:
        """Begin the run."""
        self._run = run = self._feed._begin()
        self._next = run.next_item

    def _begin_and_ask(self) -> Any:
        self.begin()
        return self._next()

    def __next__(self) -> Any:
        position = self._feed._position
        try:
            if self.handle.is_over:
                self._refuse()
            item = self._next()
            run: Any = self._run
        except BaseException as error:
            self._end(error)
            if isinstance(error, StopIteration):
                self._refuse()  # another thread may have ended it meanwhile
            raise
        finally:
            del self  # an error's traceback must not lead back to the error
        # In one, without a call that an interrupt could come after: the batch is the user's, and the position follows.
        batch, item.batch, item.pending, position.info, run.is_asked = item.batch, None, None, item.info, False
        return batch

    def _refuse(self) -> None:
        if self.handle.why:
            raise FeedError(f"This pass over the feed has ended: {self.handle.why}.")
        raise StopIteration

    def _end(self, error: BaseException) -> None:
        """The pass is over, unless its batch can still be had."""
        run = self._run
        if run is not None and not isinstance(error, Exception):
            run.leave(forever=False)
        elif run is not None and not run.is_left:
            return
        if run is not None and run.has_ended and not self.handle.is_over:
            self._feed._position.finish(self._feed.loader)
        self.handle.end("")

    def __del__(self) -> None:  # the run does not refer back to this object, or leaving a loop would not end it
        if self._run is not None and not self.handle.is_over:
            self.handle.end("")
            self._run.leave(forever=False)
