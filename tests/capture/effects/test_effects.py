"""What a step prints, logs, counts and schedules happens once a call, in order, with the values of eager PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import math
import re
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import millstream as ms
from millstream.capture import Step
from millstream.errors import ArgumentError, CaptureError, FallbackWarning
from tests.capture.worlds import assert_same, interpret
from tests.clocks import HANG_S

# ruff: noqa: T201  printing is what is tested

logger = logging.getLogger("tests.effects")


class Bench:
    """A model, an optimizer and what people keep beside them."""

    def __init__(self):
        self.model = nn.Linear(4, 3)
        self.opt = torch.optim.Adam(self.model.parameters(), 0.05)
        self.meter, self.history = Meter(), []
        self.count, self.mean, self.flag, self.best = 0, 0.0, False, None
        self.half = lr_scheduler.StepLR(self.opt, 2, 0.5)
        self.decay = lr_scheduler.ExponentialLR(self.opt, 0.9)

    def train(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss

    def state(self):
        kept = {key: value for key, value in vars(self).items() if isinstance(value, int | float | str | list | None)}
        schedulers = [self.half.state_dict(), self.decay.state_dict()]
        return kept, vars(self.meter), schedulers, [group["lr"] for group in self.opt.param_groups]


class Meter:
    """The running average of countless training scripts."""

    def __init__(self):
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.val:.4f} ({self.avg:.4f})"


@contextlib.contextmanager
def everything_written():
    """Yields what goes to stdout, stderr and the logger, in one list, in order."""
    written = []

    class Stream(io.StringIO):
        def __init__(self, name):
            super().__init__()
            self.name = name

    class Handler(logging.Handler):
        def emit(self, record):
            written.append((record.levelname, record.getMessage(), record.funcName, record.lineno))

    class Into(Stream):
        def write(self, text):
            written.append((self.name, text))
            return len(text)

    handler = Handler()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with contextlib.redirect_stdout(Into("out")), contextlib.redirect_stderr(Into("err")):
            yield written
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def compare(function, calls=4, graphs=1, arguments=lambda number: ()):
    """Call ``function(bench, x, *arguments)`` eagerly and as a step; both must write, return and leave the same."""
    outcomes = []
    for is_captured in (True, False):
        torch.manual_seed(0)
        bench = Bench()

        def step(x, *rest, bench=bench):
            return function(bench, x, *rest)

        captured = Step(step, build=interpret, strict=True)
        called = captured if is_captured else step
        results = []
        with everything_written() as written:
            for number in range(calls):
                result = called(torch.randn(6, 4), *arguments(number))
                results.append(result.detach() if isinstance(result, torch.Tensor) else result)
                written.append("end of call")
        weights = [parameter.detach().clone() for parameter in bench.model.parameters()]
        outcomes.append((written, bench.state(), results, weights))
        if is_captured:
            assert len(captured.graphs) == graphs
            made = captured
    ours, theirs = outcomes
    assert_alike(ours, theirs)
    assert [type(each) for each in ours[2]] == [type(each) for each in theirs[2]]
    return made


NUMBER = re.compile(r"-?[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?")


def assert_alike(ours, theirs):
    """The same but for the last digits of numbers, also of those in text, which have the same form."""
    if isinstance(theirs, str):
        assert NUMBER.split(ours) == NUMBER.split(theirs)
        left, right = NUMBER.findall(ours), NUMBER.findall(theirs)
        assert [("e" in each, len(each) < 15 and len(each)) for each in left] == [
            ("e" in each, len(each) < 15 and len(each)) for each in right
        ]
        assert [*map(float, left)] == pytest.approx([*map(float, right)], rel=1e-3, abs=1e-6)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_alike(left, right)
    elif isinstance(theirs, dict):
        assert_alike([*ours.items()], [*theirs.items()])
    else:
        assert type(ours) is type(theirs)
        assert_same(ours, theirs)


# --- what is written --------------------------------------------------------------------------------------------------


def prints_formats(bench, x):
    loss = bench.train(x)
    value = loss.item()
    print(f"a {value:.3f} b {value:>12.5e}|{value!r}|{value!s}|{value}|{value:+.0f}")
    print("x {:.2f} y {v:8.3f}".format(value, v=value * 2), value, round(value, 2), sep=" / ", end="!\n")  # noqa: UP032
    print("s %s r %r" % (value, value))  # noqa: UP031
    return loss


def prints_tensors(bench, x):
    loss = bench.train(x)
    print(loss, loss.detach(), f"{loss:.4f}", [loss.detach() * 2, 1], bench.model.bias)
    print(x.argmax(1))
    return loss


def computes_with_values(bench, x):
    loss = bench.train(x)
    value = loss.item()
    print(-value, abs(value - 1), value**2, 1 / value, value // 0.1, value % 0.1, 100 * value / 7, math.exp(value))
    whole = x.argmax().item()
    print(whole, whole + 1, whole / 2, whole // 2, f"{whole:04d}", (x > 0).all().item(), x[0].tolist())
    return loss * value + (x * whole).sum()


def returns_values(bench, x):
    loss = bench.train(x)
    return {"loss": loss.item(), "text": f"{loss:.3f}", "twice": [loss.item() * 2, "plain", 3]}


def writes_to_streams(bench, x):
    loss = bench.train(x)
    sys.stderr.write(f"{loss.item():.3f}\n")
    sys.stdout.write("plain\n")
    print("to stderr", file=sys.stderr)
    return loss


def logs_levels(bench, x):
    loss = bench.train(x)
    logger.debug("not shown %s", loss)
    logger.info("loss %.4f of %d", loss.item(), 7)
    logger.warning("text %s", f"{loss.item():.2f}")
    logger.error("dict %(a).3f", {"a": loss.item()})
    return loss


def writes_in_nested_functions(bench, x):
    def report(loss, name="report"):
        def say(text):
            print(name, text)

        say(f"{loss.item():.3f}")

    loss = bench.train(x)
    report(loss)
    [report(loss, str(number)) for number in range(2)]
    return loss


def nothing_else(bench, x):
    print("x")
    return bench.train(x)


WRITING = [
    prints_formats,
    prints_tensors,
    computes_with_values,
    returns_values,
    writes_to_streams,
    logs_levels,
    writes_in_nested_functions,
    nothing_else,
]


@pytest.mark.parametrize("function", WRITING, ids=lambda function: function.__name__)
def test_what_is_written_is_eagers(function):
    logger.setLevel(logging.INFO)
    compare(function)


def test_a_level_that_changes_counts():
    def step(bench, x):
        loss = bench.train(x)
        logger.info("loss %.3f", loss.item())
        if logger.isEnabledFor(logging.DEBUG):
            print("debugging")
        return loss

    def change(number):
        logger.setLevel((logging.ERROR, logging.INFO, logging.DEBUG)[number // 3])
        return ()

    compare(step, calls=9, graphs=2, arguments=change)


def test_warnings_are_given_in_each_call():
    def step(x):
        warnings.warn(f"large: {x.max().item():.1f}", RuntimeWarning, stacklevel=1)
        return x + 1

    captured = Step(step, build=interpret, strict=True)
    for number in range(3):
        with pytest.warns(RuntimeWarning, match=f"large: {number}.0") as caught:
            captured(torch.full((2,), float(number)))
        assert [(each.filename, each.lineno) for each in caught] == [(__file__, step.__code__.co_firstlineno + 1)]


def test_a_stream_given_later_is_used():
    step = Step(lambda x: print("x") or x + 1, build=interpret, strict=True)
    for _ in range(3):
        with everything_written() as written:
            step(torch.ones(2))
        assert written == [("out", "x"), ("out", "\n")]


def test_a_file_is_written_once_a_call(tmp_path):
    with (tmp_path / "losses").open("w") as file, (tmp_path / "bytes").open("wb") as binary:

        def step(bench, x):
            loss = bench.train(x)
            file.write(f"{loss.item():.3f}\n")
            print("loss", loss.item(), file=file, flush=True)
            binary.write(b"x")
            return loss

        compare(step)
    lines = (tmp_path / "losses").read_text().splitlines()
    assert_alike(lines[:8], lines[8:])
    assert (tmp_path / "bytes").read_bytes() == b"x" * 8


def test_a_redirection_within_the_step_holds():
    texts = io.StringIO()

    def step(bench, x):
        with contextlib.redirect_stdout(texts):
            print("inside")
        print("outside")
        return bench.train(x)

    compare(step, calls=4)
    assert texts.getvalue() == "inside\n" * 8


def test_values_cost_one_wait_and_explain_says_so():
    model = nn.Linear(4, 3)

    @ms.step(strict=True)
    def step(x):
        loss = model(x).square().mean()
        print(f"{loss.item():.3f} {loss.item() * 2:.3f}")
        return loss

    step(torch.ones(2, 4))
    assert "the host waits for the device once a call" in str(ms.explain(step))
    assert len(step.graphs[0].effects.stacks) == 1


# --- what is counted --------------------------------------------------------------------------------------------------


def counts(bench, x):
    bench.count += 1
    return bench.train(x)


def prints_by_counter(bench, x):
    bench.count += 1
    if bench.count % 3 == 0:
        print(f"call {bench.count:03d}", bench.count)
    return bench.train(x)


def averages(bench, x):
    loss = bench.train(x)
    bench.meter.update(loss.item(), x.size(0))
    bench.mean = 0.9 * bench.mean + 0.1 * loss.item()
    print(bench.meter, f"{bench.mean:.5f}")
    return loss


def warms_up(bench, x):
    bench.count += 1
    return bench.train(x) * min(1.0, bench.count / 4)


COUNTING = {counts: 1, prints_by_counter: 2, averages: 1, warms_up: 2}


@pytest.mark.parametrize("function", COUNTING, ids=lambda function: function.__name__)
def test_what_is_counted_is_eagers(function):
    compare(function, calls=9, graphs=COUNTING[function])


def test_a_number_in_a_list_and_a_dict_of_a_closure():
    for is_captured in (True, False):
        slots, totals, final = [0, "a"], {"n": 0.5}, []
        calls = 0

        def step(x, slots=slots, totals=totals):
            nonlocal calls
            calls += 1
            slots[0] += 2
            totals["n"] *= 1.5
            return x * slots[0] + totals["n"]

        called = Step(step, build=interpret, strict=True) if is_captured else step
        final.append(([called(torch.ones(2)).tolist() for _ in range(6)], slots, totals, calls))
        if is_captured:
            assert len(called.graphs) == 1
    assert all(each == final[0] for each in final)


def test_a_counter_that_the_user_resets_counts_from_there():
    bench = Bench()
    step = Step(lambda x: counts(bench, x), build=interpret, strict=True)
    for number in range(8):
        if number == 5:
            bench.count = 100
        step(torch.ones(2, 4))
    assert bench.count == 103
    assert len(step.graphs) == 1


def test_a_flag_that_flips_is_followed():
    def step(bench, x):
        bench.flag = not bench.flag
        return bench.train(x) * (2 if bench.flag else 1)

    compare(step, calls=9, graphs=2)


def test_a_value_in_the_place_of_none():
    def step(bench, x):
        loss = bench.train(x)
        bench.best = loss.item()
        return loss

    compare(step, graphs=1)


def test_a_number_among_the_arguments():
    def step(bench, x, number, every):
        loss = bench.train(x)
        if number % every == 0:
            print(f"[{number:>4}/{every}] {loss.item():.4f}")
        return loss * number

    compare(step, calls=10, graphs=2, arguments=lambda number: (number, 3))


def test_a_number_that_is_never_used_needs_one_graph():
    step = compare(lambda bench, x, number: bench.train(x), calls=6, arguments=lambda number: (number,))
    assert step.graphs[0].num_runs >= 4


def test_numbers_of_other_types_are_not_mixed_up():
    def step(x, scale):
        return x * scale

    captured = Step(step, build=interpret, strict=True)
    for scale in (1, 2, 2.5, 3, True, 4.5):
        ours, theirs = captured(torch.ones(2, dtype=torch.int64), scale), step(torch.ones(2, dtype=torch.int64), scale)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


# --- schedulers -------------------------------------------------------------------------------------------------------


def steps_scheduler(bench, x):
    loss = bench.train(x)
    bench.half.step()
    return loss


def steps_two_schedulers(bench, x):
    loss = bench.train(x)
    bench.half.step()
    print(bench.half.get_last_lr())
    bench.decay.step()
    print(f"{bench.opt.param_groups[0]['lr']:.6f}", bench.half.last_epoch)
    return loss


def steps_by_count(bench, x):
    bench.count += 1
    loss = bench.train(x)
    if bench.count % 2 == 0:
        bench.half.step()
    return loss


def returns_the_rate(bench, x):
    loss = bench.train(x)
    before = bench.half.get_last_lr()[0]
    bench.half.step()
    return loss.item(), before, bench.half.get_last_lr()[0]


def sets_the_rate_from_before(bench, x):
    group = bench.opt.param_groups[0]
    before = group["lr"]
    loss = bench.train(x)
    bench.decay.step()
    group["lr"] = before * 0.5
    return loss.item(), before


SCHEDULING = {
    steps_scheduler: 1,
    steps_two_schedulers: 1,
    steps_by_count: 2,
    returns_the_rate: 1,
    sets_the_rate_from_before: 1,
}


@pytest.mark.parametrize("function", SCHEDULING, ids=lambda function: function.__name__)
def test_schedulers_step_after_the_replay(function):
    compare(function, calls=8, graphs=SCHEDULING[function])


def test_a_new_scheduler_knows_that_the_optimizer_has_stepped_in_a_captured_step():
    """Its warning is an error here; it still comes where none has stepped."""
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), 0.4)

    def step(x):
        model(x).square().mean().backward()
        opt.step()

    captured = Step(step, build=interpret, strict=True)
    captured(torch.ones(2, 4))
    scheduler = lr_scheduler.StepLR(opt, 1, 0.5)
    rates = []
    for _ in range(3):
        captured(torch.ones(2, 4))
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    assert rates == [0.2, 0.1, 0.05]
    idle = lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.4), 1, 0.5)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        idle.step()


def test_a_scheduler_that_is_given_the_loss():
    def make():
        torch.manual_seed(0)
        bench = Bench()
        bench.plateau = lr_scheduler.ReduceLROnPlateau(bench.opt, patience=0)
        return bench

    def run(bench, wrap):
        def step(x):
            loss = bench.train(x)
            bench.plateau.step(loss.item())
            return loss

        called = wrap(step)
        for number in range(8):
            called(torch.full((2, 4), float(number)))
        return bench.opt.param_groups[0]["lr"], bench.plateau.num_bad_epochs, bench.plateau.best

    captured = []

    def wrap(step):
        captured.append(Step(step, build=interpret, strict=True))
        return captured[0]

    assert run(make(), wrap) == pytest.approx(run(make(), lambda step: step))
    assert len(captured[0].graphs) == 1


# --- frameworks' patterns ---------------------------------------------------------------------------------------------


def test_manual_optimization_with_a_global_step():
    """As LightningModule does it: the optimizer's wrapper counts, the module logs by the count."""

    class Progress:
        def __init__(self):
            self.ready, self.completed = 0, 0

    class Wrapper:
        def __init__(self, optimizer, progress):
            self.optimizer, self.progress = optimizer, progress

        def step(self):
            self.progress.ready += 1
            self.optimizer.step()
            self.progress.completed += 1

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)
            self.logged, self.global_step = {}, 0
            self.progress = Progress()

        def training_step(self, x, batch_idx):
            loss = self.net(x).square().mean()
            loss.backward()
            self.wrapper.step()
            self.wrapper.optimizer.zero_grad()
            self.global_step += 1
            if self.global_step % 4 == 0:
                print(f"step {self.global_step} batch {batch_idx}: {loss.item():.4f}")
            return loss

    outcomes = []
    for is_captured in (True, False):
        torch.manual_seed(0)
        module = Module()
        module.wrapper = Wrapper(torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), module.progress)
        step = Step(module.training_step, build=interpret, strict=True) if is_captured else module.training_step
        with everything_written() as written:
            losses = [step(torch.randn(6, 4), number).item() for number in range(9)]
        outcomes.append((written, losses, module.global_step, vars(module.progress)))
        if is_captured:
            assert [graph.num_runs for graph in step.graphs] == [6, 2] or len(step.graphs) == 2
    assert_alike(*outcomes)


