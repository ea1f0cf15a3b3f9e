"""Every operator of PyTorch's own test database (OpInfo) through ``ms.compile`` on the CPU, compared with eager.

For each operator two of its sample inputs, the first with gradients where it has any, the other without.
Compared are values, types, shapes and strides of the results, gradients, and what the operator wrote into its
arguments, in the first and in the second call. A value is right when it is no farther from a run in double precision
than a few times eager's own is.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

# Before torch is imported: sample inputs are tiny, and threads would only wait for each other. Each case forks, and
# would start compiling processes of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import millstream as ms
from benchmarks.sweeps.sweep import Outcome, Result, Sweep, main

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.float16)
UNINITIALISED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split(),
)
"""Operators whose results are whatever lies in memory: their shapes, types and strides are compared."""


Leaf = tuple[str, Any]  # what it is, and its value


class NotComparableError(Exception):
    """Why there is nothing to compare with."""


class DifferentError(Exception):
    """What differs from eager."""


@cache
def operators() -> dict[str, Any]:
    """OpInfo's operators by their full names."""
    from torch.testing._internal import common_methods_invocations as opinfo

    # Random operators are wrapped in one that puts the seed back, for which Dynamo refuses them; seeds are set here.
    opinfo.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in opinfo.op_db}


def run_case(name: str, device: str) -> Result:
    """Compare one operator with eager, on the CPU."""
    assert device == "cpu"
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            compared = compare_operator(operators()[name], name)
    except NotComparableError as reason:
        return Result(name, Outcome.NOT_COMPARABLE, str(reason))
    except DifferentError as reason:
        return Result(name, Outcome.WRONG, str(reason))
    reasons = [
        str(each.message).removeprefix("<lambda>: ") for each in warned if issubclass(each.category, ms.FallbackWarning)
    ]
    if reasons:
        return Result(name, Outcome.FELL_BACK, first_line("; ".join(dict.fromkeys(reasons))))
    return Result(name, Outcome.EQUAL, compared)


def compare_operator(op: Any, name: str) -> str:
    """Compare an operator with eager on a few samples; return what was compared.

    Raises:
        NotComparableError: Eager has no result, or one that tells nothing.
        DifferentError: The results differ.
    """
    dtype = next((dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        raise NotComparableError("no sample inputs for the CPU")
    has_gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    positions = choose_samples(op, dtype, has_gradients)
    random = ""
    for count, position in enumerate(positions):
        torch._dynamo.reset()
        ours, theirs, again = (take_sample(op, dtype, has_gradients, position) for _ in range(3))
        compiled = ms.compile(calling(op.get_op()), engine="serial")
        with torch.set_grad_enabled(has_gradients and count == 0):
            expected = observe(op.get_op(), theirs, eager=True)
            other = observe(op.get_op(), again, eager=True, seed=1)
            is_random = not all(same(a, b) for (_, a), (_, b) in zip(expected, other, strict=True))
            values = not is_random and name not in UNINITIALISED
            precise = observe_precisely(op, has_gradients, position) if values else None
            compare(observe(compiled, ours), expected, precise, values=values)
            ours = take_sample(op, dtype, has_gradients, position)
            compare(observe(compiled, ours), expected, precise, values=values)
        random = random or ("its values are random" if is_random else "")
        if not compiled.compiler.graphs and not compiled.compiler.fallbacks:
            warnings.warn(ms.FallbackWarning("Dynamo captured nothing"), stacklevel=1)
    if name in UNINITIALISED:
        raise NotComparableError("uninitialised memory; types, shapes and strides are equal")
    if random:
        raise NotComparableError(f"{random}; types, shapes and strides are equal")
    return f"{str(dtype).removeprefix('torch.')}, {len(positions)} samples{', gradients' if has_gradients else ''}"


def choose_samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> list[int]:
    """Positions of the first sample and the middle one, of at most a hundred."""
    torch.manual_seed(0)
    try:
        number = sum(1 for _ in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), 100))
    except Exception as error:  # whatever PyTorch's own generators raise
        raise NotComparableError(f"sample inputs cannot be made: {describe(error)}") from error
    if not number:
        raise NotComparableError("no sample inputs")
    return sorted({0, number // 2})


def take_sample(op: Any, dtype: torch.dtype, requires_grad: bool, position: int) -> Any:
    """Make a sample again: always the same values, in memory of its own."""
    torch.manual_seed(0)
    return next(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), position, None))


def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which Dynamo takes where it would skip one of PyTorch's own."""
    return lambda *args, **kwargs: function(*args, **kwargs)  # noqa: PLW0108  the lambda is the point


def observe(function: Callable[..., Any], sample: Any, *, eager: bool = False, seed: int = 0) -> list[Leaf]:
    """Call an operator; return results, gradients and arguments afterwards."""
    arguments = (sample.input, sample.args, sample.kwargs)
    torch.manual_seed(seed)
    try:
        results = tree_leaves(function(sample.input, *sample.args, **sample.kwargs))
        gradients = differentiate(results, [each for each in tree_leaves(arguments) if isinstance(each, Tensor)])
    except Exception as error:
        if eager:
            raise NotComparableError(f"eager raises {describe(error)}") from error
        raise DifferentError(f"raises {describe(error)}") from error
    found = {"result": results, "gradient": gradients, "argument": tree_leaves(arguments)}
    return [
        (f"{part} {position}", leaf.detach() if isinstance(leaf, Tensor) else leaf)
        for part, leaves in found.items()
        for position, leaf in enumerate(leaves)
    ]


