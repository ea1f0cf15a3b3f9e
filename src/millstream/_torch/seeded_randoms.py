"""Random numbers that follow from a seed, which is a tensor: what functions of control flow draw.

PyTorch's operators draw from a generator, which the host moves on. A function that runs as often as values say cannot
have that: a CUDA graph would have to know how often, and where autograd runs it once more, it would draw others. So the
generator gives a seed before, by whose value all else is drawn.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, inductor_prims  # noqa: F401  which defines the operators of ``prims`` below
from torch._inductor.decomposition import fast_random_decomps
from torch.utils._python_dispatch import TorchDispatchMode

from millstream._torch.dispatcher import is_composite

aten = torch.ops.aten

_library = torch.library.Library("millstream", "FRAGMENT")
_library.define("draw(Tensor seed, int number, SymInt[] size, str kind, int low=0, int high=0) -> Tensor")

DRAW = torch.ops.millstream.draw.default
"""``draw(seed, number, size, kind)``: what ``torch.rand``, ``randn`` or ``randint`` gives; another for each number."""

SEED = torch.ops.prims.inductor_seed.default
"""``SEED(device)``: a seed, of the device's generator."""
SEEDS = torch.ops.prims.inductor_seeds.default
"""``SEEDS(count, device)``: so many."""
LOOKUP = torch.ops.prims.inductor_lookup_seed.default
"""``LOOKUP(seeds, number)``: one of them."""

BY_SEED = frozenset({DRAW, torch.ops.prims.inductor_random.default, torch.ops.prims.inductor_randint.default})
"""Operators that draw by a seed."""


def draws_by_generator(options: Mapping[str, Any]) -> bool:
    """Whether PyTorch's generators are to give all random numbers, as they do in eager."""
    return bool(options.get("fallback_random", config.fallback_random))


def new_seed(device: torch.device, num_draws: int, turns: int | None = None) -> Tensor:
    """Draw a seed, or one for each turn of a loop, of which each draws so many numbers."""
    seed = SEED(device)
    return seed if turns is None else torch.arange(turns, device=device) * num_draws + seed


@torch.library.impl(_library, "draw", "CompositeExplicitAutograd")
def _draw(seed: Tensor, number: int, size: Sequence[int], kind: str, low: int = 0, high: int = 0) -> Tensor:
    own: Any = {"generator": torch.Generator(seed.device).manual_seed(int(seed) + number), "device": seed.device}
    if kind == "randint":
        return torch.randint(low, high, size, **own)
    return getattr(torch, kind)(size, dtype=torch.float32, **own)  # type: ignore[no-any-return]


@torch.library.register_fake("millstream::draw", lib=_library)
def _describe(seed: Tensor, number: int, size: Sequence[int], kind: str, low: int = 0, high: int = 0) -> Tensor:  # noqa: ARG001
    return torch.empty(size, dtype=torch.int64 if kind == "randint" else torch.float32, device=seed.device)