class Accelerator:
    """Gradient accumulation as Accelerate does it."""

    def __init__(self, every):
        self.every, self.step, self.sync_gradients = every, 0, True

    @contextlib.contextmanager
    def accumulate(self):
        self.step += 1
        self.sync_gradients = self.step % self.every == 0
        with contextlib.nullcontext():
            yield

    def backward(self, loss):
        (loss / self.every).backward()


def test_accumulating_gradients_under_a_context():
    outcomes = []
    for is_captured in (True, False):
        torch.manual_seed(0)
        model, accelerator = nn.Linear(4, 3), Accelerator(3)
        opt = torch.optim.AdamW(model.parameters(), 0.05)
        scheduler = lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=4)

        def step(x, model=model, accelerator=accelerator, opt=opt, scheduler=scheduler):
            with accelerator.accumulate():
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    opt.step()
                    scheduler.step()
                    opt.zero_grad()
            return loss

        called = Step(step, build=interpret, strict=True) if is_captured else step
        losses = [called(torch.randn(6, 4)).item() for _ in range(18)]
        outcomes.append((losses, vars(accelerator), scheduler.state_dict(), opt.param_groups[0]["lr"]))
        if is_captured:
            assert sum(graph.num_runs for graph in called.graphs) >= 8
            assert len(called.graphs) <= 4
    assert_alike(*outcomes)


