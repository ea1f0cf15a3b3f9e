"""Random numbers of Python and NumPy in steps: the host draws them before each replay, as eager Python would have."""

import contextlib
import copy
import random
import threading

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.capture.step.graph import StepGraph
from millstream.capture.step.step import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import assert_same, interpret
from tests.clocks import HANG_S


@pytest.fixture
def waiting_thread():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    yield
    ends.set()
    thread.join(HANG_S)


def states():
    return random.getstate(), str(np.random.get_state())


def run(make, xs, wrap=lambda step: step):
    """What a step of ``make`` gives for each input, or raises, with the states of the generators after it."""
    random.seed(3)
    np.random.seed(4)
    seen = []
    step = wrap(make())
    for x in xs:
        try:
            result = step(x)
        except (RuntimeError, KeyError) as error:
            result = str(error)
        seen.append((result, states()))
    return step, seen


def check(make, xs, build=interpret, **options):
    """A step gives what eager gives and leaves the generators like it; returns the step."""
    step, ours = run(make, xs, lambda function: Step(function, build=build, **options))
    _, theirs = run(make, xs)
    assert_same(ours, theirs)
    return step


def batches(number, sizes=(4,)):
    return [torch.arange(3.0 * sizes[i % len(sizes)]).reshape(-1, 3) for i in range(number)]


FORMS = {
    "mixup": lambda x: x * (lam := np.random.beta(0.4, 0.4)) + (1 - lam) * x.flip(0),
    "many of Python's": lambda x: (
        x * random.random() + random.uniform(1, b=2) - random.gauss(0, 1) * random.randint(1, 9) + random.choice([1, 2])
    ),
    "many of NumPy's": lambda x: (
        x * np.random.rand() + np.random.normal(scale=0.1) - np.random.randint(3, 9) * np.random.uniform(0.5, 2.0)
    ),
    "in arithmetic": lambda x: x * float(np.clip(np.random.randn() * 0.1, -0.1, 0.1)) + int(random.random() * 100) / 10,
    "of a number drawn": lambda x: x + random.uniform(0, random.random()) + np.random.choice([0.5, random.random()]),
    "arrays as tensors": lambda x: [
        x * torch.from_numpy(np.random.rand(3)),
        x * torch.tensor(np.random.randn(3), dtype=torch.float16),
        x + torch.as_tensor(np.random.binomial(1, 0.5, (len(x), 1))),
        torch.from_numpy(np.random.rand(3) > 0.5),
    ],
    "arrays as indices": lambda x: [
        x[np.random.permutation(len(x))],
        x[np.random.randint(-2, 2, (2, 1)), np.random.permutation(3)],
        x[random.sample(range(4), 2)],
        x.clone().index_fill_(0, torch.tensor(random.choices([0, 1], k=2)), 0.5),
    ],
    "of arrays": lambda x: [
        x * np.random.rand(3).sum() + np.random.dirichlet([1.0, 2.0])[1],
        x * torch.tensor([1.0, *np.sort(np.random.rand(2)).tolist()]),
        x[np.argsort(np.random.rand(4))[:2]],
    ],
    "returned": lambda x: [
        random.random(),
        np.random.rand(2).tolist(),
        random.sample(range(9), 3),
        np.random.choice([3, 4, 5]),
        f"{random.random():.2f}",
    ],
}


def test_numbers_and_generators_are_eagers_also_for_a_new_size():
    step = check(lambda: lambda x: [form(x) for form in FORMS.values()], batches(6, (4, 4, 6)), strict=True)
    assert len(step.graphs) < 4