class DrawnFrom(TorchDispatchMode):
    """While it is on, operators draw by a seed; those without a rule draw as always.

    Args:
        seed: An integer on the device where numbers are drawn; ``None`` counts them alone, and gives any.
        first: The number of the first draw.

    Attributes:
        number: Of the next draw.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: Tensor | None = None, first: int = 0) -> None:
        super().__init__()
        self._seed, self.number = seed, first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and is_composite(func):  # as where autograd is left out
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if (rule := _RULES.get(func)) is not None:
            made = rule(self, func, *args, **kwargs)
            return func(*args, **kwargs) if made is NotImplemented else made
        if func._overloadpacket in _DECOMPOSED and (decomposed := _TABLE.get(func)) is not None:
            with self:
                return decomposed(*args, **kwargs)
        return func(*args, **kwargs)

    def draw(self, size: Sequence[int], device: torch.device | None, kind: str, low: int = 0, high: int = 0) -> Tensor:
        """Draw numbers by the seed; ``NotImplemented`` where that is on another device."""
        device = torch.device(device or "cpu")
        if self._seed is not None and (
            device.type != self._seed.device.type or device.index not in (None, self._seed.device.index)
        ):
            return NotImplemented
        self.number += 1
        if self._seed is None:
            return torch.zeros(size, device=device, dtype=torch.int64 if kind == "randint" else torch.float32)
        return DRAW(self._seed, self.number - 1, size, kind, low, high)  # type: ignore[no-any-return]


def _floats(drawn: DrawnFrom, func: Any, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex:
        return NotImplemented
    made = drawn.draw(size, device, func._overloadpacket.__name__)
    return made if made is NotImplemented else made.to(dtype)


def _integers(
    drawn: DrawnFrom, _: Any, low: int, high: int, size: Any, *, dtype: Any = None, device: Any = None, **__: Any
) -> Any:
    made = drawn.draw(size, device, "randint", low, high)
    return made if made is NotImplemented else made.to(dtype or torch.int64)


def _seed(drawn: DrawnFrom, _: Any, device: torch.device) -> Any:
    return drawn.draw((), device, "randint", 0, 2**63 - 1)


def _uniform(drawn: DrawnFrom, _: Any, like: Tensor, low: float = 0, high: float = 1, **__: Any) -> Tensor:
    with drawn:
        return torch.rand_like(like) * (high - low) + low


def _normal(drawn: DrawnFrom, _: Any, like: Tensor, mean: float = 0, std: float = 1, **__: Any) -> Any:
    if like.is_complex():
        return NotImplemented
    with drawn:
        return torch.randn_like(like) * std + mean


def _normal_of(drawn: DrawnFrom, _: Any, mean: Any, std: Any = 1, size: Any = None, **how: Any) -> Any:
    given = [each for each in (mean, std) if isinstance(each, Tensor)]
    if any(each.is_complex() for each in given):
        return NotImplemented
    if given:
        size = torch.broadcast_shapes(*(each.shape for each in given))
        how = {"dtype": given[0].dtype, "device": given[0].device}
    with drawn:
        noise = torch.randn(size, dtype=how.get("dtype"), device=how.get("device"))
    return noise * std + mean


def _in_place(rule: Any) -> Any:
    def run(drawn: DrawnFrom, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = rule(drawn, func, tensor, *args, **kwargs)
        return made if made is NotImplemented else tensor.copy_(made)

    return run


def _bernoulli(drawn: DrawnFrom, _: Any, like: Tensor, p: Any = 0.5, **__: Any) -> Tensor:
    with drawn:
        return (torch.rand_like(like, dtype=torch.float32) < p).to(like.dtype)


def _samples(drawn: DrawnFrom, _: Any, weights: Tensor, count: int, replacement: bool = False, **__: Any) -> Any:
    """As PyTorch draws samples of which none comes twice: each weight by a number of its own, the largest of them."""
    if replacement and count > 1:
        return NotImplemented
    with drawn:
        ranks = weights / aten.exponential(weights)
    return ranks.argmax(-1, keepdim=True) if count == 1 else ranks.topk(count, -1)[1]


_RULES: dict[Any, Any] = {
    aten.rand.default: _floats,
    aten.randn.default: _floats,
    aten.randint.low: _integers,
    aten.uniform.default: _uniform,
    aten.uniform_.default: _in_place(_uniform),
    aten.normal_functional.default: _normal,
    aten.normal_.default: _in_place(_normal),
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.float_float: _normal_of,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _in_place(_bernoulli),
    aten.bernoulli_.Tensor: _in_place(_bernoulli),
    aten.multinomial.default: _samples,
    SEED: _seed,
}

_DECOMPOSED = {
    getattr(aten, name)
    for name in """
    bernoulli cauchy cauchy_ exponential exponential_ geometric geometric_ log_normal log_normal_
    native_dropout rand_like randint randint_like randn_like
    """.split()
}
"""Operators that PyTorch writes in terms of those above."""

_TABLE = fast_random_decomps()


def may_follow_seed(operator: Any) -> bool:
    """Whether an operator that writes nothing draws random numbers, and may draw them by a seed instead.

    Not so ``multinomial``, which checks its weights.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()) or operator._schema.is_mutable:
        return False
    is_known = operator in _RULES or (operator._overloadpacket in _DECOMPOSED and operator in _TABLE)
    return is_known and operator not in (SEED, aten.multinomial.default)
