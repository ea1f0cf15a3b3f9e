"""Rules about what operators read and write, and what ``s[i].name`` stands for."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from millstream._torch.dispatcher import is_composite, names_of_overloads

if TYPE_CHECKING:

    class Functions:
        """What type checkers know of ``s[1].mm``: the functions used most by their types, others as any function."""

        mm = staticmethod(torch.mm)
        bmm = staticmethod(torch.bmm)
        matmul = staticmethod(torch.matmul)
        add = staticmethod(torch.add)
        mul = staticmethod(torch.mul)
        cat = staticmethod(torch.cat)
        stack = staticmethod(torch.stack)
        einsum = staticmethod(torch.einsum)
        linear = staticmethod(F.linear)
        relu = staticmethod(F.relu)
        gelu = staticmethod(F.gelu)
        silu = staticmethod(F.silu)
        softmax = staticmethod(F.softmax)
        layer_norm = staticmethod(F.layer_norm)
        cross_entropy = staticmethod(F.cross_entropy)
        scaled_dot_product_attention = staticmethod(F.scaled_dot_product_attention)

else:
    Functions = object


class Effect(enum.Enum):
    """The effect of an operator on the storages of its arguments."""

    VIEW = "touches no memory of the device"
    COMPUTE = "reads its arguments, and writes those that its schema names"
    REALLOCATE = "may give a storage other memory"


class OperatorRule(NamedTuple):
    """The treatment of an operator.

    Attributes:
        effect: Its kind.
        positions: Which positional arguments it writes.
        names: Which keyword arguments it writes.
    """

    effect: Effect
    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


_REALLOCATING = frozenset(("resize_", "resize_as_", "set_", "_resize_output_", "resize_as_sparse_"))
_HOST_ONLY = frozenset(("record_stream", "is_pinned", "_version", "is_same_size"))


@functools.cache
def recipe_of(func: Any) -> OperatorRule:
    """Return what an operator of PyTorch's dispatcher does, by its schema.

    Custom operators count as their authors have declared them.
    """
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    if name in _HOST_ONLY:
        return OperatorRule(Effect.VIEW)
    if name in _REALLOCATING:
        return OperatorRule(Effect.REALLOCATE)
    written = [i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    names = frozenset(schema.arguments[i].name for i in written)
    aliases = [ret.alias_info is not None for ret in schema.returns]
    if not written and aliases and all(aliases):
        return OperatorRule(Effect.VIEW)
    return OperatorRule(Effect.COMPUTE, frozenset(written), names)


class Function(NamedTuple):
    """A function that ``s[i].name`` calls.

    Attributes:
        call: The function.
        is_plain: Whether it only reads its arguments, or writes the first one alone: then its uses are known from the
            arguments, and nothing has to look at what it calls.
        writes_first: Whether it writes its first argument.
    """

    call: Callable[..., Any]
    is_plain: bool = False
    writes_first: bool = False


#: Composite operators, whose schemas promise nothing, that only read their arguments.
_READING = frozenset(
    "linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bilinear einsum tensordot "
    "layer_norm group_norm rms_norm softmax log_softmax chain_matmul outer inner kron cosine_similarity pad "
    "cross_entropy_loss nll_loss_nd max_pool1d max_pool2d max_pool3d avg_pool1d stack hstack vstack where".split()
)


def look_up(name: str) -> Callable[..., Any]:
    """Find a function by its name in ``torch.nn.functional`` or ``torch``, in this order.

    Raises:
        AttributeError: Neither has a function of that name.
    """
    for module in (F, torch):
        call = getattr(module, name, None)
        if not name.startswith("_") and callable(call) and not isinstance(call, (type, types.ModuleType)):
            return call  # type: ignore[no-any-return]
    raise AttributeError(
        f"Neither torch.nn.functional nor torch has a function {name!r}; for one of your own write s[i](function, ...)."
    )


@functools.cache
def find_function(name: str) -> Function:
    """``look_up``, and what the function does to its arguments."""
    return _classify(look_up(name))


def _classify(call: Callable[..., Any]) -> Function:
    name = getattr(call, "__name__", "")
    overloads = names_of_overloads(name) if isinstance(call, types.BuiltinFunctionType) else []
    writes_first = False
    for overload in overloads:
        operator = getattr(getattr(torch.ops.aten, name), overload)
        recipe = recipe_of(operator)
        if any(arg.is_out for arg in operator._schema.arguments):
            continue  # a call with ``out=`` is looked at closely
        if is_composite(operator) and name not in _READING:
            return Function(call)
        if recipe.effect is Effect.REALLOCATE or recipe.positions - {0}:
            return Function(call)
        writes_first |= 0 in recipe.positions
    return Function(call, bool(overloads), writes_first)
