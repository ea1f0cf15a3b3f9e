"""The loader as a feed asks it: in the same order, modes and random state as a plain loop would, and from any position.

Reading ahead can change what a source yields in three ways, and each is noticed here:

- *Random numbers.* A source that draws from the global generators of PyTorch, NumPy or ``random`` must not do so beside
  a loop that draws from them, too. The second pull of a pass, in which the loop waits, tells whether it does. A source
  that begins later is noticed later: a generator that moved during a pull makes the next one wait for the loop again.
- *Refilled buffers.* Memory that a source yields again is overwritten by its next pull. On the way to a device every
  batch is staged before; on the CPU batches are copied until it is known that no two share memory, and if they do.
- *Modes.* Gradients, inference mode and autocast are those of the loop when it asked last.

How a pass begins where another was left: ``position.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from millstream._torch.loading import drop_workers, find_loader, has_known_samplers, has_workers, seed_drawn_aside
from millstream.data.sources.generators import DrawWatch, GeneratorSnapshot, find_own
from millstream.data.sources.position import BatchInfo, Position, is_stateful, take_state
from millstream.data.transfer.refills import RefillWatch, copy_batch
from millstream.errors import FeedError, warn_user


def is_stored(loader: Any) -> bool:
    """Return whether its batches are made of what is there, so that none of them can depend on what the loop does."""
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, Sequence)


def begins_in_caller(loader: Any) -> bool:
    """Return whether ``iter`` must be called in the loop's thread.

    A DataLoader that starts its worker processes elsewhere could not say that one of them was killed.
    """
    return bool(getattr(loader, "num_workers", 0))


def size_of(loader: Any) -> tuple[int | None, int | None]:
    """Return how many batches a pass over a stored loader has, and how many rows each, as far as it tells."""
    inner = loader if (found := find_loader(loader)) is None else found
    if not is_stored(inner):  # the length of a stream is a guess, and PyTorch warns when it was asked for and is wrong
        return None, None
    batches = None
    with suppress(Exception):  # a sampler without a length
        batches = len(inner)
    return batches, getattr(inner, "batch_size", None)


Shape = Callable[[Any], tuple[Any, int | None]]
"""Makes of a batch of the source the one to deliver, and says how many of its rows are data."""


class Source:
    """The loader in one pass.

    Args:
        loader: It.
        position: Where the pass begins, and what its state is.
        draws: Notices that it draws random numbers.
        refills: Notices that it refills its buffers, where batches are not copied anyway.
        shape: What is done to each batch, if anything is.

    Attributes:
        take: Takes the source's present state.
        is_own_iterator: Whether the loader is an iterator itself: what is pulled from it comes only once.
        num_pulled: How many times it was asked for a batch, and had one.
        wants_step: Whether the next pull has to wait for the loop.
    """

    def __init__(
        self,
        loader: Any,
        position: Position,
        draws: DrawWatch,
        refills: RefillWatch | None = None,
        shape: Shape | None = None,
    ) -> None:
        self._loader, self._position = loader, position
        self._draws, self._refills, self._shape = draws, refills, shape
        self._skip, self._state, self._stood = position.begin()
        self._count = position.position
        self._iterator: Iterator[Any] | None = None  # what ``iter`` gave; ``None`` before ``begin`` and after ``close``
        self.take: Callable[[], Any] = _no_state
        self.is_own_iterator = False
        self.num_pulled = 0
        self.wants_step = draws.in_step
        self._begun: GeneratorSnapshot | None = None  # where generators stood before the start
        self._now: GeneratorSnapshot | None = None  # where they are to be put back when a resumed pass has begun
        self._starting = ExitStack()  # until the first pull, in which a generator calls ``iter``

    def begin(self) -> None:
        """Make the iterator, resuming if the position says so."""
        loader, position, state = self._loader, self._position, self._state
        inner = find_loader(loader)
        self._check_size()
        if state is None and (self._stood is not None or position.kept_workers):
            self._now = GeneratorSnapshot.take()
            GeneratorSnapshot.load(self._stood or {}).restore(find_own(loader))
            if inner is not None:
                self._match_workers(inner)
        elif not self._skip:
            position.kept_workers = inner is not None and has_workers(inner)
        self._begun = GeneratorSnapshot.take(find_own(loader))
        stateful = loader if is_stateful(loader) else None
        if stateful is not None and state is not None:
            stateful.load_state_dict(state)
            self._skip = 0
        iterator: Any = _iterate(loader)
        self.is_own_iterator = iterator is loader
        if stateful is None and not self.is_own_iterator and is_stateful(iterator):
            stateful = iterator
            if state is not None:
                stateful.load_state_dict(state)
                self._skip = 0
        if stateful is not None:
            self.take = lambda: take_state(stateful)
            if state is None:
                with suppress(Exception):  # where it has none yet, one is taken with the first batch
                    position.begin_at(take_state(stateful))
        if self.is_own_iterator:
            position.forget_loaded()
        self._iterator = iterator

    def _check_size(self) -> None:
        """A pass is as long as the one to resume, if what that delivered is to be told by counting.

        Raises:
            FeedError: It is not: other rows would come.
        """
        size, before = size_of(self._loader), self._position.size
        is_told = all(was is None or now is None or was == now for was, now in zip(before, size, strict=True))
        if self._skip and self._state is None and not is_told:
            raise FeedError(
                f"The {type(self._loader).__name__} cannot be resumed: the pass to resume had {_describe(before)}, and "
                f"this one has {_describe(size)}, so that batch {self._skip + 1} begins at another row. Make it with "
                "the same data set and batch size, or begin a new pass with a new feed."
            )
        self._position.size = size

    def _match_workers(self, loader: DataLoader[Any]) -> None:
        """Have ``iter`` draw a seed for worker processes if the pass that is resumed did."""
        if not self._position.kept_workers:
            if has_workers(loader):
                drop_workers(loader)
            return
        if isinstance(loader.dataset, IterableDataset):
            warn_user(
                "The pass to resume had workers of an earlier one (persistent_workers=True), whose own random numbers "
                "are not in the feed's state: if the IterableDataset draws any in them, other rows come now. Draw from "
                "a seed of the epoch there, or use StatefulDataLoader."
            )
        if not has_workers(loader):
            self._starting.enter_context(seed_drawn_aside(loader))

    def _check_start(self, begun: GeneratorSnapshot) -> None:
        """The pass has begun as the one to resume did.

        Raises:
            FeedError: It has drawn other numbers. Where samplers are PyTorch's, only what else is drawn in the first
                pull, such as augmentations, may be different.
        """
        position, loader = self._position, find_loader(self._loader)
        if self._now is None or position.draws is None or position.drawn is None:
            return
        if loader is not None and has_known_samplers(loader):
            return
        here = GeneratorSnapshot.take(find_own(self._loader))
        if begun.moved(here) and here.digest(position.draws) != position.drawn:
            raise FeedError(
                f"The {type(self._loader).__name__} cannot be resumed: it has begun by drawing other random numbers "
                "than the pass to resume, so its rows would come in another order. Is it made as it was then, with "
                "the same num_workers and persistent_workers? A DataLoader with one of PyTorch's samplers can be "
                "resumed whichever they are, as can a loader with a state_dict and load_state_dict."
            )

    def pull(self, *, waited: bool) -> tuple[Any, BatchInfo]:
        """The next batch to deliver, and what travels with it.

        Args:
            waited: Whether the loop waits for it, so that nobody else draws random numbers meanwhile.

        Raises:
            StopIteration: There is none.
        """
        if self._iterator is None:
            raise StopIteration
        if self._begun is not None or self.num_pulled >= self._draws.next_due:
            batch = self._pull_watched(self._iterator, waited=waited)
        else:
            batch = next(self._iterator)  # nearly always
        self._count += 1
        info = BatchInfo(self._count, self.take())
        if self._shape is not None:
            batch, info.num_valid = self._shape(batch)
        if self._refills is not None and self._refills.is_watching:
            batch = self._keep_apart(batch, self._refills)
        self.num_pulled += 1
        return batch, info

    def _pull_watched(self, iterator: Iterator[Any], *, waited: bool) -> Any:
        """Pull, and see which generators that moves; the first time, after what had been delivered was dropped."""
        number, before = self.num_pulled, None
        begun, self._begun = self._begun, None
        try:
            if begun is not None and self._skip:
                next(iterator)
                self._starting.close()
                self._check_start(begun)
                for _ in range(self._skip - 1):
                    next(iterator)
            # What was drawn to skip batches is undone: the loop has its own generators, or has restored them.
            is_resumed = self._now is not None
            self._restore_now()
            if number >= self._draws.next_due:
                before = GeneratorSnapshot.take()
            batch = next(iterator)
            if begun is not None and not is_resumed:
                # What the start has moved: the sampler, and the loader that draws a seed for its workers.
                here = GeneratorSnapshot.take(find_own(self._loader))
                self._position.draws = draws = begun.dump_moved(here)
                self._position.drawn = here.digest(draws) if draws is not None else None
        finally:
            self._starting.close()
            self._restore_now()
        if before is not None:
            self._draws.look(number, before.moved(GeneratorSnapshot.take()), waited=waited)
            self.wants_step = self._draws.wants_step
        return batch

    def _restore_now(self) -> None:
        if self._now is not None:
            self._now.restore()
            self._now = None

    def _keep_apart(self, batch: Any, refills: RefillWatch) -> Any:
        """A batch on the CPU that the source's next pull does not overwrite."""
        if refills.refills:
            self.wants_step = self._draws.wants_step
        elif refills.look(batch):
            self.wants_step = True  # until the loop is done with all that was not copied
        return copy_batch(batch) if refills.copies else batch

    def close(self) -> None:
        """Forget the iterator: a DataLoader ends its worker processes when it dies."""
        self._starting.close()
        self._iterator = None
        self.take = _no_state


