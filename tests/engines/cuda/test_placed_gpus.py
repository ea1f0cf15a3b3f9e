"""Programs placed on GPUs, which are pretended here: what is tried, what is kept, and what an error leaves."""

import json
import types
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.cost import KernelCost, Link, Rate, Roofline
from millstream.device import DeviceContext, Place
from millstream.device.drivers.cpu import CpuDriver
from millstream.engine import assembly
from millstream.engine.cuda import links, placed_trial, plan_devices
from millstream.engine.cuda import placed_gpus as placed
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.placed.placed_program import Devices, find_constraints, place_program
from millstream.engine.plan_source import compile_plan
from millstream.errors import ArgumentError, DeviceError
from millstream.graph import CHOSEN
from millstream.lower.inductor import tuning
from millstream.placement import Machine, place, search
from millstream.program import KernelCall, Value
from millstream.schedule import Scheduling, peak_bytes, plan_serial
from millstream.settings import Settings
from tests import networks
from tests.device.virtual_device import VirtualDevice, VirtualEvent, VirtualStream
from tests.engines.become import become

pytestmark = pytest.mark.usefixtures("lowered_once")
DEVICES = ["cuda:0", "cuda:1"]


@pytest.fixture
def gpus(monkeypatch, device):
    """Two GPUs, whose memory and kernels are the host's; times in which one device and several run a call."""
    device.noted = {}
    device_store = types.SimpleNamespace(load_choice=device.noted.get, save_choice=device.noted.__setitem__)
    contexts = {name: DeviceContext(Place("cuda", int(name[-1])), CpuDriver()) for name in DEVICES}
    for module in (placed, plan_devices):
        monkeypatch.setattr(module, "context", contexts.__getitem__)
        monkeypatch.setattr(module, "guard", lambda place: nullcontext())
        monkeypatch.setattr(module, "current_stream_handle", lambda index: None)
    monkeypatch.setattr(placed, "Gpus", Devices)
    monkeypatch.setattr(placed, "gpu_link", lambda *ends: Link("free", (Rate(0, 0, 1e18),)))
    monkeypatch.setattr(placed, "Store", lambda device: device_store)
    monkeypatch.setattr(placed, "repair", lambda context: device.repairs.append(device.error))
    monkeypatch.setattr(plan_devices, "take_workspaces", lambda context, program, numbers: None)
    monkeypatch.setattr(plan_devices.PlanDevices, "allocating", lambda self: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    device.times = 10, 20
    monkeypatch.setattr(placed.PlacedTrial, "time", lambda *_: device.times)

    def even_costs(self, one, inputs):
        graph = self.lowered.program.graph
        return replace(Roofline().estimate(graph), kernels=tuple(KernelCost(100_000) for _ in graph.kernels))

    monkeypatch.setattr(placed.PlacedOnGpus, "_find_costs", even_costs)
    return device


def on_gpus(executable, asked=None, streams=None, share=None, pair=None):
    """Let a program run as on GPUs, maybe with too little memory; return its engine."""
    lowered, one, memory_bytes = executable.lowered, None, None
    plan = plan_serial(lowered.program.graph)
    if share is None:
        one = SerialEngine(lowered, plan)
    else:
        memory_bytes = (int(share * peak_bytes(plan)),) * 2
    how = {"asked": asked, "memory_bytes": memory_bytes, "copy_outputs": True, "pair": pair or ProgramPair()}
    return become(executable, placed.PlacedOnGpus(lowered, one, DEVICES, Scheduling(streams), **how))


class Towers(nn.Module):
    def __init__(self, depth=1, dropout=0.3):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.Tanh())),
                nn.Linear(32, 32),
                nn.Dropout(dropout) if dropout else nn.Identity(),
            )
            for _ in range(2)
        )

    def forward(self, x):
        return sum(tower(x) for tower in self.towers), self.towers[0](x)