# --- callbacks, order, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_callback_is_called_once_a_call(sync):
    def step(bench, x):
        loss = bench.train(x)
        ms.callback(bench.history.append, loss.item() if sync else loss, sync=sync)
        return loss

    compare(step, calls=6)


def test_a_callback_sees_the_values_of_its_line():
    def step(bench, x):
        bench.count += 1
        ms.callback(lambda: print("first", bench.count))
        bench.count += 1
        ms.callback(lambda weight: print("second", bench.count, weight), bench.model.weight)
        return bench.train(x)

    compare(step, calls=5)


def test_the_order_is_the_programs():
    def step(bench, x):
        print("one")
        logger.warning("two")
        loss = bench.train(x)
        sys.stderr.write("three")
        ms.callback(print, "four", round(loss.item(), 3))
        bench.half.step()
        print("five", bench.half.get_last_lr())
        return loss

    compare(step)


@pytest.mark.parametrize("fn", [3, None, "print"])
def test_a_callback_must_be_callable(fn):
    with pytest.raises(ArgumentError, match="cannot be called"):
        ms.callback(fn)


def test_an_effect_that_raises_surfaces_once_and_leaves_the_state_whole():
    bench, theirs = Bench(), Bench()
    theirs.model.load_state_dict(bench.model.state_dict())
    calls = []

    def fail(number):
        calls.append(number)
        if number == 4:
            raise KeyError("mine")

    def step(x):
        bench.count += 1
        loss = bench.train(x)
        ms.callback(fail, bench.count)
        ms.callback(calls.append, "after")
        bench.half.step()
        bench.mean += loss.item()
        return loss

    captured = Step(step, build=interpret, strict=True)
    data = torch.randn(7, 6, 4)
    for number, x in enumerate(data, 1):
        if number == 4:
            with pytest.raises(KeyError, match="mine") as caught:
                captured(x)
            assert any("effect at" in note and __file__ in note for note in caught.value.__notes__)
        else:
            captured(x)
        theirs.mean += theirs.train(x).item()
        theirs.half.step()
    assert calls == [1, "after", 2, "after", 3, "after", 4, 5, "after", 6, "after", 7, "after"]
    assert (bench.count, bench.mean, bench.half.last_epoch) == (7, pytest.approx(theirs.mean), 7)
    torch.testing.assert_close(bench.model.weight, theirs.model.weight)
    assert captured.graphs[0].num_runs == 6


