"""The state of an optimizer, divided between processes: each holds that of its share of the parameters alone.

The optimizer stays the user's object, with all parameters in its groups, and with state for those of which this process
has something. While it steps, its groups hold this process's parts in their place.

**Contract**
- State has the shapes of the parts from the moment on when it is made.
- ``state_dict()`` is this process's shard. Its parameter groups say so (``SHARD``), and it can be loaded where it was
  saved alone, whereas a whole state can be loaded in any number of processes.
- A step outside of a captured one is an error, as it would train the processes apart.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from millstream._torch.distributed.collectives import all_gather, timeout_of
from millstream._torch.distributed.fully_sharded import is_shard, whole_of
from millstream.data_parallel.sharding.pieces import Piece
from millstream.data_parallel.sharding.sharded_reducer import ShardedReducer, flat, shaped
from millstream.errors import ArgumentError, DataParallelError

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Optimizers that compute an element of a parameter from that element alone, of its gradient and of its state."""

SHARD = "shard"
"""Key of a parameter group: whose share of the state this is, for people and to compare."""


def why_not_sharded(name: str, optimizer: Optimizer, option: str = "shard_optimizer") -> str:
    """Why an optimizer cannot be divided between processes by an option of a step; empty where it can."""
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        return f"{name} is {type(optimizer).__name__}, which {option} does not know; it knows {kinds}."
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} has differentiable=True, which {option} does not know."
    return ""


