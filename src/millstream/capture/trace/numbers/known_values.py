"""Tensors of a trace whose values are known, since nothing that a call brings is in them: masks, ranges, tables.

``torch.eye(n, dtype=torch.bool)`` is the same in each call. So the shape of ``scores[~mask]``, and what ``.item()`` and
``.tolist()`` give, are known while the step is traced.

**Contract**
- A tensor has values here only if operators that draw nothing have made it of plain arguments alone.
- What is written to it, or to what shares its memory, is written to the values, too; or they are forgotten.
- The graph gets as constants what is made of them with a shape that depends on them; all else is computed as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from millstream._torch.tensors import FakeTensor, real_tensors, without_autocast

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 18
"""Of a tensor whose values are followed: a mask of 512 × 512."""

LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})
"""Operators that turn a constant of the program into a tensor of the graph."""

_LIKE = frozenset(
    getattr(aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
"""Operators that take of a tensor all but its values."""

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNSET = ("empty", "new_empty")
_FOLLOWED = frozenset({"aten", "prims"})
_SHAPED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class KnownValues:
    """The values that are known."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()  # of fake tensors
        self._lost: dict[int, Any] = {}  # by id, memory of values that hold no more; kept, so that ids stay theirs

    def of(self, tensor: Any) -> Tensor | None:
        """The values of a fake tensor; ``None`` if they are not known."""
        values = self._values.get(tensor) if isinstance(tensor, FakeTensor) else None
        return None if values is None or _memory(values) in self._lost else values

    def read(self, tensor: Tensor, name: str) -> Any:
        """What a method of a tensor with known values gives, such as ``tolist``; ``NotImplemented`` without them."""
        if (values := self.of(tensor)) is None or (name != "tolist" and values.numel() != 1):
            return NotImplemented
        with real_tensors(), torch._C.DisableTorchFunction():
            return getattr(values, name)()

    def masks_replaced(self, key: Any) -> Any:
        """An index with positions in the place of masks that are known."""
        keys = key if type(key) is tuple else (key,)
        if not any(self._is_mask(each) for each in keys):
            return key
        return tuple(
            part for each in keys for part in (each.nonzero(as_tuple=True) if self._is_mask(each) else (each,))
        )

    def computed(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives whose result's shape or value depends on values; ``NotImplemented`` if not known."""
        if not any(tag in getattr(operator, "tags", ()) for tag in _SHAPED):
            return NotImplemented
        if operator is aten.masked_select.default and (mask := self.of(args[1])) is not None:
            with real_tensors():
                shape = torch.broadcast_shapes(args[0].shape, mask.shape)
                positions = mask.expand(shape).nonzero().unbind(1)
            return aten.index.Tensor(aten.expand.default(args[0], shape), [*map(self._lift, positions)])
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or any(self.of(each) is None for each in tensors):
            return NotImplemented
        result = self._run(operator, args, kwargs)
        return tree_map(lambda each: self._lift(each) if isinstance(each, Tensor) else each, result)

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow an operator that has run."""
        if operator in LIFTS:
            if not isinstance(args[0], FakeTensor) and args[0].numel() <= MOST_ELEMENTS:
                with real_tensors():
                    self._values[result] = args[0].detach().clone()
            return
        made = [*_tensors(result)]
        needed = [] if operator in _LIKE else [*_tensors((args, kwargs))]
        if all(self.of(each) is not None for each in needed) and _can_run(operator, args, kwargs, made):
            if operator in _LIKE:
                args = (_without_values(args[0]), *args[1:])
            try:
                values = [*_tensors(self._run(operator, args, kwargs))]
            except Exception:  # noqa: BLE001  fake tensors are taken by more than those with values are
                values = []
            if len(values) == len(made) > 0:
                for fake, value in zip(made, values, strict=True):
                    self._values[fake] = value
                return
        self.forget(*_shared(operator, args, kwargs))

    def forget(self, *tensors: Tensor) -> None:
        """They are given other memory, or theirs to others."""
        known = [values for values in map(self.of, tensors) if values is not None]
        self._lost |= {_memory(values): values for values in known}

    def _is_mask(self, key: Any) -> bool:
        return isinstance(key, Tensor) and key.dtype is torch.bool and key.dim() > 0 and self.of(key) is not None

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(lambda each: self.of(each) if isinstance(each, FakeTensor) else each, (args, kwargs))
        with real_tensors(), without_autocast(), torch.no_grad():
            return operator(*args, **kwargs)

    def _lift(self, values: Tensor) -> Tensor:
        """A constant of the graph."""
        with real_tensors():
            constant = values.cpu()
        made: Tensor = aten.lift_fresh_copy.default(constant)
        if values.device.type != "cpu":
            made = aten._to_copy.default(made, device=values.device)
        self._values[made] = values
        return made


def _memory(values: Tensor) -> int:
    return values.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def _without_values(tensor: Tensor) -> Tensor:
    with real_tensors():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _shared(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """What an operator may have written, or may have made views of."""
    if (schema := getattr(operator, "_schema", None)) is None:
        yield from _tensors((args, kwargs))
        return
    for index, each in enumerate(schema.arguments):
        if each.alias_info is not None:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(each.name))


def _can_run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Tensor]) -> bool:
    """Whether an operator gives the same each time, at little cost."""
    if getattr(operator, "namespace", "") not in _FOLLOWED or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    if operator.__name__.startswith(_UNSET):
        return False
    if any(type(each) not in _PLAIN and not isinstance(each, Tensor) for each in tree_leaves((args, kwargs))):
        return False
    sizes = [size for each in (*made, *_tensors((args, kwargs))) for size in each.shape]
    if any(type(size) is not int for size in sizes):
        return False
    return all(each.numel() <= MOST_ELEMENTS and each.device.type != "meta" for each in (*made, *_tensors(args)))