@pytest.mark.parametrize("kind", [KeyError, CaptureError])
def test_one_that_raises_in_the_first_run_of_a_graph_is_no_failed_capture(kind):
    model = nn.Linear(4, 3)

    def fail():
        raise kind("mine")

    def step(x):
        ms.callback(fail)
        return model(x).sum()

    captured = Step(step, build=interpret)
    for _ in range(3):
        with pytest.raises(kind, match="mine"):
            captured(torch.ones(2, 4))
    assert captured.graphs[0].num_runs == 3
    assert captured.fallbacks == []


def test_a_failed_trace_writes_nothing():
    def step(x):
        print("written")
        return x.sum() > 0 or x

    captured = Step(step, build=interpret)
    with everything_written() as written, pytest.warns(FallbackWarning):
        captured(torch.ones(2))
    assert written == [("out", "written"), ("out", "\n")]


def test_another_thread_writes_for_itself_meanwhile():
    said, started, traced = [], threading.Event(), threading.Event()

    def write():
        started.wait()
        print("from the other thread")
        logger.warning("from the other thread")
        ms.callback(said.append, "at once")
        traced.set()

    def step(x):
        started.set()
        traced.wait(HANG_S)
        print("from the step")
        return x + 1

    thread = threading.Thread(target=write)
    logger.setLevel(logging.INFO)
    with everything_written() as written:
        thread.start()
        captured = Step(step, build=interpret, strict=True)
        for _ in range(2):
            captured(torch.ones(2))
        thread.join()
    texts = [entry[1] for entry in written]
    assert texts.count("from the other thread") == 2
    assert texts.count("from the step") == 2
    assert said == ["at once"]