def _iterate(loader: Any) -> Iterator[Any]:
    """Return what ``iter`` gives.

    Of a sequence without ``__iter__`` Python does not ask for the length, but for items until it raises ``IndexError``:
    one that never does would go on for ever.
    """
    kind = type(loader)
    is_bounded = hasattr(kind, "__len__") and not hasattr(kind, "__iter__")
    return _Items(loader) if is_bounded else iter(loader)


class _Items(Iterator[Any]):
    """The items of a sequence without ``__iter__``, which may not be more than it has."""

    def __init__(self, sequence: Any) -> None:
        self._sequence, self._items, self._count = sequence, iter(sequence), 0

    def __next__(self) -> Any:
        item = next(self._items)
        if self._count >= (length := len(self._sequence)):
            raise FeedError(
                f"The {type(self._sequence).__name__} has a len() of {length}, and still an item {self._count}: a loop "
                "over it has no end. Let its __getitem__ raise IndexError there, or give it an __iter__."
            )
        self._count += 1
        return item


def _describe(size: tuple[int | None, int | None]) -> str:
    batches, rows = size
    parts = [f"{batches} batches" * (batches is not None), f"batch_size={rows}" * (rows is not None)]
    return " with ".join(filter(None, parts))


def _no_state() -> None:
    return None
