"""While one thread captures a step, others never notice, also those that use the same tensors."""

import copy
import ctypes
import functools
import gc
import importlib
import io
import logging
import math
import os
import pickle
import random
import select
import sys
import threading
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import millstream
from millstream._torch.devices.device_guard import keep_device_guard
from millstream.capture import Step
from tests.capture.worlds import interpret
from tests.clocks import HANG_S
from tests.processes import output_of

_write = ctypes.CDLL(None).write  # that of ``os`` is an effect, which a step may not have

OURS = os.path.dirname(millstream.__file__) + os.sep  # noqa: PTH120  of code, a text
ROUNDS = 200 if os.environ.get("MILLSTREAM_FUZZ") else 40


class Model(nn.Module):
    """Calls ``during`` while it is traced."""

    def __init__(self, during):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.during = during

    def forward(self, x):
        if torch.compiler.is_compiling():
            self.during()
        return self.layer(self.recurrent(x)[0])


def make_step(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(step, build=interpret, **options)


@pytest.fixture
def during_a_trace():
    """Runs a check in another thread while a step is traced here, which neither reaches the check nor what it uses."""

    def run(check):
        (asked, ask), (answered, answer) = os.pipe(), os.pipe()
        outcomes = []

        def serve():
            while said := os.read(asked, 1):
                if said == b"w":
                    outcomes.append("it waited for the trace")
                    continue
                try:
                    check()
                    outcomes.append("fine")
                except BaseException:  # noqa: BLE001 - raised in another thread
                    outcomes.append(traceback.format_exc())
                os.write(answer, b"!")

        thread = threading.Thread(target=serve)
        thread.start()

        def wait():
            _write(ask, b"?", 1)
            if select.select([answered], [], [], HANG_S)[0]:
                os.read(answered, 1)
            else:
                _write(ask, b"w", 1)

        step = make_step(Model(wait))
        for _ in range(2):
            step(torch.ones(3, 1, 4))
        os.close(ask)
        thread.join(HANG_S)
        for end in (asked, answered, answer):
            os.close(end)
        assert outcomes == ["fine"]
        assert len(step.graphs) == 1

    return run


def test_flags_of_the_process_are_as_ever(during_a_trace, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # Dynamo, once imported, turns it off
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__

    def check():
        assert not torch.compiler.is_compiling()
        assert torch.fx._symbolic_trace._is_fx_tracing_flag is False
        assert torch._C._get_mkldnn_enabled()
        assert not torch.is_anomaly_enabled()
        assert torch._dynamo.eval_frame._stance.stance == "default"
        assert nn.Module.__call__ is call
        assert nn.Module.__getattr__ is getattribute
        with pytest.raises(ValueError, match="scale"):
            torch.distributions.Normal(0.0, -1.0)

    importlib.import_module("torch._dynamo")
    during_a_trace(check)
    check()
    assert type(torch.compiler._is_compiling_flag) is bool
    assert type(torch.distributions.Distribution._validate_args) is bool
    assert type(torch._dynamo.eval_frame._stance) is torch._dynamo.eval_frame.DynamoStance


class Usual(nn.Module):
    """Calls what a trace sees, so that guards of its graphs know it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        x = self.layer(x) * math.sqrt(2.0) + random.random() + torch.from_numpy(np.ones(2, dtype=np.float32))
        logging.getLogger("model").debug("half of it")
        if torch.compiler.is_compiling():
            x = x + 1
        print(end="")  # noqa: T201  is what is tried
        x = x - torch.distributions.Normal(x, torch.ones(2)).log_prob(torch.zeros(2))
        warnings.warn("for once", stacklevel=1)
        return x.sum()


def test_a_collection_in_another_thread_runs_no_function_of_ours(during_a_trace):
    """Python 3.11 may collect while a thread gets the frames of another one, which must not go on meanwhile."""
    called = []

    def check():
        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                called.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        gc.collect()
        sys.setprofile(None)

    during_a_trace(check)
    assert not called


def test_compiled_functions_run_compiled(during_a_trace):
    compiled = []

    def backend(gm, inputs):
        compiled.append(gm)
        return gm.forward

    model, optimizer = Usual(), torch.optim.Adam(nn.Linear(2, 2).parameters())
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2, 2)
    functions = [torch.compile(each, backend=backend) for each in (model, lambda x: x.sin(), optimizer.step)]

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            functions[0](torch.ones(2)).backward()
        functions[1](torch.ones(2))
        functions[2]()

    for _ in range(3):
        call()
    before = len(compiled)
    during_a_trace(call)
    call()
    assert before > 3
    assert len(compiled) == before


def test_a_first_compilation_waits_for_the_trace(during_a_trace):
    outcomes, threads = [], []
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    expected = model(x)

    def compile_model():
        outcomes.append(torch.equal(torch.compile(model, backend="eager")(x), expected))

    def begin():
        if not threads:
            threads.append(threading.Thread(target=compile_model))
            threads[0].start()
            threads[0].join(0.2)

    during_a_trace(begin)
    threads[0].join(HANG_S)
    assert outcomes == [True]


def test_random_numbers_seeds_and_optimizers_work(during_a_trace):
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def check():
        random.random()
        torch.manual_seed(0)
        assert torch.rand(3).isfinite().all()
        nn.functional.dropout(other(torch.ones(2, 2)).sum(), 0.5).backward()
        optimizer.step()
        scheduler.step()
        torch.utils.checkpoint.checkpoint(other, torch.ones(2, 2), use_reentrant=False).sum().backward()

    during_a_trace(check)


def test_captured_steps_of_other_tensors_are_replayed_without_waiting(during_a_trace):
    other = make_step(Model(lambda: None))
    for _ in range(4):
        other(torch.ones(3, 1, 4))
    (graph,) = other.graphs
    runs = graph.num_runs
    during_a_trace(lambda: other(torch.ones(3, 1, 4)))
    assert graph.num_runs > runs
    assert other.graphs == [graph]


def copied_by_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def looked_at_before(use):
    """As where a call had looked at the class of a tensor when the trace began, and into it afterwards."""

    def late(*given):
        with torch._C.DisableTorchFunctionSubclass():
            return use(*given)

    return late


def is_parameter(value):
    return type(value) is nn.Parameter and bool(value.isfinite().all())


USES = {
    "value": lambda weight, _: math.isfinite(weight.sum().item()),
    "value, late": looked_at_before(lambda weight, _: math.isfinite(weight.sum().item())),
    "value without gradients": torch.no_grad()(lambda weight, _: math.isfinite(float(weight.sum()))),
    "in a list": lambda weight, _: math.isfinite(torch.stack([weight, weight]).sum().item()),
    "arithmetic": lambda weight, _: type(1 + weight * 2 - weight.data) is torch.Tensor,
    "product": lambda weight, _: type(weight @ torch.ones(4, 1)) is torch.Tensor,
    "item by item": lambda weight, _: all(math.isfinite(each) for row in weight.detach() for each in row),
    "list": lambda weight, _: len(weight.tolist()) == 2,
    "array": lambda weight, _: bool(np.isfinite(np.asarray(weight.detach())).all()),
    "shape": lambda weight, _: (weight.shape, weight.dtype, weight.device.type) == ((2, 4), torch.float32, "cpu"),
    "text": lambda weight, _: repr(weight).startswith("Parameter containing"),
    "kind": lambda weight, _: isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad,
    "memory": lambda weight, _: weight.data_ptr() == weight.untyped_storage().data_ptr() != 0,
    "detached": lambda weight, _: type(weight.detach()) is torch.Tensor,
    "gradient": lambda weight, _: type(weight.grad) in (torch.Tensor, type(None)),
    "in a module": lambda weight, _: type(nn.functional.linear(torch.ones(3, 4), weight)) is torch.Tensor,
    "for a gradient": lambda weight, _: bool(torch.autograd.grad((weight * 2).sum(), weight)[0].eq(2).all()),
    "copy": lambda weight, _: is_parameter(copy.copy(weight)),
    "deep copy": lambda weight, _: is_parameter(copy.deepcopy(weight)),
    "pickled": lambda weight, _: is_parameter(pickle.loads(pickle.dumps(weight))),
    "written": torch.no_grad()(lambda weight, _: weight.add_(0.0) is weight),
    "average": torch.no_grad()(lambda weight, _: bool(torch.zeros(2, 4).lerp_(weight, 0.1).isfinite().all())),
    "many at once": torch.no_grad()(lambda weight, _: torch._foreach_add([weight, weight.data], 1)[0].dim() == 2),
    "norm": lambda _, world: math.isfinite(nn.utils.get_total_norm([*world[0].parameters()])),
    "vector": lambda _, world: bool(nn.utils.parameters_to_vector(world[0].parameters()).isfinite().all()),
    "state": lambda _, world: all(bool(each.isfinite().all()) for each in world[0].state_dict().values()),
    "saved": lambda _, world: copied_by_file(world[0].state_dict())["layer.weight"].isfinite().all().item(),
    "copy of a model": lambda _, world: all(map(is_parameter, copy.deepcopy(world[0].layer).parameters())),
    "optimizer": lambda _, world: all(
        bool(each.isfinite().all()) for entry in [*world[1].state.values()] for each in [*entry.values()]
    ),
    "copy of an optimizer": lambda _, world: len(copy.deepcopy(world[1].state_dict())["state"]) in (0, 6),
    "class": lambda weight, _: type(weight) is nn.Parameter,
}
"""What other threads do with a parameter, or with a model and its optimizer."""


def use_during_a_trace(uses):
    """What comes of uses in other threads while a step is traced, which does not go on before they are over."""
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    outcomes = {}

    def begin_and_wait():
        _write(ask, b"?", 1)
        select.select([told], [], [], HANG_S)  # and so ever after

    model = Model(begin_and_wait)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step, weight = make_step(model, optimizer), model.layer.weight

    def use(name):
        try:
            outcomes[name] = uses[name](weight, (model, optimizer))
        except BaseException:  # noqa: BLE001 - raised in another thread
            outcomes[name] = traceback.format_exc()

    threads = {name: threading.Thread(target=use, args=(name,)) for name in uses}

    def look():
        os.read(asked, 1)
        for thread in threads.values():
            thread.start()
        for thread in threads.values():
            thread.join(HANG_S)
        os.write(tell, b"!")

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(2):
        step(torch.ones(3, 1, 4))
    for thread in (looking, *threads.values()):
        thread.join(HANG_S)
    for end in (asked, ask, told, tell):
        os.close(end)
    assert len(step.graphs) == 1
    return outcomes


def test_tensors_that_are_traced_are_as_ever_in_other_threads():
    """None meets a fake tensor, and none waits."""
    outcomes = use_during_a_trace(USES)
    assert outcomes == dict.fromkeys(USES, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_another_thread_forks_meanwhile_has_what_was_there_before():
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    outcomes = []

    def begin_and_wait():
        _write(ask, b"?", 1)
        if select.select([told], [], [], HANG_S)[0]:
            os.read(told, 1)

    model = Model(begin_and_wait)
    model.count, model.last = 0, torch.zeros(())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def is_as_before():
        group, held = optimizer.param_groups[0], (type(model.count), type(model.last), type(model.layer.weight))
        return held == (int, torch.Tensor, nn.Parameter) and not group["capturable"] and bool(model.last.isfinite())

    def serve():
        while os.read(asked, 1):
            child = os.fork()
            if child == 0:
                os._exit(0 if is_as_before() else 1)
            outcomes.append(os.waitpid(child, 0)[1])
            os.write(tell, b"!")

    def function(x):
        model.count += 1
        model.last = x.sum() * 2
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, thread = Step(function, build=interpret), threading.Thread(target=serve)
    thread.start()
    for _ in range(4):
        step(torch.ones(3, 1, 4))
    os.close(ask)
    thread.join(HANG_S)
    for end in (asked, told, tell):
        os.close(end)
    assert step.graphs
    assert outcomes == [0] * len(outcomes) != []


def test_threads_that_use_a_model_while_its_step_is_captured_again_and_again_get_no_error():
    model = Model(lambda: None)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    stop, calls = threading.Event(), []

    def use(seed):
        # Text takes items while it holds the interpreter's lock: beside another thread's first use of the parameter
        # PyTorch may stop for good there, with or without a trace.
        left_out = ("written", "text", "optimizer", "copy of an optimizer")
        rng, names = random.Random(seed), [name for name in USES if name not in left_out]
        while not stop.is_set():
            calls.append(name := rng.choice(names))
            assert USES[name](model.layer.weight, (model, optimizer)), name

    def capture():
        try:
            for _ in range(ROUNDS // 20):
                step = make_step(model, optimizer)
                for _ in range(2):
                    step(torch.ones(3, 1, 4))
                assert step.graphs
        finally:
            stop.set()

    run_together([functools.partial(use, 0), functools.partial(use, 1), capture])
    assert calls


def test_a_step_that_is_captured_in_one_thread_is_replayed_in_those_that_waited():
    model = nn.Linear(4, 2)
    step = make_step_of(model)
    step(torch.ones(3, 4))
    barrier = threading.Barrier(4)

    def call():
        barrier.wait()
        step(torch.ones(3, 4))

    run_together([call] * 4)
    assert len(step.graphs) == 1
    assert step.graphs[0].num_runs == 4


def make_step_of(model, seed=None):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(step, build=interpret)


def run_together(calls):
    errors = []

    def guarded(call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised in another thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_numbers_of_calls_at_once_are_not_mixed_up():
    step = Step(lambda x, factor: (x * factor).sum(), build=interpret, strict=True)
    for factor in (1, 2, 3):
        step(torch.ones(4), factor)

    def call(factor):
        for _ in range(100):
            assert step(torch.ones(4), factor).item() == 4 * factor

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_together([functools.partial(call, factor) for factor in (5, 6, 7)])
    finally:
        sys.setswitchinterval(before)
    assert len(step.graphs) == 2


def test_eight_threads_capture_and_replay_while_two_call_compiled_models():
    def world(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        step, x = make_step_of(model), torch.randn(3, 4)
        step(x)  # eager; while Dynamo compiles anywhere, PyTorch 2.13 tells all threads so, and Adam rounds otherwise
        return step, x

    def train(step, x, losses):
        losses += (step(x).item() for _ in range(ROUNDS))

    alone = []
    for seed in range(8):
        losses = []
        train(*world(seed), losses)
        alone.append(losses)
    worlds = [world(seed) for seed in range(8)]
    together = [[] for _ in worlds]
    served, stop = [], threading.Event()
    compiled, x = torch.compile(nn.Linear(4, 2), backend="eager"), torch.ones(2, 4)
    expected = compiled(x)

    def serve():
        while not stop.is_set():
            assert torch.equal(compiled(x), expected)
            served.append(1)

    def work():
        try:
            run_together([lambda w=w, out=out: train(*w, out) for w, out in zip(worlds, together, strict=True)])
        finally:
            stop.set()

    run_together([serve, serve, work])
    assert together == alone
    assert all(len(step.graphs) == 1 and not step.fallbacks for step, _ in worlds)
    assert served


def test_an_uncompiled_function_can_be_compiled_after_captures_at_once():
    """In a process of its own: what is left behind would be left for good."""
    said = output_of(
        """
        import threading, torch
        from millstream.capture import Step
        from tests.capture.worlds import interpret
        def trial(barrier):
            model = torch.nn.Linear(8, 4)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            def step(x):
                loss = model(x).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss
            step = Step(step, build=interpret)
            for _ in range(3): barrier.wait(); step(torch.randn(6, 8))
            assert step.graphs and not step.fallbacks, step.fallbacks
        for _ in range(4):
            barrier = threading.Barrier(4)
            threads = [threading.Thread(target=trial, args=(barrier,)) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
        print(torch.fx._symbolic_trace._is_fx_tracing_flag, torch.compiler._is_compiling_flag)
        compiled = torch.compile(torch.nn.Linear(8, 4), backend="eager")
        print(tuple(compiled(torch.randn(6, 8)).shape))
        """
    )
    assert said.split("\n")[:2] == ["False False", "(6, 4)"]


@pytest.mark.parametrize("without", ["", "pytorch#160532"])
def test_the_guard_of_a_device_that_is_not_there_is_made_in_a_thread_that_stays(monkeypatch, without):
    makers = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: makers.append(threading.current_thread()))
    monkeypatch.setenv("MILLSTREAM_WITHOUT", without)
    thread = threading.Thread(target=keep_device_guard.__wrapped__)
    thread.start()
    thread.join(HANG_S)
    assert [maker.is_alive() and maker is not thread for maker in makers] == ([] if without else [True])