# --- registered outputs -----------------------------------------------------------------------------------------------


def test_a_registered_module_is_recorded_where_it_is_imported(monkeypatch):
    logged = []
    module = types.ModuleType("wandb")
    module.log = lambda *args, **kwargs: logged.append(copy.deepcopy((args, kwargs)))
    monkeypatch.setitem(sys.modules, "wandb", module)

    def step(bench, x):
        bench.count += 1
        loss = bench.train(x)
        module.log({"loss": loss.item(), "rate": bench.opt.param_groups[0]["lr"]}, step=bench.count)
        return loss

    compare(step, calls=5)
    assert_alike(logged[:5], logged[5:])
    assert [kwargs["step"] for _, kwargs in logged[:5]] == [1, 2, 3, 4, 5]


def test_a_progress_bar_moves_as_in_eager():
    tqdm = pytest.importorskip("tqdm")
    bars = []

    def run(wrap):
        torch.manual_seed(0)
        bench, out = Bench(), io.StringIO()
        bar = tqdm.tqdm(total=8, file=out, mininterval=0, miniters=1, bar_format="{desc}{n_fmt}/{total_fmt}{postfix}")

        def step(x):
            loss = bench.train(x)
            bar.update(1)
            bar.set_postfix(loss=f"{loss.item():.3f}", raw=loss.item())
            bar.set_description(f"rate {bench.opt.param_groups[0]['lr']:.3f}")
            return loss

        called = wrap(step)
        for _ in range(6):
            called(torch.randn(6, 4))
        bars.append(called)
        bar.close()
        return bar.n, out.getvalue()

    assert_alike(run(lambda step: Step(step, build=interpret, strict=True)), run(lambda step: step))
    assert len(bars[0].graphs) == 1


