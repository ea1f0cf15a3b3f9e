"""Lists to which a step appends numbers that are known after its graph: as in eager Python, in one graph."""

import functools
import json
import operator
import types
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.capture.step.step import Step
from tests.capture.worlds import interpret

kept_by_module = []


class Trainer:
    def __init__(self):
        self.losses = []
        self.history = {"loss": [], "rows": []}

    def log(self, loss, x):
        self.losses.append(loss.item())
        self.history["loss"].append(loss.item())
        self.history["rows"].append(x.size(0))


def appends():
    losses = []

    def step(x):
        losses.append(x.sum().item())
        return x + 1

    return step, lambda: losses


def extends_and_formats():
    rows, texts = [], []

    def step(x):
        rows.extend((x * 2).tolist())
        texts.append(f"{x.sum().item():.3f}")
        texts.append("%s: %6.2f, %d%%" % ("sum", x.sum(), x.sum().item()))  # noqa: UP031

    return step, lambda: (rows, texts)


def appends_records():
    records = []

    def step(x, epoch):
        records.append({"epoch": epoch, "loss": x.sum().item(), "all": (x.tolist(), None, "text")})

    return step, lambda: records


def in_objects():
    trainer = Trainer()

    def step(x):
        trainer.log(x.sum(), x)

    return step, lambda: vars(trainer)


def in_a_module():
    kept_by_module.clear()

    def step(x):
        kept_by_module.append(float(x.sum()))
        kept_by_module.append(int(x.sum()))

    return step, lambda: kept_by_module


def in_a_dict_of_lists():
    history = defaultdict(list)

    def step(x):
        for name, value in {"sum": x.sum(), "mean": x.mean()}.items():
            history[name].append(value.item())

    return step, lambda: dict(history)


def with_two_names():
    one = []
    both = types.SimpleNamespace(one=one, other=one)

    def step(x):
        both.one.append(x.sum().item())
        both.other.append(x.mean().item())

    return step, lambda: one


@pytest.mark.parametrize(
    "make",
    [appends, extends_and_formats, appends_records, in_objects, in_a_module, in_a_dict_of_lists, with_two_names],
)
def test_what_is_appended_is_eagers_in_one_graph(make):
    kept = []
    for is_captured in (False, True):
        function, held = make()
        step = Step(function, build=interpret) if is_captured else function
        for number in range(6):
            x = torch.arange(3.0) + number
            step(x, number) if make is appends_records else step(x)
        kept.append(held() if make is not in_a_module else [*held()])
    assert kept[1] == kept[0]
    assert len(step.graphs) == (2 if make is appends_records else 1)  # a number is an input from its second value on
    assert not step.fallbacks


def reads_its_length(losses, x):
    losses.append(x.sum().item())
    return x * len(losses)


def reads_the_last(losses, x):
    last = losses[-1] if losses else 0.0
    losses.append(x.sum().item())
    return x * last


def hands_it_on(losses, x):
    losses.append(x.sum().item())
    return x + max(losses)


def reads_by_another_name(losses, x):
    alias = losses
    losses.append(float(x.size(0)))
    return x * sum(alias)


def gives_it_back(losses, x):
    losses.append(2.0)
    return losses


def use_of(use, where, losses):
    owner, box = types.SimpleNamespace(losses=losses), {"losses": losses}
    return {
        "closure": lambda x: use(losses, x),
        "attribute": lambda x: use(owner.losses, x),
        "item": lambda x: use(box["losses"], x),
    }[where]


@pytest.mark.parametrize("use", [reads_its_length, reads_the_last, hands_it_on, reads_by_another_name, gives_it_back])
@pytest.mark.parametrize("where", ["closure", "attribute", "item"])
@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_a_list_that_is_looked_into_is_as_in_eager(use, where):
    results = []
    for is_captured in (False, True):
        losses = []
        function = use_of(use, where, losses)
        step = Step(function, build=interpret) if is_captured else function
        results.append([])
        for number in range(4):
            result = step(torch.full((2,), float(number)))
            results[-1].append([*result] if isinstance(result, list) else result.tolist())
        results[-1].append([*losses])
    assert results[1] == results[0]


named = []
namespace = types.SimpleNamespace(losses=named)
ask_by_name = getattr
in_a_tuple = (named,)
by_a_getter = operator.attrgetter("losses")
by_a_part = functools.partial(len, named)


def with_a_default(value, into=named):
    into.append(value)
    return len(into)


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values):
        return x * len(values)


def num_matched(values):
    match values:
        case [_]:
            return 2
        case [_, last]:
            return 3 + last
    return 5


