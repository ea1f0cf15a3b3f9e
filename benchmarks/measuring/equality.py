"""Equality: does a side compute what eager computes?

Two runs in half precision differ by rounding, and the difference grows with depth: no fixed tolerance fits both an MLP
and a network of a hundred layers. So both are compared with a run in higher precision: a side is right when it is not
much farther from that than eager itself is.

One run of eager's may come out right by luck. So its error is sampled: by the plain run, and by runs on neighbouring
inputs, which rounding cannot tell from the input itself. All are compared with the precise run of the input as it is,
in the sense of a backward error (Higham, Accuracy and Stability of Numerical Algorithms, section 1.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import hypot, isfinite
from statistics import fmean, median

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Results = Mapping[str, Tensors]  # tensors of one meaning belong together: "outputs"; "parameters", "statistics"
Move = Callable[[Tensor], Tensor]  # to a neighbour

FLOOR = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # some roundings
TOTAL_FACTOR = 2.0  # two independent errors of one size: each as far from the precise run as the other, give or take
TENSOR_FACTOR = 4.0  # a single tensor is a noisier witness; measured against the usual one, for eager may be lucky
FEW = 30  # so few numbers may come out right by luck: their errors differ more
WITNESS = 0.2  # a tensor that eager gets worse than this is mostly rounding; one that was never updated is off by 1
ULPS = 50  # a change of fewer units in the last place of the value tells more about rounding than about the change
HOPELESS = 0.5  # where eager as a whole is this far off, nothing can be shown
NEIGHBOURS = 4  # runs of eager's beside the plain one: not all of five are lucky
TF32_EPS = 2.0**-10


@dataclass(frozen=True)
class Comparison:
    """What was found; ``reason`` is empty when equal."""

    equal: bool
    error: float
    reason: str = ""


class Judge:
    """Compares results with eager's, each by its distance from a precise run.

    Args:
        precise: Results of the same computation in higher precision.
        eager: Results of eager, in the precision of the case; ``hear`` takes those of more runs.
        dtype: Lowest precision that the case computes in.
        start: Values before the computation, for state: then the *change* is compared, not the value.
    """

    def __init__(self, precise: Results, eager: Results, dtype: torch.dtype, start: Results | None = None) -> None:
        self._groups = {
            group: _GroupJudge(tensors, eager[group], FLOOR[dtype], (start or {}).get(group, {}))
            for group, tensors in precise.items()
        }

    @property
    def allowed(self) -> float:
        """The largest error that any group is forgiven."""
        return max(group.allowed for group in self._groups.values())

    def hear(self, eager: Results) -> None:
        """Take eager's error as the root mean square over one more run; one that overflowed is left out."""
        for name, group in self._groups.items():
            group.hear(eager[name])

    def judge(self, results: Results) -> Comparison:
        """Compare the results of a side; the comparison is that of the first group that differs."""
        comparisons = [group.judge(results[name]) for name, group in self._groups.items()]
        wrong = [comparison for comparison in comparisons if not comparison.equal]
        return wrong[0] if wrong else Comparison(True, max(comparison.error for comparison in comparisons))