def train(asked, streams=None, share=None, **how):
    torch.manual_seed(0)
    model = Towers(**how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    @ms.step(strict=True, engine="serial")
    def step(x):
        total, one = model(x)
        loss = total.square().mean() + one.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, one

    torch.manual_seed(1)
    results = [step(torch.randn(512, 32)) for _ in range(2)]
    engine = None if asked is None else on_gpus(*executables(step), asked, streams, share)
    for number in range(4):
        results.append(step(torch.randn(512, 32)))
        if engine is not None and number == 2:
            engine.release()
    return engine, torch.utils._pytree.tree_leaves((results, model.state_dict(), optimizer.state_dict()["state"]))


@pytest.mark.parametrize(("asked", "streams"), [("graph", 1), ("streams", 2), ("graph", None)])
def test_steps_give_the_bits_of_one_device(gpus, asked, streams):
    _, expected = train(None)
    engine, found = train(asked, streams)
    assert all(map(torch.equal, found, expected))
    assert (engine.name, sorted(engine.plan.graph.devices)) == (asked, DEVICES)
    assert engine.is_captured == (asked == "graph")
    assert bool(gpus.pools) == (asked == "graph")


def test_what_does_not_fit_on_one_device_is_placed_at_once(gpus, monkeypatch):
    monkeypatch.setattr(search, "MOST_KERNELS", 2_000)
    monkeypatch.setattr(placed.PlacedTrial, "check", lambda *_: pytest.fail("there is nothing to compare with"))
    deep = {"depth": 4, "dropout": 0}  # what draws stays on one device
    _, expected = train(None, **deep)
    engine, found = train("graph", share=0.85, **deep)
    assert all(map(torch.equal, found, expected))
    assert (engine.name, sorted(engine.plan.graph.devices)) == ("graph", DEVICES)
    assert engine.is_captured
    assert outcomes(engine) == [CHOSEN]
    inputs = [torch.zeros(())]
    monkeypatch.setattr(engine._home.driver, "is_capturing", lambda: True)
    with pytest.raises(DeviceError, match="as cuda:0 has no room for it: it cannot be a part of a graph"):
        engine(inputs)

    # What a device has free decides whether it fits.
    lowered, needed = engine.lowered, peak_bytes(plan_serial(engine.lowered.program.graph))
    monkeypatch.setattr(assembly, "_why_not_placed", lambda *_: "")

    def build(*shares, memory=1.25):
        rooms = {name: int(share * needed) for name, share in zip(DEVICES, shares, strict=True)}
        monkeypatch.setattr(assembly, "room_on", rooms.__getitem__)
        settings = Settings.of(devices=DEVICES, memory=memory)
        return assembly._build_placed(lowered, settings, None, settings.scheduling, lambda: alone, pytest.fail, None)

    alone = SerialEngine(lowered, plan_serial(lowered.program.graph))
    assert build(1, 0).one is alone
    assert build(0.8, 2).one is None
    assert build(0.01, 0.01) is alone, "it may fit all the same: what can be freed is not known"
    assert "runs on one device: room for" in alone.notes[0]
    with pytest.raises(ArgumentError, match=r"room for \d+ bytes on cuda:0, \d+ bytes on cuda:1 is too small for"):
        build(0.005, 2, memory=needed // 100)


def infer(gpus, error=None):
    """Calls of a model under changing conditions; its engine."""
    model = Towers().eval()
    compiled = ms.compile(model, strict=True, engine="serial")
    with torch.no_grad():
        compiled(torch.randn(4, 32))
        engine = on_gpus(*executables(compiled))
        gpus.error = error
        for _ in range(3):
            x = torch.randn(4, 32)
            networks.assert_close(compiled(x), model(x))
        for parameter in model.parameters():  # elsewhere, and with other values
            parameter.data = parameter.detach() * 2
        networks.assert_close(compiled(x), model(x))
    return engine


@pytest.mark.parametrize("kept", [True, False])
def test_models_under_autograd_are_placed(gpus, kept):
    """Also where a forward call comes before an earlier one's backward, and where one of the two is not placed."""
    gpus.times = (10, 20) if kept else (20, 10)

    def learn(asked):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Towers()
        compiled = ms.compile(model, strict=True, engine="serial")
        engines = []
        for number in range(6):
            torch.manual_seed(number)
            losses = [sum(each.square().mean() for each in compiled(torch.randn(4, 32))) for _ in range(1 + number % 3)]
            for loss in losses:
                loss.backward()
            if asked and not engines:
                pair = ProgramPair()
                engines += [on_gpus(each, asked[0], pair=pair) for each in executables(compiled)]
            if number == 4:
                for engine in engines:
                    engine.release()
        return engines, [each.grad for each in model.parameters()]

    _, expected = learn(None)
    engines, found = learn(("graph",) if kept else (None,))
    assert all(map(torch.equal, found, expected))
    assert [sorted(engine.plan.graph.devices) for engine in engines] == [DEVICES if kept else ["cpu"]] * 2
    assert engines[0].is_captured == kept
    assert bool(engines[0]._pair.saved) == kept


def outcomes(engine):
    return [each.outcome for each in engine.candidates]


def test_what_was_measured_faster_is_kept(gpus):
    engine = infer(gpus)
    assert (engine.name, sorted(engine.plan.graph.devices)) == ("graph", DEVICES)
    assert outcomes(engine) == ["slower", CHOSEN]
    assert engine.candidates[1].measured_ns == 10


@pytest.mark.parametrize(("times", "devices"), [((10, 20), DEVICES), ((20, 10), ["cpu"])])
def test_what_was_chosen_is_found_again_without_a_clock(gpus, monkeypatch, times, devices):
    gpus.times = times
    first = infer(gpus)
    monkeypatch.setattr(placed.PlacedTrial, "time", lambda *_: pytest.fail("timed again"))
    for key, noted in gpus.noted.items():
        gpus.noted[key] = json.loads(json.dumps(noted))
    again = infer(gpus)
    assert again.candidates == first.candidates
    assert sorted(again.plan.graph.devices) == devices


@pytest.mark.parametrize("noted", [{}, {"candidates": 3}, {"candidates": [{"policy": "x"}]}, {"candidates": []}])
def test_what_cannot_be_read_is_tried_again(gpus, noted):
    infer(gpus)
    gpus.noted.update(dict.fromkeys(gpus.noted, noted))
    assert infer(gpus).candidates[1].is_chosen


def test_one_device_is_kept_where_it_is_faster(gpus):
    gpus.times = 20, 10
    engine = infer(gpus)
    assert engine.plan is engine.one.plan
    assert outcomes(engine) == [CHOSEN, "slower"]


def test_where_nothing_can_be_captured_kernels_are_issued_in_every_call(gpus):
    engine = infer(gpus, RuntimeError("operation not permitted\nmore of it"))
    assert (engine.name, sorted(engine.plan.graph.devices)) == ("streams", DEVICES)
    assert "no graph of several devices, operation not permitted" in engine.notes[0]
    assert len(gpus.repairs) == 2


def change(monkeypatch, of_one, of_several):
    """Let results differ by so much each time."""
    run, count = placed.PlacedTrial._run, iter(range(100))

    def run_and_change(self, which):
        change = of_one if which is self._one else of_several
        return [value * (1 + change * next(count)) for value in run(self, which)]

    monkeypatch.setattr(placed.PlacedTrial, "_run", run_and_change)


def test_what_rounds_otherwise_is_not_kept(gpus, monkeypatch):
    change(monkeypatch, 0, 1e-4)
    engine = infer(gpus)
    assert engine.plan is engine.one.plan
    assert outcomes(engine) == [CHOSEN, "rounds otherwise"]


@pytest.mark.parametrize(("of_several", "kept"), [(1e-4, True), (1e-2, False)])
def test_where_one_device_varies_numbers_are_compared(gpus, monkeypatch, of_several, kept):
    change(monkeypatch, 1e-4, of_several)
    engine = infer(gpus)
    assert (engine.plan is not engine.one.plan) is kept
    assert any("gives other bits each time on one device" in note for note in engine.notes)


def test_distances():
    one, nan = torch.ones(4), torch.full((4,), float("nan"))
    assert placed_trial.distance([one, nan], [one.clone(), nan.clone()]) == 0
    assert placed_trial.distance([one * 1.5], [one]) == pytest.approx(0.5)
    assert placed_trial.distance([one], [nan]) == float("inf")
    assert placed_trial.distance([torch.tensor([1])], [torch.tensor([2])]) == float("inf")


def test_an_error_in_a_trial_leaves_one_device(gpus, monkeypatch):
    def refuse(*_):
        raise RuntimeError("a kernel has not chosen among 3 configurations yet")

    monkeypatch.setattr(placed, "place_program", refuse)
    engine = infer(gpus)
    assert engine.plan is engine.one.plan
    assert "runs on one device: a kernel has not chosen" in engine.notes[0]


# --- streams of two devices ------------------------------------------------------------------------------------------


class Late(VirtualDevice):
    """A device whose kernels run whenever streams and events let them; its events are for its own streams."""

    def __init__(self, index, first=None):
        super().__init__("random", seed=7)
        self.index = index
        if first is not None:  # what runs next, anywhere, is chosen among all
            self.streams, self.lock, self.random = first.streams, first.lock, first.random

    def make_event(self, *, timing):
        event = VirtualEvent(self)
        record = event.record

        def record_here(stream):
            assert stream.device.index == self.index, "an event is of one device"
            record(stream)

        event.record = record_here
        return event

    def _add(self, name):
        stream = VirtualStream(self, name)
        getattr(self, "streams", []).append(stream)
        return stream


def late(call, device):
    """A call whose kernel runs later, on the current stream of its device."""

    def launch(*args, **kwargs):
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        saved = [each.clone() for each in tensors]
        target = getattr(call.target, "binding", call.target)
        results = target(*args, **kwargs)  # for their sizes
        made = [results] if isinstance(results, torch.Tensor) else list(results or ())
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)

        def run():
            found = target(*args, **kwargs)
            for old, new in zip(made, [found] if isinstance(found, torch.Tensor) else found or (), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        device.current_stream().enqueue(run)
        return results

    return replace(call, target=launch)


@pytest.mark.parametrize("fault", [False, True])
def test_streams_of_two_devices_wait_for_each_other(gpus, monkeypatch, fault):
    """On devices that run what they may at random; where a stream ignores its waits, numbers are wrong."""
    first = Late(0)
    devices = {"cuda:0": first, "cuda:1": Late(1, first)}
    contexts = {name: DeviceContext(Place("cuda", each.index), each) for name, each in devices.items()}
    monkeypatch.setattr(plan_devices, "context", contexts.__getitem__)

    def enter(stream):
        stream.device.local.stream = stream

    monkeypatch.setattr(torch.cuda, "set_stream", enter)
    with torch.no_grad():
        lowered, inputs, expected = networks.lowered(Towers().eval(), torch.randn(4, 32))
        program = lowered.program
        costs = replace(
            Roofline().estimate(program.graph), kernels=tuple(KernelCost(100_000) for _ in program.graph.kernels)
        )
        machine = Machine(tuple(DEVICES), Link("free", (Rate(0, 0, 1e18),)), 2)
        found = place(program.graph, costs, machine, find_constraints(program))
        assert len(found.devices) == 2
        spread = place_program(program, found.placement)
        pairs = zip(spread.calls, spread.graph.kernels, strict=True)
        spread = replace(spread, calls=tuple(late(call, devices[kernel.device]) for call, kernel in pairs))
        over = plan_devices.PlanDevices(spread, found.plan, contexts["cuda:0"])
        bound, wrong = over.bind(), 0
        run = compile_plan(spread, found.plan, bound, context=contexts["cuda:0"], elsewhere=over.elsewhere)
        for _ in range(10):
            for stream in first.streams:
                stream.deaf = fault
            for tensor in bound.values():
                tensor.fill_(7.0)
            outputs = run(list(inputs))
            over.hand_over(outputs)
            first.synchronize()
            wrong += not all(map(torch.equal, outputs, expected))
    assert bool(wrong) == fault
    assert {stream.device.index for stream in first.streams} == {0, 1}


# --- links and kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noted", [None, {"hop_ns": 5000, "bytes_per_s": 4e11}, {"hop_ns": "none"}, {"hop_ns": -1, "bytes_per_s": 1}]
)
def test_a_link_is_measured_once(monkeypatch, noted):
    kept = {}
    monkeypatch.setattr(links, "context", lambda name: DeviceContext(Place("cuda", int(name[-1])), CpuDriver()))
    monkeypatch.setattr(links, "reach", lambda first, second: True)
    monkeypatch.setattr(links, "_address", lambda end: str(end.place))
    store = types.SimpleNamespace(load_choice=lambda key: noted, save_choice=kept.__setitem__)
    monkeypatch.setattr(links, "Store", lambda device: store)
    monkeypatch.setattr(links, "_measure", lambda ends: Rate(0, 7000, 3e11))
    link = links.gpu_link.__wrapped__(*DEVICES)
    is_known = noted == {"hop_ns": 5000, "bytes_per_s": 4e11}
    assert link.copy_ns(0) == (5000 if is_known else 7000)
    assert list(kept.values()) == ([] if is_known else [{"hop_ns": 7000, "bytes_per_s": 3e11}])


class Tuner:
    """As much of Inductor's as is used."""

    def __init__(self, *configs):
        self.fn = types.SimpleNamespace(fn=len, __name__="triton_add")
        self.device_props = DeviceProperties("cuda", 0)
        self.triton_meta = {"device": 0, "signature": {}}
        self.launchers = [Launcher(config, 0) for config in configs]
        self.compile_results, self._cached_launcher = [1], self.launchers[0]

    def __getstate__(self):
        raise AssertionError("it has run")

    def _precompile_config(self, config):
        made = Launcher(config, self.triton_meta["device"])
        return types.SimpleNamespace(make_launcher=lambda: made)

    def benchmark_all_configs(self):
        return {launcher: 1 / launcher.config.kwargs["XBLOCK"] for launcher in self.launchers}

    def run(self, *args, stream):
        (launcher,) = self.launchers
        return launcher, self.device_props.index, stream


class Launcher:
    def __init__(self, config, device):
        self.config, self.device = config, device


class DeviceProperties(NamedTuple):
    type: str
    index: int


def config(block):
    return types.SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)


