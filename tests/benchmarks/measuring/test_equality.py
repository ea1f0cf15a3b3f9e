"""The judge: rounding passes, mistakes do not."""

import pytest
import torch

from benchmarks.measuring.equality import Judge, check_dependence, hear_neighbours, neighbour


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


def test_a_lucky_run_of_eagers_does_not_make_rounding_a_fault():
    start, precise, noisy = training(noise=0.03)
    lucky = {"parameters": {name: value.float() for name, value in precise["parameters"].items()}}
    judge = Judge(precise, lucky, torch.bfloat16, start)
    assert not judge.judge(noisy()).equal
    for _ in range(4):
        judge.hear(noisy())
    assert judge.judge(noisy()).equal


def test_an_unlucky_run_of_eagers_does_not_hide_a_fault():
    start, precise, noisy = training(noise=0.02)
    unlucky = training(noise=0.1)[2]()
    judge = Judge(precise, unlucky, torch.bfloat16, start)
    wrong = training(noise=0.15)[2]()
    assert judge.judge(wrong).equal
    for _ in range(4):
        judge.hear(noisy())
    assert not judge.judge(wrong).equal


def test_a_run_that_overflowed_is_left_out():
    start, precise, noisy = training(noise=0.03)
    judge, overflowed = Judge(precise, noisy(), torch.float16, start), noisy()
    before = judge.allowed
    overflowed["parameters"]["bias"][0] = float("inf")
    judge.hear(overflowed)
    assert judge.allowed == before


@pytest.mark.parametrize("heard", [0, 4])
@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 2.0, float("nan")])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_wrong_update_of_one_tensor_is_found(name, factor, heard):
    start, precise, noisy = training()
    judge = Judge(precise, noisy(), torch.bfloat16, start)
    for _ in range(heard):
        judge.hear(noisy())
    wrong = noisy()
    old = start["parameters"][name]
    wrong["parameters"][name] = old + factor * (wrong["parameters"][name] - old)
    comparison = judge.judge(wrong)
    assert not comparison.equal
    assert "differ" in comparison.reason


def test_a_missing_tensor_is_found():
    start, precise, noisy = training()
    results = noisy()
    del results["parameters"]["bias"]
    assert "bias" in Judge(precise, noisy(), torch.bfloat16, start).judge(results).reason


def test_nothing_is_shown_where_eager_itself_is_noise():
    start, precise, noisy = training(noise=1.0)
    comparison = Judge(precise, noisy(), torch.bfloat16, start).judge(noisy())
    assert not comparison.equal
    assert "eager itself" in comparison.reason


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


def move(seed=0):
    return lambda value: neighbour(value, 2.0**-7, torch.Generator().manual_seed(seed))


def test_a_neighbour_rounds_to_one_of_the_two_nearest_numbers():
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    rounded, unit = move()(x).bfloat16().double(), 2.0**-7 * x.abs().log2().floor().exp2()
    assert ((rounded - x).abs() <= unit).all()
    nearest = rounded == x.bfloat16().double()
    assert 0.4 < nearest.double().mean() < 0.6
    assert move()(x).stride() == x.stride()


def test_a_number_of_the_precision_itself_moves_by_one_unit_or_stays():
    x = torch.randn(1000).bfloat16()
    moved = move()(x)
    lower, upper = (torch.nextafter(x, torch.full_like(x, end)) for end in (-torch.inf, torch.inf))
    assert ((moved == lower) | (moved == x) | (moved == upper)).all()
    assert 0.3 < (moved != x).double().mean() < 0.7


def test_neighbours_are_the_same_each_time_and_leave_the_global_generator_alone():
    x, state = torch.randn(100), torch.get_rng_state()
    assert torch.equal(move(1)(x), move(1)(x))
    assert not torch.equal(move(1)(x), move(2)(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_tokens_and_zeros_have_no_neighbour():
    tokens = torch.arange(5)
    assert move()(tokens) is tokens
    assert not move()(torch.zeros(5)).any()


@pytest.mark.parametrize(("batch", "runs"), [((torch.arange(5),), 0), ((torch.arange(5), torch.ones(5)), 4)])
def test_of_tokens_alone_the_plain_run_counts(batch, runs):
    heard = []
    hear_neighbours(heard.append, batch, torch.float16, torch.device("cpu"))
    assert len(heard) == runs


def test_runs_before_one_that_fails_must_do(capsys):
    heard = []

    def hear(move):
        if len(heard) == 2:
            raise RuntimeError("out of memory")
        heard.append(move(torch.ones(10)))

    hear_neighbours(hear, [torch.ones(10)], torch.float16, torch.device("cpu"))
    assert len(heard) == 2
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "eps"), [("high", 2.0**-10), ("highest", 2.0**-23)])
def test_where_products_are_tf32_numbers_move_by_its_rounding(monkeypatch, precision, eps):
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    x, moved = torch.full((10,), 3.0, dtype=torch.float64), []
    hear_neighbours(lambda move: moved.append(move(x)), [x], torch.float32, torch.device("cuda"))
    assert all(((y - x).abs() == eps).all() for y in moved)  # half a unit of a number from 2 to 4