class _GroupJudge:
    """Judges one group: strictly by the error of all its tensors, less so by that of each one fit to be a witness."""

    def __init__(self, precise: Tensors, eager: Tensors, floor: float, start: Tensors) -> None:
        self._start, self._floor = start, floor
        self._precise = self._changes(precise)
        self._count = sum(change.numel() for change in self._precise.values())
        self._size_of = {name: float(change.norm()) for name, change in self._precise.items()}
        self._scale = max(norm(self._size_of), 1e-300)
        # A tensor whose true change is zero (a bias before BatchNorm) is measured by how tensors of its size change.
        self._scale_of = {
            name: max(self._size_of[name], 1e-3 * self._scale * (change.numel() / self._count) ** 0.5)
            for name, change in self._precise.items()
        }
        self._rounding_of = {name: self._rounding(name, value) for name, value in eager.items()}
        self._runs = [self._distances(eager)]
        self._allow()

    def hear(self, eager: Tensors) -> None:
        distances = self._distances(eager)
        if isfinite(norm(distances)):
            self._runs.append(distances)
            self._allow()

    def judge(self, results: Tensors) -> Comparison:
        if not self.eager_error <= HOPELESS:
            return Comparison(False, self.eager_error, f"eager itself is {self.eager_error:.2g} off a precise run")
        if results.keys() != self._precise.keys():
            return Comparison(
                False, float("inf"), f"other results: {sorted(results.keys() ^ self._precise.keys())[:4]}"
            )
        distances = self._distances(results)
        error = norm(distances) / self._scale
        if not error <= self.allowed:
            return Comparison(False, error, f"differs from eager: error {error:.2g}, allowed {self.allowed:.2g}")
        for name, allowed in self._allowed_of.items():
            one = distances[name] / self._scale_of[name]
            if not one <= allowed:
                return Comparison(False, error, f"{name} differs from eager: error {one:.2g}, allowed {allowed:.2g}")
        return Comparison(True, error)

    def _allow(self) -> None:
        """Derive from eager's runs what is forgiven."""
        distances = {name: fmean(run[name] ** 2 for run in self._runs) ** 0.5 for name in self._precise}
        self.eager_error = norm(distances) / self._scale
        stored = norm(self._rounding_of) / self._scale  # when every value is one unit off
        factor = TOTAL_FACTOR if self._count > FEW else TENSOR_FACTOR
        self.allowed = max(self._floor, factor * self.eager_error, stored)
        errors = {name: distance / self._scale_of[name] for name, distance in distances.items()}
        typical = median(errors.values())
        self._allowed_of = {
            name: max(5 * self._floor, TENSOR_FACTOR * max(error, typical))
            for name, error in errors.items()
            if error <= WITNESS and self._size_of[name] > ULPS * self._rounding_of[name]
        }

    def _changes(self, values: Tensors) -> dict[str, Tensor]:
        """What became of each value since the start; the value itself where there is no start."""
        values = {name: value.detach().double() for name, value in values.items()}
        return {
            name: value - self._start[name].double() if name in self._start else value for name, value in values.items()
        }

    def _distances(self, values: Tensors) -> dict[str, float]:
        changes = self._changes(values)
        return {name: float((change - self._precise[name]).norm()) for name, change in changes.items()}

    def _rounding(self, name: str, value: Tensor) -> float:
        if not value.is_floating_point() or name not in self._start:
            return 0.0
        return torch.finfo(value.dtype).eps * float(self._start[name].double().norm())


def norm(sizes: Mapping[str, float]) -> float:
    """Size of all tensors together."""
    return hypot(*sizes.values())


# --- neighbours ------------------------------------------------------------------------------------------------------


def neighbour(value: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Return the numbers moved up or down, by chance, by half a unit in the last place.

    Half a unit is the most that rounding does; what is rounded next comes out as either of its two nearest numbers, not
    always as the nearer. More would be an error of the input's, and hide a side's.

    Args:
        value: Left as it is; what is not floating point has no neighbour and is returned.
        eps: Distance from 1 to the next number of the precision.
        generator: Of signs, on the host, so that they are the same on every device; the global ones are left alone.
    """
    if not value.is_floating_point():
        return value
    wide = value.detach().double()
    _, exponent = wide.frexp()  # of a number from 0.5 to 1, where the unit is eps / 2
    signs = torch.empty_like(wide, device="cpu").bernoulli_(generator=generator) * 2 - 1
    half_unit = torch.ldexp(eps / 4 * wide.sign(), exponent)  # of zero: none
    return (wide + half_unit * signs.to(value.device)).to(value.dtype)


def hear_neighbours(
    hear: Callable[[Move], None], batch: Iterable[Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Let a judge hear some runs of eager's on neighbours of a batch; of tokens alone there are none.

    Args:
        hear: Runs eager on what it moves by its argument. When one run fails, those before it must do.
        batch: One like those that are moved.
        dtype: Lowest precision that the case computes in; where matrix products of single precision are TF32, that.
        device: Where the case runs.
    """
    if not any(x.is_floating_point() for x in batch):
        return
    has_tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
    is_tf32 = has_tf32 and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    eps = TF32_EPS if is_tf32 else torch.finfo(dtype).eps
    try:
        for seed in range(NEIGHBOURS):
            hear(partial(neighbour, eps=eps, generator=torch.Generator().manual_seed(seed)))
    except RuntimeError as error:
        print(f"           eager fails on a neighbouring input: {str(error)[:200]}", flush=True)


# --- dependence ------------------------------------------------------------------------------------------------------


def check_dependence(first: Tensors, second: Tensors, allowed: float) -> None:
    """Make sure that results depend on the input far more than is forgiven.

    Raises:
        RuntimeError: They do not, so that a constant would pass for the right answer.
    """
    for name, value in first.items():
        spread = float((value.double() - second[name].double()).norm() / value.double().norm())
        if not spread > 5 * allowed:
            raise RuntimeError(
                f"{name} changes by {spread:.2g} from input to input, and {allowed:.2g} is forgiven: "
                "equality would show nothing"
            )
