"""Steps that check a value which is known after their graph; pytest does not rewrite what stands here."""

from __future__ import annotations

import logging
import math
import sys

import numpy as np
import torch

logger = logging.getLogger("checking")


class DivergedError(RuntimeError):
    def __init__(self, loss: float, count: int):
        super().__init__(f"{loss:.1f} after {count}")
        self.loss = loss


def exits(x, w):
    loss = (w * x).sum()
    if not math.isfinite(loss.item()):
        print(f"Loss is {loss.item()}, stopping training")  # noqa: T201
        sys.exit(1)
    w += 1
    return loss


def raises(x, w):
    loss = (w * x).sum()
    value = loss.item()
    if math.isnan(value) or value == float("inf"):
        raise RuntimeError(f"loss {value}, rows {x.size(0)}, {loss}")
    w += 1
    return loss


def asserts(x, w):
    loss = (w * x).sum()
    assert loss.item() < 1e4, f"{loss.item()} is large"
    assert not torch.isnan(loss)
    w += 1
    return loss


def by_tensor(x, w):
    loss = (w * x).sum()
    if torch.isnan(loss) or torch.isinf(loss).any():
        raise FloatingPointError("no number", loss.item())
    if x.size(0) > 1 and not torch.isfinite(w).all():
        raise FloatingPointError("no weights")
    w += 1
    return loss


def in_helper(x, w):
    loss = (w * x).sum()
    _check(loss, [1, 2])
    w += 1
    return loss


def _check(loss, counts):
    if not np.isfinite(loss.item()):
        logger.error("about to stop: %s", loss.item())
    if not np.isfinite(loss.item()):
        raise DivergedError(loss.item(), sum(each for each in counts))


def only_tells(x, w):
    loss = (w * x).sum()
    if loss > 20:
        print("large", round(loss.item(), 2))  # noqa: T201
        logger.warning("large: %.1f", loss)
    w += 1
    is_large = loss.item() > 20
    return loss, is_large, f"{is_large}", 3 * (loss.item() != loss.item())


CHECKS = exits, raises, asserts, by_tensor, in_helper, only_tells


def chooses(x, w):
    loss = (w * x).sum()
    if loss.item() > 3:
        w += 1
    return loss


def goes_on(x, w):
    loss = (w * x).sum()
    if loss.item() > 3 and x.size(0) > 1:
        raise RuntimeError("large")
    return loss


def catches(x, w):
    loss = (w * x).sum()
    try:
        if loss.item() > 3:
            raise RuntimeError("large")
    except RuntimeError:
        w += 1
    return loss


def compares_lists(x, w):
    if [x.sum().item()] == [3.0] and x.size(0) > 1:
        raise RuntimeError("three")
    if [1, x.sum().item()] != [1, 3.0]:
        raise RuntimeError("other")
    return x + 1


def shows_what_it_changes(x, w):
    loss = (w * x).sum()
    if loss.item() > 3:
        print(x.add_(1).sum())  # noqa: T201
    return loss


WAYS = chooses, catches, shows_what_it_changes
NO_CHECKS = goes_on, compares_lists