class Table:
    s3 = 0.25


WEIGHTS = {
    "looked up": lambda n: {"epoch3": 0.25}.get(f"epoch{n}", 1.0),
    "in a dict": lambda n: 0.25 if f"w{n}" in {"w3": 1} else 1.0,
    "in a list": lambda n: 0.25 if str(n) in ["3"] else 1.0,
    "equal": lambda n: 0.25 if f"epoch{n}" == "epoch3" else 1.0,
    "match": lambda n: 0.25 if re.search("3", str(n)) else 1.0,
    "end": lambda n: 0.25 if f"epoch{n}".endswith("3") else 1.0,
    "character": lambda n: 0.25 if str(n)[-1] == "3" else 1.0,
    "digits": lambda n: 0.25 if str(n).isdigit() else 1.0,
    "length": lambda n: 0.25 if len(f"{n}") > 1 else 1.0,
    "attribute": lambda n: getattr(Table, f"s{n}", 1.0),
}
"""What text of a number decides."""


@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_text_of_a_number_that_changes_decides_in_each_call(weigh):
    bench = Bench()
    step = Step(lambda x, n: bench.train(x) * 0 + weigh(n), build=interpret)
    got = [step(torch.ones(2, 4), n).item() for n in range(5)]
    assert got == [weigh(n) for n in range(5)]