def test_kernels_keep_their_configuration_on_another_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    tuner = Tuner(config(64))
    gpus = placed.Gpus()
    where = torch.device("cuda", 0)
    call = KernelCall(tuner.run, (Value("x"), [where]), {"device": where}, stream_keyword="stream")
    moved = gpus.move_call(call, "cuda:1")
    launcher, index, stream = moved.target(stream=3)
    assert (launcher.config.kwargs, launcher.device, index, stream) == ({"XBLOCK": 64}, 1, 1, 3)
    assert (moved.args, moved.kwargs) == ((Value("x"), [torch.device("cuda:1")]), {"device": torch.device("cuda:1")})
    assert gpus.move_call(call, "cuda:1").target == moved.target, "loaded once"
    assert tuner.run(stream=3) == (tuner.launchers[0], 0, 3), "as it was"
    assert tuner.compile_results


def test_a_kernel_that_has_not_chosen_chooses_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(tuning, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(tuning, "_known", {})
    tuner = Tuner(config(64), config(128))
    tuning.keep_choice(tuner, "source")
    call = KernelCall(tuner.run, (), {}, stream_keyword="stream")
    (other,) = {placed.Gpus().move_call(call, "cuda:1").target.__self__}
    assert [each.config.kwargs["XBLOCK"] for each in other.launchers] == [64, 128]
    times = other.benchmark_all_configs()
    assert {launcher.device for launcher in times} == {1}
    (chosen,) = tuner.benchmark_all_configs()
    assert chosen is tuner.launchers[1], "what another device has found is kept"
    tuner.launchers = []
    with pytest.raises(RuntimeError, match="triton_add could not be loaded on cuda:1"):
        placed.Gpus().move_call(call, "cuda:1")