ARRAYS = {
    "kept": lambda x, kept: x * torch.from_numpy(kept),
    "part": lambda x, kept: x * torch.tensor(kept[::-1].copy()),
    "made of it": lambda x, kept: x[:, np.argsort(np.sqrt(kept))],
}


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_of_the_users_is_read_as_it_is_in_each_call(kind, is_given):
    def make():
        kept = np.array([1.0, 2.0, 3.0], np.float32)
        step = (lambda x, given: ARRAYS[kind](x, given)) if is_given else lambda x: ARRAYS[kind](x, kept)
        return step, kept

    def run(*, is_captured):
        step, kept = make()
        step = Step(step, build=interpret, strict=True) if is_captured else step
        seen = []
        for i, x in enumerate(batches(4)):
            kept[i % 3] += i // 2 * 5  # the same array, filled anew
            seen.append(step(x, kept) if is_given else step(x))
        return seen

    assert_same(run(is_captured=True), run(is_captured=False))


@pytest.mark.parametrize("is_by_tensor", [True, False])
def test_memory_of_an_array_and_a_tensor_is_not_written(is_by_tensor):
    def make():
        kept = np.zeros(3, np.float32)

        def step(x):
            own = kept if is_by_tensor else np.zeros(3, np.float32)
            tensor = torch.from_numpy(own)
            if is_by_tensor:
                tensor += 1
            else:
                own[0] = 1
            return x * tensor

        return step

    with pytest.warns(FallbackWarning, match=r"torch.tensor\(array\), which copies"):
        check(make, batches(3))


def test_a_branch_on_a_number_has_two_graphs_and_nothing_is_drawn_twice():
    def make():
        return lambda x: (x.flip(0) if random.random() < 0.5 else x * np.random.rand()) + random.random()

    step = check(make, batches(12), strict=True)
    assert len(step.graphs) == 2
    assert step.history[1].endswith("a random number leads another way")


def test_a_few_values_have_a_graph_each():
    def make():
        forms = {"sin": torch.sin, "cos": torch.cos}

        def step(x):
            x = forms[random.choice(["sin", "cos"])](x)
            return x.roll(np.random.randint(2), 0) * random.choice([2, 3])

        return step

    assert len(check(make, batches(12), strict=True).graphs) == 4


def test_a_guard_that_fails_after_a_draw_puts_the_generators_back():
    def make():
        count = {"i": 0}

        def step(x):
            drawn = random.random() * np.random.rand()
            count["i"] += 1
            return x * drawn if count["i"] % 3 else x + drawn

        return step

    assert len(check(make, batches(9), strict=True).graphs) == 2


def test_an_error_after_a_replay_leaves_what_was_drawn():
    def make():
        def step(x):
            total = (x * random.random()).sum()
            if total.item() > 40:
                raise RuntimeError(f"{total.item():.3f}")
            return total

        return step

    check(make, batches(5, (4, 6)), strict=True)


