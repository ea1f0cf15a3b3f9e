"""Operators of the user's are given tensors in memory of their own, as in eager: they may look around, or keep them."""

import pytest
import torch

import millstream as ms

kept = []


@torch.library.custom_op("millstream_tests::look_around", mutates_args=())
def look_around(x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return x.as_strided((x.numel(),), (1,), 0) * x.untyped_storage().nbytes()


@look_around.register_fake
def _(x):
    return x.new_empty(x.numel())


def look(x):
    hidden = torch.tanh(x @ x)
    return look_around(hidden + 1).sum() + hidden.mean(), look_around(hidden.sum(1)), look_around(x)


@pytest.mark.parametrize(("wrap", "engine"), [(ms.compile, "threads"), (ms.step, "serial")])
def test_values_around_an_argument_and_kept_ones_are_those_of_eager(wrap, engine):
    def run(call):
        results = [call(torch.full((4, 4), 0.1 * number)) for number in range(8)][-3:]
        # Operators that write nothing are run in any order.
        last = [
            each for i in (-9, -6, -3) for each in sorted(kept[i : i + 3 or None], key=lambda t: (t.dim(), t.sum()))
        ]
        return [*results, *last, *(each.untyped_storage().nbytes() for each in last)]

    torch._dynamo.reset()
    expected = run(look)
    torch.testing.assert_close(run(wrap(look, engine=engine, strict=True)), expected)
