"""Work that is done for nothing while Inductor compiles, left out. What it generates stays the same, to the letter.

``MILLSTREAM_WITHOUT=shortcuts`` switches all of this off.

Private APIs of Inductor's code generation; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config, fx_utils, ir, lowering
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp import CppVecKernel
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.exc import OperatorIssue
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map

from millstream._torch.workarounds import is_off, replaced
from millstream.lower.inductor.shortcuts.comparisons import quick_comparisons
from millstream.lower.inductor.shortcuts.fusing import quick_fusing
from millstream.lower.inductor.shortcuts.leaves import quick_nodes
from millstream.lower.inductor.shortcuts.sets import quick_sets, shared_origins


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Generate code more quickly inside the ``with`` block: a fifth of the time that compiling for a CPU takes.

    - The rules by which operations get their dtypes are kept in one object, and filled in again for every operation of
      every kernel. Once will do.
    - A vectorised loop gets a kernel for what is left over behind the last full vector, also where that is nothing;
      such a kernel is generated and dropped. Here it stays empty.
    - By how much an index grows with a variable is asked for every access and variable, and answered by SymPy's
      ``simplify``. Where the variable is only multiplied by a number, that number is the answer. Where values of the
      variable show that the growth is no number, as in windows of a pooling, nobody asks for more than that.
    - Where a tensor has been replaced in the graph, torch 2.11 runs everything that uses it with fake tensors, to see
      whether it returns the same memory (2.13 does not come to that). It does not look at several results, or none:
      they count as if they did. Operators over all parameters of an optimizer were run once for each of them.
    - Whether Inductor supports a tensor is asked for each of a list, for each operator that uses an item of that list,
      of which an optimizer has one for each parameter. It depends on the tensor's dtype, device and layout, mostly.
    - Arguments of each new node are searched for symbolic numbers, in torch 2.13: a quarter of what it takes to make
      one.
    - Whether two nodes may be fused is asked of sets of what they read and write, which are put together one item at a
      time, each hashed again, its expressions included: hundreds of items for each node that may join an optimizer's
      kernel. Here an item, which never changes, is hashed once, and sets become one as dictionaries do.
    - Names of the buffers that a node uses are gathered for each pair that it is in, and names of a kernel's parts for
      each part by which it grows.
    - Of what is computed from items of a list, each item is noted to come from all nodes of the graph that any of them
      comes from. Here items that are made by one operator have one such set, and it is read once.
    - Numbers are compared by what SymPy does with expressions, and expanded.
    - Nodes that may be fused are tried with other axes, which for each pair are made anew, and thrown away again.
    - Whether fusing takes more memory is asked of all that both nodes read. It suffices to ask of the one that reads
      less, unless that is much more than what they share.
    - The dtype of a result is asked of tensors that are made for that; it depends on dtypes and numbers of dimensions.
    - Comments on launches are written into a wrapper that has none.
    - For a log, torch 2.11 writes down what an operator is given that it calls as it is: all that those values are
      computed from, again and again. A loop's node took minutes.

    Not for several threads at once: Inductor itself compiles under one lock.
    """
    if is_off("shortcuts"):
        yield
        return
    DtypePropagationOpsHandler()
    generate = SchedulerNode.codegen

    def generate_if_used(self: SchedulerNode, index_vars: Sequence[Sequence[Any]]) -> None:
        if not _is_for_nothing(V.kernel):
            generate(self, index_vars)

    find = cpp.stride_at_vec_range

    def find_stride(index: sympy.Expr, var: sympy.Symbol, vec_length: int | None = None) -> sympy.Expr:
        found = _factor_of(var, index)
        if found is None:
            found = _growth_with(var, index, vec_length)
        return find(index, var, vec_length) if found is None else found

    find_fakes = fx_utils.get_fake_args_kwargs

    def find_if_looked_at(node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        is_about_alias = sys._getframe(1).f_code.co_name == "any_user_may_alias"
        return (False, (), {}) if is_about_alias and not _returns_tensor(node) else find_fakes(node, *args, **kwargs)

    with (
        _asking_once(),
        quick_sets(),
        quick_nodes(),
        shared_origins(),
        quick_comparisons(),
        quick_fusing(),
        _promoting_once(),
        _without_comments(),
        replaced(OperatorIssue, "operator_str", staticmethod(_told)),
        replaced(fx_utils, "get_fake_args_kwargs", find_if_looked_at),
        replaced(DtypePropagationOpsHandler, "__init__", lambda self: None),
        replaced(SchedulerNode, "codegen", generate_if_used),
        replaced(cpp, "stride_at_vec_range", find_stride),
    ):
        yield


@contextlib.contextmanager
def _promoting_once() -> Iterator[None]:
    """Let Inductor ask once for the dtype of what is computed from some dtypes."""
    promote = lowering.get_promoted_dtype
    known: dict[Any, torch.dtype] = {}

    def promote_once(*args: Any, **kwargs: Any) -> torch.dtype:
        kinds: list[Any] = []
        for value in args:
            if isinstance(value, ir.IRNode):
                kinds.append((value.get_dtype(), len(value.get_size())))
            elif type(value) in (bool, int, float, complex):
                kinds.append((type(value), 0))
            else:
                return promote(*args, **kwargs)
        key = torch.get_default_dtype(), *kinds, *kwargs.items()
        if key not in known:
            known[key] = promote(*args, **kwargs)
        return known[key]

    with replaced(lowering, "get_promoted_dtype", promote_once):
        yield


def _told(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """An operator and what it is given, for logs and errors: of tensors, their kind."""
    named = [*((f"args[{place}]", value) for place, value in enumerate(args)), *kwargs.items()]
    lines = (f"  {name}: {tree_map(_without_origin, value)}" for name, value in named)
    return "\n".join((f"  target: {target}", *lines))


def _without_origin(value: Any) -> Any:
    return type(value).__name__ if isinstance(value, ir.IRNode) else value


@contextlib.contextmanager
def _without_comments() -> Iterator[None]:
    """Let Inductor write no comments where its wrapper drops them."""
    comment = TritonScheduling.codegen_comment

    def comment_if_kept(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(V.graph.wrapper_code, WrapperFxCodegen) or config.trace.provenance_tracking_level:
            comment(self, *args, **kwargs)

    with replaced(TritonScheduling, "codegen_comment", comment_if_kept):
        yield


@contextlib.contextmanager
def _asking_once() -> Iterator[None]:
    """Let Inductor ask once whether it supports a kind of tensor."""

    def once(ask: Callable[..., bool]) -> Callable[..., bool]:
        unsupported: dict[Any, bool] = {}

        def is_unsupported(tensor: torch.Tensor, node: fx.Node | None = None) -> bool:
            dtype = tensor.dtype
            if dtype in _BY_OPERATOR or dtype.is_complex:
                return ask(tensor, node)
            kind = dtype, tensor.device, tensor.layout
            if kind not in unsupported:
                unsupported[kind] = ask(tensor, node)
            return unsupported[kind]

        return is_unsupported

    with contextlib.ExitStack() as stack:
        for name in ("unsupported_input_tensor", "unsupported_output_tensor"):
            stack.enter_context(replaced(lowering, name, once(getattr(lowering, name))))
        yield


_BY_OPERATOR = {getattr(torch, "float8_e8m0fnu", None)}
"""Dtypes that some operators support."""

_simplify_in_vector = vars(sys.modules[cpp.stride_at_vec_range.__module__])["simplify_index_in_vec_range"]
"""In torch 2.11 it is in another module than in 2.13."""


@functools.lru_cache(maxsize=10_000)
def _factor_of(var: sympy.Symbol, index: sympy.Expr) -> sympy.Integer | None:
    """The number that ``var`` is multiplied by in ``index``, zero where it is not in it; ``None`` if it is in more."""
    found = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if term.has(var):
            factor, rest = term.as_coeff_Mul() if isinstance(term, sympy.Expr) else (sympy.S.One, None)
            if rest != var or not factor.is_Integer:
                return None
            found += factor
    return found  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=10_000)
def _growth_with(var: sympy.Symbol, index: Any, vec_length: int | None) -> sympy.Expr | None:
    """By how much ``index`` grows with ``var``, as it comes, if that depends on ``var`` itself; else ``None``."""
    if vec_length:
        index = _simplify_in_vector(index, var, vec_length)
    growth = index.xreplace({var: var + sympy.S.One}) - index
    others = dict.fromkeys(growth.free_symbols - {var}, sympy.S.One)
    values = (growth.xreplace({**others, var: sympy.Integer(value)}) for value in range(2 * (vec_length or 4)))
    with contextlib.suppress(ArithmeticError, AssertionError, TypeError, ValueError):  # division by a size less one
        first = next(values)
        if first.is_Integer and any(value.is_Integer and value != first for value in values):
            return growth
    return None


def _returns_tensor(node: fx.Node) -> bool:
    """Return whether it is not known that a call gives no tensor, or several."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    returns = node.target._schema.returns
    return len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)


def _is_for_nothing(kernel: Any) -> bool:
    """Return whether this is the kernel of an empty rest.

    Reductions declare their accumulators in it, so those are kept.
    """
    return (
        isinstance(kernel, CppVecKernel)
        and kernel.tail_size is not None
        and kernel.tail_size == 0
        and kernel.reduction_depth == len(kernel.itervars)
    )