class Sharding:
    """How one optimizer is divided.

    Args:
        name: Of the optimizer, for people.
        optimizer: The user's.
        owner: Its number in ``reducer``.
        reducer: Knows what is whose.

    Attributes:
        problem: Why its present state cannot be divided; empty where it was.
    """

    def __init__(self, name: str, optimizer: Optimizer, owner: int, reducer: ShardedReducer) -> None:
        self.name, self.owner, self._reducer, self._optimizer = name, owner, reducer, ref(optimizer)
        self._held: dict[int, tuple[int, Piece | None]] = {}  # by id of a parameter: its position, and what is here
        for number in reducer.buckets_of(owner):
            for member, position in enumerate(reducer.buckets[number].members):
                piece = reducer.pieces[number].get(member)
                self._held[id(reducer.parameters[position])] = position, piece
        layout = [(number, reducer.buckets[number]) for number in reducer.buckets_of(owner)]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        self.mark = f"rank {reducer.rank} of {reducer.num_processes}, layout {digest}"
        self._outside: tuple[Any, list[list[Tensor]]] | None = None
        self._origins: dict[int, Tensor] = {}
        self.problem = self._why_not(optimizer.param_groups)

    def begin(self) -> None:
        """Divide the state that there is, and that which is loaded from now on."""
        optimizer = self._optimizer()
        assert optimizer is not None
        is_shard = any(SHARD in group for group in optimizer.param_groups)
        for parameter in [*optimizer.state]:
            if id(parameter) in self._held:
                entry = self._part(parameter, optimizer.state.pop(parameter), is_shard=is_shard)
                if entry is not None:
                    optimizer.state[parameter] = entry
        for group in optimizer.param_groups:
            group[SHARD] = self.mark
        optimizer.register_load_state_dict_pre_hook(self._divide_loaded)
        optimizer.register_state_dict_post_hook(self._spoil_elsewhere)
        _known[optimizer] = self

    # --- a step -------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Have the optimizer see this process's parts, with their gradients and state, in the place of parameters."""
        optimizer = self._optimizer()
        assert optimizer is not None
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._outside = optimizer.state, [group["params"] for group in optimizer.param_groups]
        self._origins = {}
        for group in optimizer.param_groups:
            parts: list[Tensor] = []
            for parameter in group["params"]:
                position, piece = self._held.get(id(parameter), (-1, None))
                if position >= 0 and piece is None:
                    continue
                part = parameter
                if piece is not None and not piece.is_whole:
                    part = flat(parameter.detach(), parameter)[piece.start : piece.stop].clone()
                    if parameter.grad is not None:
                        part.grad = flat(parameter.grad, parameter)[piece.start : piece.stop]
                parts.append(part)
                self._origins[id(part)] = parameter
                if parameter in optimizer.state:
                    state[part] = optimizer.state[parameter]
            group["params"] = parts
        optimizer.state = state

    def leave(self) -> dict[int, Tensor]:
        """Have it see parameters again; return, by position, what this process has of each."""
        optimizer = self._optimizer()
        if self._outside is None or optimizer is None:
            return {}
        state, parameters = self._outside
        self._outside = None
        updated: dict[int, Tensor] = {}
        for group, before in zip(optimizer.param_groups, parameters, strict=True):
            for part in group["params"]:
                origin = self._origins[id(part)]
                updated[self._held.get(id(origin), (-1, None))[0]] = part
                if part in optimizer.state:
                    state[origin] = optimizer.state[part]
            group["params"] = before
        optimizer.state = state
        self._origins = {}
        return updated

    # --- what is saved ------------------------------------------------------------------------------------------------

    def _part(self, parameter: Tensor, entry: Any, *, is_shard: bool) -> Any:
        """This process's part of the state of a parameter; ``None``: it has none."""
        _, piece = self._held[id(parameter)]
        if piece is None or (is_shard and any(_is_nothing(value) for value in entry.values())):
            return None
        if is_shard or piece.is_whole:
            return entry
        return {
            key: flat(value, parameter)[piece.start : piece.stop].clone() if _is_like(value, parameter) else value
            for key, value in entry.items()
        }

    def _why_not(self, groups: Any) -> str:
        marks = {group.get(SHARD) for group in groups}
        if marks in ({None}, {self.mark}):
            return ""
        theirs = next(mark for mark in marks if mark not in (None, self.mark))
        return (
            f"What was loaded into {self.name} is the shard of {theirs}, and this is {self.mark}. Load it where it was "
            "saved, or save what ms.full_state_dict gives, which can be loaded anywhere."
        )

    def _divide_loaded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if problem := self._why_not(state_dict["param_groups"]):
            raise DataParallelError(problem)
        is_shard = any(SHARD in group for group in state_dict["param_groups"])
        state = dict(state_dict["state"])
        for index, parameter in _numbered(optimizer):
            if index in state and id(parameter) in self._held:
                entry = self._part(parameter, state.pop(index), is_shard=is_shard)
                if entry is not None:
                    state[index] = entry
        groups = [{**group, SHARD: self.mark} for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def _spoil_elsewhere(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Have an optimizer that is not divided fail with this state, rather than begin anew where there is none."""
        state = dict(state_dict["state"])
        template = next(iter(state.values()), {})
        nothing = {
            key: value.new_empty(0) if isinstance(value, Tensor) and value.dim() else value
            for key, value in template.items()
        }
        for index, parameter in _numbered(optimizer):
            if id(parameter) in self._held and index not in state and any(map(_is_nothing, nothing.values())):
                state[index] = nothing
        return {**state_dict, "state": state}

    def whole_state(self, end: float) -> dict[str, Any]:
        """The state of all processes, on the host, as ``state_dict()`` of an optimizer that is not divided."""
        optimizer, reducer = self._optimizer(), self._reducer
        assert optimizer is not None
        index_of = {id(parameter): index for index, parameter in _numbered(optimizer)}
        told = optimizer.state_dict()
        own = {index: told["state"][index] for index, each in _numbered(optimizer) if each in optimizer.state}
        mine: dict[int, dict[str, Any]] = {}
        for identity, (_, piece) in self._held.items():
            if piece is not None and (index := index_of[identity]) in own:
                mine[index] = {
                    key: (value.dtype,) if isinstance(value, Tensor) and value.dim() else _on_host(value)
                    for key, value in own[index].items()
                }
        everyone = _gather_objects(reducer.group, mine, reducer.parameters[0].device, end)
        whole = {index: entry for index, entry in own.items() if index not in {index_of[each] for each in self._held}}
        for number in reducer.buckets_of(self.owner):
            bucket, pieces = reducer.buckets[number], reducer.pieces[number]
            parameters = [reducer.parameters[position] for position in bucket.members]
            entries = [
                next((theirs[index_of[id(each)]] for theirs in everyone if index_of[id(each)] in theirs), {})
                for each in parameters
            ]
            device = parameters[0].device
            for key in sorted({key for entry in entries for key in entry}):
                dtype = next((entry[key][0] for entry in entries if isinstance(entry.get(key), tuple)), None)
                memory = None
                if dtype is not None:
                    memory = torch.zeros(bucket.num_elements, dtype=dtype, device=device)
                    for member, piece in pieces.items():
                        value = own.get(index_of[id(parameters[member])], {}).get(key)
                        if isinstance(value, Tensor) and value.dim():
                            part = flat(value, parameters[member]) if piece.is_whole else value
                            memory[piece.offset : piece.offset + piece.stop - piece.start] = part
                    chunk = memory.chunk(reducer.num_processes)[reducer.rank]
                    _wait(all_gather(memory, chunk, group=reducer.group, async_op=True), reducer.group, end)
                    memory = memory.cpu()
                for parameter, offset, entry in zip(parameters, bucket.offsets, entries, strict=True):
                    if key not in entry:
                        continue
                    value = entry[key]
                    if memory is not None and isinstance(value, tuple):
                        value = shaped(memory[offset : offset + parameter.numel()], parameter).clone()
                    whole.setdefault(index_of[id(parameter)], {})[key] = value
        groups = [{key: each for key, each in group.items() if key != SHARD} for group in told["param_groups"]]
        return {**told, "state": dict(sorted(whole.items())), "param_groups": groups}


_known: WeakKeyDictionary[Optimizer, Sharding] = WeakKeyDictionary()


def sharding_of(optimizer: Optimizer) -> Sharding | None:
    """How an optimizer is divided, if it is."""
    return _known.get(optimizer)


def full_state_dict(optimizer: Optimizer, *, timeout: float | None = None) -> dict[str, Any]:
    """The whole state of an optimizer that ``ms.step(shard_optimizer=True)`` has divided between processes.

    All processes call it at once, and each gets all of it, on the host, as ``optimizer.state_dict()`` gives it without
    ``shard_optimizer``: to save it in one process, and load it by ``load_state_dict`` in any number of them. That of
    an optimizer of shards, as with ``shard_parameters=True``, likewise; of another one it is ``state_dict()``.

    Args:
        optimizer: The user's.
        timeout: Seconds to wait for the other processes; that of the process group if ``None``.

    Raises:
        DataParallelError: The others did not come within that time, or one of them is gone.
    """
    sharding = sharding_of(optimizer)
    if sharding is None:
        told = optimizer.state_dict()
        entries = told["state"].items()
        if not any(is_shard(value) for _, entry in entries for value in entry.values()):
            return told
        whole = {index: {key: _on_host(whole_of(value)) for key, value in entry.items()} for index, entry in entries}
        return {**told, "state": whole}
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout={timeout!r} is no number of seconds; give a positive one, or None.")
    group = sharding._reducer.group
    return sharding.whole_state(time.monotonic() + (timeout_of(group) if timeout is None else timeout))


def _numbered(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Parameters with their numbers in a ``state_dict``."""
    return enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _is_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _gather_objects(group: dist.ProcessGroup, mine: Mapping[Any, Any], device: torch.device, end: float) -> list[Any]:
    """What every process has, without waiting for longer than until ``end``."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    payload = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)

    def gathered(part: Tensor) -> list[Tensor]:
        memory = torch.zeros(size * part.numel(), dtype=part.dtype, device=device)
        own = memory.chunk(size)[rank]
        own.copy_(part)
        _wait(all_gather(memory, own, group=group, async_op=True), group, end)
        return list(memory.cpu().chunk(size))

    lengths = [int(each) for each in gathered(torch.tensor([payload.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    parts = zip(gathered(padded), lengths, strict=True)
    return [pickle.loads(part[:length].numpy().tobytes()) for part, length in parts]  # noqa: S301  our own


def _wait(work: Any, group: dist.ProcessGroup, end: float) -> None:
    while not work.is_completed():
        if time.monotonic() > end:
            raise DataParallelError(
                f"Rank {dist.get_rank(group)} waited for the other processes to call full_state_dict, too, and they did"
                " not in time. All processes must call it, also where one of them alone saves the result."
            )
        time.sleep(1e-3)
    try:
        work.wait()
    except RuntimeError as error:
        raise DataParallelError(f"Rank {dist.get_rank(group)} could not gather the state: {error}") from error
