"""Fake twins of the user's tensors: what a step is traced on, while nobody's tensor is touched.

The step goes on to hold the user's own tensors: ``is``, ``id``, dicts and attributes are theirs. Only what PyTorch is
given is another: see ``FunctionWatch``, by which each tensor goes to its twin, and each twin that comes back to its
tensor. Autograd knows twins alone, so that gradients land on them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from millstream._torch.distributed.fully_sharded import local_of
from millstream._torch.tensors import FakeTensor, FakeTensorMode

_thread = threading.local()


class Twins:
    """Fake tensors in the place of the user's.

    Attributes:
        fakes: Of ``tensors``, in this order.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        mode: FakeTensorMode,
        devices: Mapping[int, torch.device],
        last: Sequence[Tensor] = (),
        kind: type[FakeTensor] = FakeTensor,
    ) -> None:
        """Make them.

        Args:
            tensors: Distinct tensors.
            mode: Of the fake tensors.
            devices: For positions in ``tensors``: another device to pretend.
            last: What stands for the last of them; the others are given fake tensors of their own shapes.
            kind: Their class.
        """
        self.tensors = tensors
        others = tensors[: len(tensors) - len(last)]
        self.fakes: list[Tensor] = [*(_fake_of(tensor, mode) for tensor in others), *last]
        with mode:
            for index, device in devices.items():
                self.fakes[index] = torch.empty_like(self.fakes[index], device=device)
        for fake in self.fakes:
            fake.__class__ = kind
        self._fake_of = {id(tensor): fake for tensor, fake in zip(tensors, self.fakes, strict=True)}
        self._real_of = {id(fake): tensor for tensor, fake in zip(tensors, self.fakes, strict=True)}
        self._attributes = [dict(vars(tensor)) for tensor in tensors]
        for tensor, fake, attributes in zip(tensors, self.fakes, self._attributes, strict=True):
            vars(fake).update((key, value) for key, value in attributes.items() if key not in vars(fake))
            if fake.is_leaf:
                fake.grad = None if tensor.grad is None else self._fake_of.get(id(tensor.grad))

    @contextmanager
    def active(self) -> Iterator[Self]:
        """For the length of the context, be those of this thread; attributes that it puts on tensors are then gone."""
        before = twins_of_thread()
        _thread.twins = self
        try:
            yield self
        finally:
            _thread.twins = before
            for tensor, attributes in zip(self.tensors, self._attributes, strict=True):
                for key in vars(tensor).keys() - attributes:
                    del vars(tensor)[key]
                vars(tensor).update(attributes)  # never without those of before: other threads read them
            # What has watched the trace is full of cycles: nobody's batch is to live until they are collected.
            self.tensors, self.fakes, self._attributes = (), [], []
            self._fake_of.clear()
            self._real_of.clear()

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor of the user's has a twin."""
        return id(tensor) in self._fake_of

    def fake(self, tensor: Tensor) -> Tensor:
        """The twin of a tensor, or what it is itself."""
        return self._fake_of.get(id(tensor), tensor)

    def real(self, tensor: Any) -> Any:
        """The tensor of a twin, or what it is itself."""
        return self._real_of.get(id(tensor), tensor)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as PyTorch is given them."""
        return self.fakes_in(args), {key: self.fakes_in(each) for key, each in kwargs.items()}

    def fakes_in(self, value: Any) -> Any:
        """A value as PyTorch is given it: twins in the place of tensors, also in lists and tuples."""
        return _mapped(self._fake_of, value)

    def reals_in(self, value: Any) -> Any:
        """A value as the step is given it: tensors in the place of their twins, also in lists and tuples."""
        return _mapped(self._real_of, value)


def _fake_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor like another one; of a shard, like what this process has of it."""
    own = local_of(tensor)
    fake = mode.from_tensor(own, static_shapes=True)
    if own is tensor:
        return fake
    fake.requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


def _mapped(others: Mapping[int, Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, list | tuple):
        parts = [_mapped(others, each) for each in value]
        if all(part is each for part, each in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def twins_of_thread() -> Twins | None:
    """Return those with which this thread traces, if it does."""
    return getattr(_thread, "twins", None)


def is_traced(tensor: Any) -> bool:
    """Return whether a tensor is one of the graph in the trace of this thread."""
    return isinstance(tensor, FakeTensor) or ((twins := twins_of_thread()) is not None and twins.holds(tensor))


def fake_of(value: Any) -> Any:
    """A value as PyTorch is given it in the trace of this thread, if there is one."""
    return value if (twins := twins_of_thread()) is None else twins.fakes_in(value)


def real_of(value: Any) -> Any:
    """A value as the user's code is given it in the trace of this thread, if there is one."""
    return value if (twins := twins_of_thread()) is None else twins.reals_in(value)
