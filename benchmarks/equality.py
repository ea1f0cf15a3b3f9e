"""Equality: does a side compute what eager computes?

Two runs in half precision differ by rounding, and the difference grows with depth: no fixed tolerance fits both an MLP
and a network of a hundred layers. So both are compared with a run in higher precision: a side is right when it is not
much farther from that than eager itself is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Results = Mapping[str, Tensors]  # tensors of one meaning belong together: "outputs"; "parameters", "statistics"

FLOOR = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # some roundings
TOTAL_FACTOR = 2.0  # two independent errors of one size: each as far from the precise run as the other, give or take
TENSOR_FACTOR = 4.0  # a single tensor is a noisier witness; measured against the usual one, for eager may be lucky
FEW = 30  # so few numbers may come out right by luck: their errors differ more
WITNESS = 0.2  # a tensor that eager gets worse than this is mostly rounding; one that was never updated is off by 1
ULPS = 50  # a change of fewer units in the last place of the value tells more about rounding than about the change
HOPELESS = 0.5  # where eager as a whole is this far off, nothing can be shown


@dataclass(frozen=True)
class Verdict:
    """What was found; ``reason`` is empty when equal."""

    equal: bool
    error: float
    reason: str = ""


class Judge:
    """Compares results with eager's, each by its distance from a precise run.

    Args:
        precise: Results of the same computation in higher precision.
        eager: Results of eager, in the precision of the case.
        dtype: Lowest precision that the case computes in.
        start: Values before the computation, for state: then the *change* is compared, not the value.
    """

    def __init__(self, precise: Results, eager: Results, dtype: torch.dtype, start: Results | None = None) -> None:
        self._groups = {
            group: _GroupJudge(tensors, eager[group], FLOOR[dtype], (start or {}).get(group, {}))
            for group, tensors in precise.items()
        }
        self.allowed = max(group.allowed for group in self._groups.values())

    def judge(self, results: Results) -> Verdict:
        """Compare the results of a side; the verdict is that of the first group that differs."""
        verdicts = [group.judge(results[name]) for name, group in self._groups.items()]
        wrong = [verdict for verdict in verdicts if not verdict.equal]
        return wrong[0] if wrong else Verdict(True, max(verdict.error for verdict in verdicts))


class _GroupJudge:
    """Judges one group: strictly by the error of all its tensors, less so by that of each one fit to be a witness."""

    def __init__(self, precise: Tensors, eager: Tensors, floor: float, start: Tensors) -> None:
        self._start = {name: value.double() for name, value in start.items()}
        self._precise = {name: self._change(name, value) for name, value in precise.items()}
        squares = {name: float(change.square().sum()) for name, change in self._precise.items()}
        self._scale = max(sum(squares.values()) ** 0.5, 1e-300)
        # A tensor whose true change is zero (a bias before BatchNorm) is measured by how tensors of its size change.
        count = sum(change.numel() for change in self._precise.values())
        self._scale_of = {
            name: max(squares[name] ** 0.5, 1e-3 * self._scale * (change.numel() / count) ** 0.5)
            for name, change in self._precise.items()
        }
        self.eager_error = self._total_error(eager)
        rounding = {name: self._rounding(name, value) for name, value in eager.items()}
        stored = sum(size**2 for size in rounding.values()) ** 0.5 / self._scale  # when every value is one unit off
        factor = TOTAL_FACTOR if count > FEW else TENSOR_FACTOR
        self.allowed = max(floor, factor * self.eager_error, stored)
        eager_errors = {name: self._distance(name, eager[name]) / self._scale_of[name] for name in precise}
        typical = median(eager_errors.values())
        self._allowed_of = {
            name: max(5 * floor, TENSOR_FACTOR * max(error, typical))
            for name, error in eager_errors.items()
            if error <= WITNESS and squares[name] ** 0.5 > ULPS * rounding[name]
        }

    def judge(self, results: Tensors) -> Verdict:
        if not self.eager_error <= HOPELESS:
            return Verdict(False, self.eager_error, f"eager itself is {self.eager_error:.2g} off a precise run")
        if results.keys() != self._precise.keys():
            return Verdict(False, float("inf"), f"other results: {sorted(results.keys() ^ self._precise.keys())[:4]}")
        error = self._total_error(results)
        if not error <= self.allowed:
            return Verdict(False, error, f"differs from eager: error {error:.2g}, allowed {self.allowed:.2g}")
        for name, allowed in self._allowed_of.items():
            one = self._distance(name, results[name]) / self._scale_of[name]
            if not one <= allowed:
                return Verdict(False, error, f"{name} differs from eager: error {one:.2g}, allowed {allowed:.2g}")
        return Verdict(True, error)

    def _change(self, name: str, value: Tensor) -> Tensor:
        value = value.detach().double()
        return value - self._start[name] if name in self._start else value

    def _rounding(self, name: str, value: Tensor) -> float:
        if not value.is_floating_point() or name not in self._start:
            return 0.0
        return torch.finfo(value.dtype).eps * float(self._start[name].norm())

    def _distance(self, name: str, value: Tensor) -> float:
        return float((self._change(name, value) - self._precise[name]).norm())

    def _total_error(self, values: Tensors) -> float:
        return sum(self._distance(name, value) ** 2 for name, value in values.items()) ** 0.5 / self._scale


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