HIDDEN = {
    "getattr": lambda x: x * len(getattr(namespace, "losses")),  # noqa: B009
    "another name of getattr": lambda x: x * len(ask_by_name(namespace, "losses")),
    "globals": lambda x: x * len(globals()["named"]),
    "a tuple": lambda x: x * len(in_a_tuple[0]),
    "attrgetter": lambda x: x * len(by_a_getter(namespace)),
    "partial": lambda x: x * by_a_part(),
    "default": lambda x: x * with_a_default(1.0),
    "text": lambda x: (x, f"{namespace.losses}"),
    "text of another": lambda x: (x, repr(namespace)),
    "what is appended": lambda x: namespace.losses.append(x.sum().item() * by_a_part()),
    "what is printed": lambda x: print(by_a_part()),  # noqa: T201
    "a tensor of it": lambda x: x * torch.tensor(named).sum(),
    "an array of it": lambda x: x * float(np.array(named).size),
    "a function of autograd": lambda x: Multiplied.apply(x, named),
    "a pattern": lambda x: x * num_matched(named),
    "a comparison": lambda x: x * (2 if named == [1.0] else 3),
    "an index": lambda x: x * named.index(1.0),
    "json": lambda x: (x, json.dumps(named)),
    "a result that holds it": lambda x: {"all": (named, x)},
}


@pytest.mark.parametrize("use", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_a_list_that_is_looked_into_out_of_sight_is_as_in_eager(use, capsys):
    def function(x):
        namespace.losses.append(1.0)
        return use(x)

    results = []
    for step in (function, Step(function, build=interpret)):
        named.clear()
        results.append([str(step(torch.full((2,), 1.0 + number))) for number in range(4)])
        results[-1] += [str(named), capsys.readouterr().out]
    assert results[1] == results[0]


@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_a_list_that_is_an_argument_too_is_as_in_eager():
    def function(x, given):
        named.append(1.0)
        return x * len(given)

    results = []
    for step in (function, Step(function, build=interpret)):
        named.clear()
        results.append([step(torch.ones(2), named).tolist() for _ in range(4)])
    assert results[1] == results[0]


def test_what_is_printed_and_appended_comes_in_order():
    kept = [], []

    def step_for(kept):
        def step(x):
            kept.append(x.sum().item())
            ms.callback(lambda: kept.append(len(kept)))
            kept.append(x.mean().item())
            return x

        return step

    step = Step(step_for(kept[1]), build=interpret, strict=True)
    for function in (step_for(kept[0]), step):
        for number in range(4):
            function(torch.full((2,), float(number)))
    assert kept[1] == kept[0]
    assert len(step.graphs) == 1


def test_lists_that_become_one_and_records_in_two():
    results = []
    for is_captured in (False, True):
        trainer = types.SimpleNamespace(sums=[], means=[], records=[], others=[])

        def function(x, trainer=trainer):
            trainer.sums.append(x.sum().item())
            trainer.means.append(x.mean().item())

        def record(x, trainer=trainer):
            record = {"loss": x.sum().item()}
            trainer.records.append(record)
            trainer.others.append(record)

        steps = [Step(each, build=interpret) if is_captured else each for each in (function, record)]
        for number in range(6):
            if number == 3:
                trainer.means = trainer.sums
            with warnings.catch_warnings(action="ignore"):
                for step in steps:
                    step(torch.full((2,), float(number)))
        trainer.records[-1]["loss"] = "the user's"
        results.append(vars(trainer))
    assert results[1] == results[0]


def test_a_new_list_in_its_place_gets_what_follows():
    trainer = Trainer()
    step = Step(lambda x: trainer.losses.append(x.sum().item()), build=interpret, strict=True)
    seen = []
    for epoch in range(3):
        trainer.losses = []
        for number in range(3):
            step(torch.full((2,), float(10 * epoch + number)))
        seen.append(trainer.losses)
    assert seen == [[2.0 * (10 * epoch + number) for number in range(3)] for epoch in range(3)]
    assert len(step.graphs) == 1


def test_a_list_that_the_user_clears_or_fills_is_no_reason_to_capture_again():
    losses = []
    step = Step(lambda x: losses.append(x.sum().item()), build=interpret, strict=True)
    for _ in range(3):
        step(torch.ones(2))
        losses.clear()
        losses.extend(["the user's", 3])
    step(torch.ones(2))
    assert losses == ["the user's", 3, 2.0]
    assert len(step.graphs) == 1


def test_tensors_are_not_appended_to_anything():
    outputs = []
    step = Step(lambda x: outputs.append(x + 1), build=interpret)
    with pytest.warns(match="changes outputs"):
        for number in range(3):
            step(torch.full((1,), float(number)))
    assert [each.item() for each in outputs] == [1, 2, 3]