REFUSED = {
    "an array's items": (
        lambda x: x * torch.FloatTensor(np.random.rand(3)),
        "does with an array of random numbers what a graph cannot",
    ),
    "an index": (
        lambda x: x[random.randint(0, 30) // 10 :] * random.random(),
        "needs the very value of what random.randint",
    ),
    "a shuffle": (lambda x: x * random.random() * (np.random.shuffle(np.arange(3)) or 1), "calls numpy.random.shuffle"),
    "branches": (lambda x: [x if random.random() < 0.5 else -x for _ in range(5)], "more than 8 ways"),
    "a state": (lambda x: x * (random.random() + len(random.getstate())), "calls random.getstate"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_draws_as_eager_does(kind):
    function, reason = REFUSED[kind]
    with pytest.warns(FallbackWarning, match=reason):
        check(lambda: function, batches(3))


def test_a_graph_that_cannot_be_built_draws_as_eager_does():
    def build(*_):
        raise ValueError("no compiler")

    with pytest.warns(FallbackWarning, match="no compiler"):
        check(lambda: lambda x: x * random.random() * np.random.rand(), batches(3), build=build)


def test_another_thread_that_draws_meanwhile_is_told_of_and_the_next_call_is_captured(monkeypatch):
    fill, draws = StepGraph.fill_slots, iter([True])

    def disturbed(graph):
        if next(draws, False):
            random.seed(2)  # which decides otherwise
        fill(graph)

    monkeypatch.setattr(StepGraph, "fill_slots", disturbed)
    step = Step(lambda x: x * 2 if random.random() < 0.5 else x * 3, build=interpret)
    random.seed(3)
    with pytest.warns(FallbackWarning, match="for now: Another thread uses the generator of random.random"):
        assert step(torch.ones(1)).item() == 2
    step(torch.ones(1))
    assert step.graphs


def test_ahead_of_the_first_call_and_for_comparison_nothing_is_drawn():
    def make():
        return lambda x: x * random.random() if random.random() < 0.5 else x + random.random()

    check(make, batches(8), check=1, strict=True)
    step = Step(make(), build=interpret)
    before = states()
    for _ in range(2):
        step.precompile(torch.ones(3, 3))
    assert states() == before


class Sampler:
    def __init__(self):
        self.rng = np.random.default_rng(5)

    def share(self, low):
        return self.rng.uniform(low, 1) * self.rng.integers(1, 9)


def own_generators():
    mine, legacy, of_all = random.Random(0), np.random.RandomState(0), {"rngs": [np.random.default_rng(0)]}
    of_python, of_numpy, of_mine = random.random, np.random.rand, mine.gauss  # as ``from random import random`` has it
    sampler = Sampler()

    def step(x):
        x = x * mine.random() + mine.gauss(0, 1) * of_mine(0, 1)
        x = x + of_python() * legacy.rand() - of_numpy() * of_all["rngs"][0].random()
        assert isinstance(sampler.rng, np.random.Generator)
        return x * sampler.share(0.5), mine.choice([1, 2]), mine.VERSION

    def states():
        generators = of_all["rngs"][0].bit_generator.state, sampler.rng.bit_generator.state
        return mine.getstate(), str(legacy.get_state()), generators, random.getstate(), str(np.random.get_state())

    return step, states


def test_generators_that_the_step_reaches_beside_another_thread(waiting_thread):
    random.seed(0)
    np.random.seed(0)
    plain, states = own_generators()
    theirs = [(plain(x), states()) for x in batches(4, (4, 4, 6))]
    random.seed(0)
    np.random.seed(0)
    function, states = own_generators()
    step = Step(function, build=interpret, strict=True)
    ours = [(step(x), states()) for x in batches(4, (4, 4, 6))]
    assert_same(ours, theirs)


def test_generators_of_which_more_than_numbers_is_asked_are_left_as_they_were():
    mine = np.random.default_rng(0)
    before = str(mine.bit_generator.state)
    for refused in (
        lambda x: x * mine.random() * len(mine.spawn(1)),
        lambda x: x * mine.random() + copy.deepcopy(mine).random(),
        lambda x: x * mine.random() + len(mine.bit_generator.state),
        lambda x, rng=mine: x * rng.random(),
    ):
        with pytest.raises(CaptureError, match=r"mine|a random generator"):
            Step(refused, build=interpret, strict=True)(torch.ones(2))
        assert str(mine.bit_generator.state) == before
        assert type(mine) is np.random.Generator


def test_ways_of_a_branch_that_draw_differently_are_refused():
    def make():
        return lambda x: x * random.random() if x.sum() > 20 else x

    with pytest.warns(FallbackWarning, match="draw different random numbers"):
        check(make, batches(4, (4, 2)))


def test_regions_and_the_parts_between_them_draw_in_order():
    def make():
        def step(x):
            x = x * random.random()
            with ms.eager_region():
                x = x + float(np.random.permutation(3)[0]) * random.random()
            return x * random.random()

        return step

    random.seed(3)
    np.random.seed(4)
    theirs = [make()(x) for x in batches(3)]
    after = states()
    random.seed(3)
    np.random.seed(4)
    step = ms.step(make(), strict=True)
    assert_same([step(x) for x in batches(3)], theirs)
    assert states() == after
    with contextlib.suppress(AttributeError):
        step.reset()
