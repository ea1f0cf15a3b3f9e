"""The judge: rounding passes, mistakes do not."""

import pytest
import torch

from benchmarks.equality import Judge, check_dependence


def training(noise=0.01, seed=0):
    """Start, precise end and noisy end of a training run with two tensors, the second a hundred times smaller."""
    torch.manual_seed(seed)
    start = {"weight": torch.randn(100, 100), "bias": torch.randn(100)}
    change = {name: 1e-2 * torch.randn_like(value) for name, value in start.items()}
    torch.manual_seed(seed + 1)

    def noisy():
        return {
            "parameters": {
                name: value + change[name] * (1 + noise * torch.randn_like(value)) for name, value in start.items()
            }
        }

    precise = {"parameters": {name: value.double() + change[name] for name, value in start.items()}}
    return {"parameters": start}, precise, noisy


def test_rounding_of_eagers_size_passes():
    start, precise, noisy = training()
    judge = Judge(precise, noisy(), torch.bfloat16, start)
    assert judge.judge(noisy()).equal


@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 2.0, float("nan")])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_wrong_update_of_one_tensor_is_found(name, factor):
    start, precise, noisy = training()
    judge = Judge(precise, noisy(), torch.bfloat16, start)
    wrong = noisy()
    old = start["parameters"][name]
    wrong["parameters"][name] = old + factor * (wrong["parameters"][name] - old)
    verdict = judge.judge(wrong)
    assert not verdict.equal
    assert "differ" in verdict.reason


def test_a_missing_tensor_is_found():
    start, precise, noisy = training()
    results = noisy()
    del results["parameters"]["bias"]
    assert "bias" in Judge(precise, noisy(), torch.bfloat16, start).judge(results).reason


def test_nothing_is_shown_where_eager_itself_is_noise():
    start, precise, noisy = training(noise=1.0)
    verdict = Judge(precise, noisy(), torch.bfloat16, start).judge(noisy())
    assert not verdict.equal
    assert "eager itself" in verdict.reason


def test_a_change_below_the_rounding_of_the_value_is_no_witness():
    start = {"parameters": {"a": torch.ones(100), "b": 1e-3 * torch.ones(100)}}
    precise = {"parameters": {"a": torch.ones(100).double() + 1e-8, "b": 1e-3 * torch.ones(100).double() + 1e-5}}
    rounded = {"parameters": {"a": torch.ones(100), "b": torch.full((100,), 1e-3 + 1e-5)}}
    other = {"parameters": {"a": torch.ones(100) + 1.2e-7, "b": torch.full((100,), 1e-3 + 1e-5)}}
    assert Judge(precise, rounded, torch.float16, start).judge(other).equal


def test_an_output_that_ignores_its_input_proves_nothing():
    x, y = torch.randn(2, 100)
    check_dependence({"output": x}, {"output": y}, 1e-2)
    with pytest.raises(RuntimeError, match="would show nothing"):
        check_dependence({"output": x}, {"output": x + 1e-3 * y}, 1e-2)
