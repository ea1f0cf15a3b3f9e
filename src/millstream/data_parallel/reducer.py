"""The gradients of one model: how processes agree on their buckets, and the mean over all of them.

The same code runs eagerly and while a step is traced, where each exchange becomes one node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from millstream._torch.distributed.collectives import EXCHANGE, unsaved_writes
from millstream.data_parallel.agreement import agreement_of, compare_over
from millstream.data_parallel.buckets import CAP_BYTES, Bucket, Member, plan_buckets
from millstream.data_parallel.exchange import Exchange, first_of, greatest_over, sum_over
from millstream.data_parallel.hyperparameters import optimizers_of, told_of


@dataclass(frozen=True, slots=True)
class ReducerSettings:
    """Settings that must be the same in all processes.

    Attributes:
        cap_bytes: Of a bucket.
        compress: Dtype in which gradients travel; ``None`` for their own.
        finds_unused: Whether processes tell each other in every step which parameters they have used.
        is_static: Whether the same are used in every step, so that once is enough.
    """

    cap_bytes: int = CAP_BYTES
    compress: torch.dtype | None = None
    finds_unused: bool = False
    is_static: bool = False


class Reducer:
    """The mean over processes of the gradients of some parameters. Made in all processes at once, outside of traces.

    Args:
        name: Of the model, for people.
        parameters: By name, those that get gradients, in the order of the model.
        group: The processes.
        settings: How.
        optimizers: That train them, as far as that is known.

    Attributes:
        buckets: Which gradients travel together.

    Raises:
        DataParallelError: The processes differ in any of it.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        settings: ReducerSettings,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.name, self.group, self.settings = name, group, settings
        self.names = [each for each, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_processes = dist.get_world_size(group)
        self.buckets = self._plan()
        self._unused: dict[int, frozenset[int]] = {}
        self._rounds: list[list[Exchange]] = []
        self._notes: list[Exchange] = []
        self._broadcasts: dict[object, list[Exchange]] = {}
        self._agree(optimizers)
        self._agreement = agreement_of(group, on_gpu=self._is_on_gpu()) if self.num_processes > 1 else None

    def _plan(self) -> list[Bucket]:
        return plan_buckets(
            [member_of(each, self.settings.compress) for each in self.parameters], self.settings.cap_bytes
        )

    def _is_on_gpu(self) -> bool:
        return bool(self.parameters) and all(each.is_cuda for each in self.parameters)

    def _agree(self, optimizers: Sequence[Optimizer]) -> None:
        """Compare what every process has.

        Raises:
            DataParallelError: They differ.
        """
        if self.num_processes == 1:
            return
        mine = [self.name, f"torch {torch.__version__}", str(self.settings)]
        mine += [f"{name}: {each.dtype} {list(each.shape)}" for name, each in self._named()]
        mine += [f"bucket of {bucket.num_elements}: {bucket.members}" for bucket in self.buckets]
        mine += told_of(optimizers_of(self.parameters, optimizers), self._named())
        wanted = "All must train the same model with the same settings and optimizers."
        compare_over(self.group, self.name, mine, wanted)

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*zip(self.names, self.parameters, strict=True)]

    def unused(self, time: int = 0) -> frozenset[int] | None:
        """Positions of the parameters that no process uses in that reduction of a step; ``None``: to be found out."""
        if self.settings.finds_unused or self.settings.is_static:
            return self._unused.get(time)
        return frozenset()

    def note_unused(self, time: int, unused: frozenset[int]) -> None:
        """Take it to be so in every step."""
        self._unused[time] = unused

    def exchange_use(self, used: Sequence[bool], time: int = 0) -> Tensor:
        """Tell each other which parameters were used; one in the result: by some process."""
        device = self.parameters[0].device
        if time == len(self._notes):
            like = torch.empty(len(used), dtype=torch.int32, device=device)
            whole = Bucket((0,), (0,), len(used))
            self._notes.append(
                Exchange(
                    whole,
                    [like],
                    self.group,
                    greatest_over,
                    f"which parameters {self.name} uses",
                    agreement=self._agreement,
                    is_first=True,
                )
            )
        note = torch.tensor(used, dtype=torch.int32) if not all(used) else torch.ones(len(used), dtype=torch.int32)
        (result,) = EXCHANGE([note.to(device)], self._notes[time].key)
        return result  # type: ignore[no-any-return]

    def reduce(self, unused: frozenset[int], time: int = 0) -> None:
        """Put the mean over all processes into every ``.grad``, but for those that no process has used.

        Args:
            unused: Positions of parameters that no process has used.
            time: How many reductions of the same step came before; each has memory of its own.
        """
        if time == len(self._rounds):
            self._rounds.append([*map(self._make_exchange, range(len(self.buckets)))])
        for number, (bucket, exchange) in enumerate(zip(self.buckets, self._rounds[time], strict=True)):
            results = EXCHANGE(self._scaled(bucket.members), exchange.key)
            for member, (position, result) in enumerate(zip(bucket.members, results, strict=True)):
                if position not in unused:
                    self._put(number, member, self.parameters[position], result)

    def _scaled(self, positions: Sequence[int]) -> list[Tensor]:
        """Return what a process adds to the means of some: scaled together, by few kernels instead of one each."""
        parameters, compress = [self.parameters[each] for each in positions], self.settings.compress
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        if compress is None:
            return list(torch._foreach_mul(gradients, 1 / self.num_processes))
        return list(torch._foreach_div([each.to(compress) for each in gradients], self.num_processes))

    def _put(self, bucket: int, member: int, parameter: Tensor, result: Tensor) -> None:  # noqa: ARG002  for others
        """Put what was reduced into a parameter's gradient."""
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(result)

    def _make_exchange(self, number: int) -> Exchange:
        bucket = self.buckets[number]
        like = [self.parameters[position] for position in bucket.members]
        label = f"bucket {number} of {self.name} ({len(like)} of {len(self.parameters)} gradients)"
        return Exchange(
            bucket,
            like,
            self.group,
            self._operation(number),
            label,
            self.settings.compress,
            agreement=self._agreement,
            is_first=number == 0,
        )

    def _operation(self, bucket: int) -> Callable[..., Any]:  # noqa: ARG002  for others
        return sum_over

    def broadcast(self, buffers: Sequence[Tensor], time: int = 0) -> None:
        """Give all processes the buffers of the first.

        Args:
            buffers: Looking alike in all processes.
            time: How many broadcasts of the same step came before.
        """
        form = (time, *((tuple(each.shape), each.stride(), each.dtype, each.device) for each in buffers))
        members = [member_of(each) for each in buffers]
        if form not in self._broadcasts:
            self._broadcasts[form] = [
                Exchange(
                    bucket,
                    [buffers[position] for position in bucket.members],
                    self.group,
                    first_of,
                    f"buffers of {self.name}",
                    agreement=self._agreement,
                    is_first=number == 0,
                )
                for number, bucket in enumerate(plan_buckets(members))
            ]
        for bucket, exchange in zip(plan_buckets(members), self._broadcasts[form], strict=True):
            sent = [buffers[position] for position in bucket.members]
            with unsaved_writes(sent):
                for buffer, result in zip(sent, EXCHANGE(sent, exchange.key), strict=True):
                    buffer.copy_(result)


def member_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Member:
    """A tensor as something that travels, in its own dtype or another."""
    dtype = dtype or tensor.dtype
    return Member((str(dtype), str(tensor.device)), tensor.numel(), dtype.itemsize)