@pytest.mark.parametrize(
    "show",
    [lambda n: f"{n!s:>4}", lambda n: "%4s" % n, lambda n: str(n).zfill(3), lambda n: str(n).ljust(2, ".")],  # noqa: UP031
)
@pytest.mark.filterwarnings("ignore::millstream.errors.FallbackWarning")
def test_text_of_a_number_is_padded(show, capsys):
    bench = Bench()

    def train(x, n):
        print(show(n))
        return bench.train(x)

    step = Step(train, build=interpret)
    for n in range(8, 12):
        step(torch.ones(2, 4), n)
    assert capsys.readouterr().out.splitlines() == [show(n) for n in range(8, 12)]


def test_a_number_is_formatted_by_one_that_changes(capsys):
    bench, shown = Bench(), []

    def train(x, digits):
        loss = bench.train(x)
        print(f"{loss.item():.{digits}f}")
        return loss

    step = Step(train, build=interpret)
    with pytest.warns(FallbackWarning, match=r"formats a number by another one .*ms\.callback\(show, value, digits\)"):
        losses = [step(torch.ones(2, 4), digits).item() for digits in (3, 4, 5)]
    expected = [f"{loss:.{digits}f}" for loss, digits in zip(losses, (3, 4, 5), strict=True)]
    assert capsys.readouterr().out.splitlines() == expected

    def as_told(x, digits):
        loss = bench.train(x)
        ms.callback(lambda value, digits: shown.append(f"{value:.{digits}f}"), loss.item(), digits)
        return loss

    step = Step(as_told, build=interpret)
    losses = [step(torch.ones(2, 4), digits).item() for digits in (3, 4, 5)]
    assert step.graphs
    assert shown == [f"{loss:.{digits}f}" for loss, digits in zip(losses, (3, 4, 5), strict=True)]


def test_icons_of_a_font_stand_beside_numbers_that_change(capsys):
    """Fonts for terminals use characters for private use, too."""
    bench = Bench()

    def train(x, n):
        print(f"\U000f012c {n}")
        return bench.train(x)

    step = Step(train, build=interpret, strict=True)
    for n in range(4):
        step(torch.ones(2, 4), n)
    assert step.graphs
    assert capsys.readouterr().out.splitlines() == [f"\U000f012c {n}" for n in range(4)]


def test_what_the_collector_finalizes_while_a_step_is_traced_is_no_part_of_it(capsys):
    """A progress bar that nobody holds closes itself so."""

    class Bar:
        def __init__(self):
            self.itself, self.weights = self, torch.ones(2)

        def __del__(self):
            print("closed at", self.weights.sum().item())

    bench = Bench()

    def train(x, n):
        gc.collect()  # as Python does at any moment
        print(f"n is {n}")
        return bench.train(x)

    step = Step(train, build=interpret, strict=True)
    for n in range(4):
        Bar()
        step(torch.ones(2, 4), n)
        gc.collect()
    assert step.graphs
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("n")] == [f"n is {n}" for n in range(4)]
    assert lines.count("closed at 2.0") == len(lines) - 4 == 4