def differentiate(results: list[Any], inputs: list[Tensor]) -> tuple[Any, ...]:
    """Gradients of the results, weighted unevenly, with respect to those inputs that want them."""
    if not torch.is_grad_enabled():
        return ()
    wanted = [each for each in inputs if each.requires_grad]
    outputs = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    if not wanted or not outputs:
        return ()
    weights = [
        torch.linspace(0.5, 1.5, each.numel(), dtype=torch.float64).reshape(each.shape).to(each.dtype)
        for each in outputs
    ]
    return torch.autograd.grad(outputs, wanted, weights, allow_unused=True)


def observe_precisely(op: Any, requires_grad: bool, position: int) -> list[Leaf] | None:
    """What eager gets from the same sample in double precision; ``None`` where it takes none."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in wide or leaf.layout is not torch.strided:
            return wide.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf
        return leaf.detach().to(wide[leaf.dtype]).requires_grad_(leaf.requires_grad)

    dtype = next(dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu"))
    if dtype not in wide:
        return None
    sample = take_sample(op, dtype, requires_grad, position)
    sample.input, sample.args, sample.kwargs = tree_map(widen, (sample.input, sample.args, sample.kwargs))
    try:
        return observe(op.get_op(), sample, eager=True)
    except NotComparableError:
        return None


def compare(found: list[Leaf], expected: list[Leaf], precise: list[Leaf] | None, *, values: bool) -> None:
    """Compare what was observed.

    Raises:
        DifferentError: Somewhere they are not alike.
    """
    if len(found) != len(expected):
        raise DifferentError(f"{len(found)} results and gradients instead of {len(expected)}")
    exact = dict(precise or ())
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        for difference in differences(ours, theirs, exact.get(name), values, strides=not name.startswith("gradient")):
            raise DifferentError(f"{name}: {difference}")


def differences(ours: Any, theirs: Any, exact: Any, values: bool, strides: bool) -> Iterator[str]:
    """Say what differs between two leaves. Strides of gradients are nobody's promise."""
    if type(ours) is not type(theirs):
        yield f"{type(ours).__name__} instead of {type(theirs).__name__}"
    elif not isinstance(theirs, (Tensor, int, float, complex, str)):
        return  # modules among arguments, types: each call has its own, or the same
    elif not isinstance(theirs, Tensor):
        if ours != theirs and not (ours != ours and theirs != theirs):
            yield f"{ours!r} instead of {theirs!r}"
    else:
        for name in ("dtype", "shape", "layout", "device"):
            if getattr(ours, name) != getattr(theirs, name):
                yield f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
        if strides and strides_of(ours) != strides_of(theirs):
            yield f"strides {ours.stride()} instead of {theirs.stride()} for {tuple(theirs.shape)}"
        if values and not same(ours, theirs, exact):
            yield f"values {ours.flatten()[:4].tolist()} instead of {theirs.flatten()[:4].tolist()}"


def strides_of(value: Tensor) -> list[int]:
    """The strides that say where an element lies."""
    if value.layout is not torch.strided or value.numel() == 0:
        return []
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def same(ours: Any, theirs: Any, exact: Any = None) -> bool:
    """Whether two leaves have the same value, within rounding or within a few times eager's own error."""
    if not isinstance(theirs, Tensor):
        return (
            not isinstance(theirs, (int, float, complex, str)) or ours == theirs or (ours != ours and theirs != theirs)
        )
    if theirs.layout is not torch.strided:
        ours, theirs, exact = ours.to_dense(), theirs.to_dense(), None
    try:
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=1e-5, equal_nan=True)
    except AssertionError:
        if not isinstance(exact, Tensor) or exact.shape != theirs.shape or not theirs.is_floating_point():
            return False
        finite = exact.isfinite() & theirs.isfinite() & ours.isfinite()
        if not torch.equal(ours.isfinite(), theirs.isfinite()) or not finite.any():
            return False
        errors = [(each.to(exact.dtype) - exact)[finite].abs().max() for each in (ours, theirs)]
        return bool(errors[0] <= 4 * errors[1] + 1e-6 * exact[finite].abs().max())
    return True


def describe(error: Exception) -> str:
    return first_line(f"{type(error).__name__}: {error}")


def first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 300 else line[:297] + "..."


def load() -> None:
    """Find the operators, and have the compiler try the machine's vector instructions once, before cases fork."""
    operators()
    ms.compile(torch.exp, engine="serial")(torch.ones(64))


SWEEP = Sweep(
    "benchmarks.sweeps.opinfo",
    "OpInfo: PyTorch's operators through `ms.compile` on the CPU",
    lambda: [*operators()],
    run_case,
    load=load,
)

if __name__ == "__main__":
    main(SWEEP)
