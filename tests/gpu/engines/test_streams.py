"""On a GPU, plans on several streams: the numbers of one stream, the choice among plans, and what failures leave."""

import gc
import warnings

import pytest
import torch
from torch import nn

import millstream as ms
from benchmarks.identity import copied, record, run
from millstream.api import executables
from millstream.engine import CudaGraphEngine
from millstream.engine.cuda import captured, cuda_graph, in_place
from millstream.engine.planning import planner
from millstream.engine.planning.trial import Trials
from millstream.schedule import Scheduling, choose, plan_serial
from tests import networks
from tests.engines.test_step import OPTIMIZERS, assert_trained_alike, train
from tests.engines.test_views import rotate, transform
from tests.lower.workarounds import test_kept_reads as kept_reads
from tests.processes import output_of

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """Nothing is known of any kernel, and nothing is noted where it outlives the test."""
    torch._dynamo.reset()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planner, "_tables", {})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Towers(nn.Module):
    """Chains side by side of kernels that fill little of a device: several streams must pay."""

    def __init__(self, num_towers=8, height=6, width=256, dropout=0.0):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(self.level(width, dropout) for _ in range(height))) for _ in range(num_towers)
        )

    @staticmethod
    def level(width, dropout):
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, x):
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


def towers(batch=16, **shape):
    """A network, its input, and its output by plain PyTorch."""
    model = Towers(**shape).cuda().eval()
    x = torch.randn(batch, shape.get("width", 256), device="cuda")
    with torch.no_grad():
        return model, x, model(x)


def called(compiled, x, times=3):
    """Call without gradients: once for the warm-up, once to choose and capture, then replays."""
    with torch.no_grad():
        for _ in range(times):
            y = compiled(x)
    (executable,) = executables(compiled)
    return y, executable


# --- the same numbers ------------------------------------------------------------------------------------------------


def assert_engines_agree(lowered, inputs, steps):
    (results, state), _ = run(lowered, inputs, "serial", 1, steps)
    assert all(tensor.isfinite().all() for tensor in results[-1] if isinstance(tensor, torch.Tensor))
    most = 1
    for engine, streams in [("streams", n) for n in COUNTS] + [("graph", n) for n in COUNTS]:
        (others, other_state), executable = run(lowered, inputs, engine, streams, steps)
        assert (executable.name, executable.notes) == (engine, [])
        assert executable.num_streams <= streams
        most = max(most, executable.num_streams)
        leaves = [torch.utils._pytree.tree_leaves(tree) for tree in ((results, state), (others, other_state))]
        for ours, theirs in zip(*leaves, strict=True):
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same, f"{engine} on {streams} streams differs"
        if engine == "graph":
            assert executable.is_captured
    return most


@pytest.mark.parametrize("kind", networks.ALL)
def test_inference_is_bit_identical_on_all_engines_and_streams(kind):
    compiled = ms.compile(kind().cuda().eval(), engine="serial", strict=True)
    x, _ = networks.example(kind, "cuda")
    with torch.no_grad():
        compiled(x)
        lowered, inputs = record(*executables(compiled), lambda: compiled(x))
        most = assert_engines_agree(lowered, inputs, 4)
    assert most > 1 or kind is not networks.Inception


@pytest.mark.parametrize(("function", "columns"), [(transform, None), (rotate, 32)])
def test_complex_numbers_are_bit_identical(function, columns):
    inputs = [torch.randn(64, n, device="cuda") for n in (64, columns) if n]
    compiled = ms.compile(function, engine="serial", strict=True)
    with torch.no_grad():
        compiled(*inputs)
        lowered, flat = record(*executables(compiled), lambda: compiled(*inputs))
        assert assert_engines_agree(lowered, flat, 4) > 1


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("make", [kept_reads.RunningScale, kept_reads.spectral])
def test_gradients_are_of_what_was_read_before_it_was_written(make, streams):
    kept_reads.assert_gradients_are_right(make().cuda(), streams=streams)


@pytest.mark.parametrize("kind", networks.ALL)
def test_training_is_bit_identical_on_all_engines_and_streams(kind):
    stepped, _, _ = train(kind, OPTIMIZERS["momentum"], 3, "cuda", "serial")
    lowered, inputs = record(*executables(stepped), lambda: stepped(*networks.example(kind, "cuda")))
    with torch.no_grad():
        most = assert_engines_agree(lowered, inputs, 20)
    assert most > 1 or kind is not networks.Inception


@pytest.mark.parametrize("kind", [networks.Inception, networks.Lstm])
def test_forward_and_backward_are_bit_identical(kind):
    """Two forward passes wait for their backward passes at once, so that one of them must not use the graph."""
    model, x = kind().cuda(), networks.example(kind, "cuda")[0]
    gradients = []
    for engine, streams in (("serial", 1), ("graph", 1), ("graph", 4), ("streams", 4)):
        torch._dynamo.reset()
        compiled = ms.compile(model, engine=engine, streams=streams, memory=100.0, strict=True)
        for _ in range(4):
            model.zero_grad()
            first, second = compiled(x).square().sum(), compiled(x * 2).square().sum()
            second.backward()
            first.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))


@pytest.mark.parametrize("streams", ["auto", 4, 8])
@pytest.mark.parametrize("kind", [Towers, networks.Inception])
def test_a_thousand_replays_are_identical(kind, streams):
    model = kind().cuda().eval()
    x = torch.randn(16, 256, device="cuda") if kind is Towers else networks.example(kind, "cuda")[0]
    compiled = ms.compile(model, streams=streams, memory=100.0, strict=True)
    first, executable = called(compiled, x)
    assert executable.is_captured
    assert executable.num_streams > 1 or kind is not Towers  # a small Inception may be quickest on one
    with torch.no_grad():
        different = sum(compiled(x).ne(first).sum() for _ in range(1000))
    assert different.item() == 0


# --- another device than the current one -----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(("engine", "streams"), [("serial", 1), ("streams", 4), ("graph", 1), ("graph", "auto")])
def test_a_model_on_another_device_than_the_current_one(engine, streams):
    model = networks.Inception().to("cuda:1").eval()
    x = networks.example(networks.Inception, "cuda:1")[0]
    with torch.no_grad():
        expected = model(x)
    y, executable = called(ms.compile(model, engine=engine, streams=streams, strict=True), x)
    networks.assert_close(y, expected, 1e-4)
    assert y.device == x.device
    assert executable.name == engine
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("engine", ["serial", "graph"])
def test_training_on_another_device(engine):
    _, sides, losses = train(networks.Inception, OPTIMIZERS["momentum"], 4, "cuda:1", engine)
    assert_trained_alike(sides, losses, 1e-4)
    assert torch.cuda.current_device() == 0


# --- processes and threads that have run nothing yet -----------------------------------------------------------------

FRESH = """
    from concurrent.futures import ThreadPoolExecutor
    import torch
    from torch import nn
    import millstream as ms
    from millstream.api import executables

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            part = lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Flatten(), *[nn.Linear(256, 256)] * 4)
            self.parts = nn.ModuleList(part() for _ in range(6))

        def forward(self, x):
            return torch.stack([part(x) for part in self.parts]).sum(0)

    def call():
        with torch.no_grad():
            return compiled(x).cpu()

    compiled = ms.compile(Towers().cuda().eval(), memory=100.0, strict=True)
    x = torch.randn(4, 8, 32, device="cuda")
    threads = [ThreadPoolExecutor(1) for _ in range(NUM_THREADS)]
    results = [threads[number % NUM_THREADS].submit(call).result() for number in range(NUM_THREADS + 2)]
    (executable,) = executables(compiled)
    assert executable.notes == [], executable.notes
    assert executable.is_captured
    assert executable.candidates
    assert all(torch.equal(each, results[0]) for each in results)
"""


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_product_of_a_process_and_of_a_thread_is_ours(num_threads):
    """Neither has a handle of cuBLAS's yet, which cannot be made while a graph is captured."""
    output_of(FRESH.replace("NUM_THREADS", str(num_threads)))


# --- the choice ------------------------------------------------------------------------------------------------------


def test_auto_chooses_and_explains(tmp_path):
    model, x, expected = towers()
    compiled = ms.compile(model, strict=True)
    y, executable = called(compiled, x)
    networks.assert_close(y, expected, 1e-4)
    serial, *others = executable.candidates
    (chosen,) = [candidate for candidate in executable.candidates if candidate.is_chosen]
    plan = (executable.plan.policy, executable.num_streams, executable.num_waits, executable.peak_bytes)
    assert plan == (chosen.policy, chosen.streams, chosen.waits, chosen.peak_bytes)
    assert (serial.policy, serial.streams) == ("serial", 1)
    assert chosen in others  # eight towers leave most of any device empty on one stream
    assert chosen.measured_ns < serial.measured_ns
    assert all(candidate.outcome and candidate.predicted_ns > 0 for candidate in executable.candidates)
    explanation = ms.explain(compiled)
    assert "chosen" in str(explanation)
    (program,) = explanation.to_dict()["programs"]
    assert len(program["candidates"]) == len(executable.candidates)
    explanation.save(tmp_path / "run.html")
    assert f"on {chosen.streams} streams" in (tmp_path / "run.html").read_text()


def test_the_fastest_of_one_chain_is_one_stream():
    model, x, _ = towers(num_towers=1)
    _, executable = called(ms.compile(model, strict=True), x)
    assert executable.num_streams == 1
    assert executable.is_captured


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_the_number_of_streams_asked_for_is_kept_without_trials(streams, monkeypatch):
    monkeypatch.setattr(Trials, "time", lambda *_: pytest.fail("nothing was to be tried"))
    model, x, expected = towers()
    y, executable = called(ms.compile(model, streams=streams, memory=100.0, strict=True), x)
    networks.assert_close(y, expected, 1e-4)
    assert min(streams, 2) <= executable.num_streams <= streams


def test_costs_and_choices_are_kept_on_disk_and_used_again(monkeypatch, tmp_path):
    model, x, _ = towers()
    first, before = called(ms.compile(model, strict=True), x)
    assert {path.name.partition("-")[0] for path in tmp_path.glob("*.json")} == {"costs", "plans"}
    assert {path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".so")} <= {"tuning"}
    # As in another process: nothing is remembered but what lies on disk.
    torch._dynamo.reset()
    monkeypatch.setattr(planner, "_tables", {})
    monkeypatch.setattr(planner, "CostMeter", lambda *_: pytest.fail("all kernels are known"))
    monkeypatch.setattr(Trials, "time", lambda *_: pytest.fail("the choice is known"))
    second, after = called(ms.compile(model, strict=True), x)
    assert torch.equal(first, second)
    assert after.plan.steps == before.plan.steps
    assert after.candidates == before.candidates
    assert after.costs == before.costs


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "file" / "folder"))
    model, x, expected = towers()
    y, executable = called(ms.compile(model, strict=True), x)
    networks.assert_close(y, expected, 1e-4)
    assert executable.candidates


def test_trials_leave_everything_as_it_was(monkeypatch):
    """Parameters, optimizer state, batch and random generator, on a step with dropout."""
    settle, measured = CudaGraphEngine._settle, []

    def watched(engine, planner, inputs):
        torch.cuda.synchronize()
        before, state = copied(inputs), torch.cuda.get_rng_state()
        settle(engine, planner, inputs)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        for ours, theirs in zip(before, inputs, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        measured.extend(each for each in engine.candidates if each.streams > 1 and each.measured_ns is not None)

    monkeypatch.setattr(CudaGraphEngine, "_settle", watched)
    model = Towers(height=3, dropout=0.3).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    @ms.step(strict=True)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(5):
        assert step(torch.randn(16, 256, device="cuda")).isfinite()
    assert measured
    assert all(state["step"] == 5 for state in optimizer.state.values())
    (executable,) = executables(step)
    assert executable.is_captured


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1.0, 1.25, "least"])
def test_no_plan_takes_more_than_the_budget(memory):
    model, x, expected = towers(batch=2048)
    if memory == "least":
        _, executable = called(ms.compile(model, engine="serial", strict=True), x, times=1)
        memory = executable.peak_bytes
        torch._dynamo.reset()
    y, executable = called(ms.compile(model, memory=memory, strict=True), x)
    networks.assert_close(y, expected, 1e-4)
    budget = Scheduling(memory=memory).budget_bytes(plan_serial(executable.plan.graph))
    assert executable.peak_bytes <= budget
    assert all(candidate.peak_bytes <= budget for candidate in executable.candidates)


@pytest.mark.parametrize("streams", [2, 4, 8])
def test_a_graph_on_streams_takes_no_memory_beyond_its_plan(streams):
    model, x, _ = towers(batch=4096, width=1024)
    compiled = ms.compile(model, streams=streams, memory=100.0, copy_outputs=False, strict=True)
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(x)
        (executable,) = executables(compiled)
        slots, workspaces = x.numel() * 4, 9 * (40 << 20)  # cuBLAS takes up to 33 MB for each stream
        assert 1 < executable.num_streams <= streams
        assert torch.cuda.max_memory_allocated() - before <= executable.peak_bytes + slots + workspaces


# --- failures --------------------------------------------------------------------------------------------------------


class FailsOnce:
    """``Captured`` that runs out of memory at one of its calls."""

    def __init__(self, number):
        self.number, self.calls = number, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.number:
            raise torch.OutOfMemoryError("pretended")
        return captured.Captured(*args, **kwargs)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_out_of_memory_during_trials_never_reaches_the_user(monkeypatch, number):
    """At the capture on one stream; at that of the first candidate; at that of the second."""
    failing = FailsOnce(number)
    monkeypatch.setattr(cuda_graph, "Captured", failing)
    monkeypatch.setattr(choose, "HOPEFUL", 100.0)  # so that there is a second candidate to try
    model, x, expected = towers()
    y, executable = called(ms.compile(model, strict=True), x, times=5)
    networks.assert_close(y, expected, 1e-4)
    assert failing.calls > number
    assert executable.is_captured
    # Without a single candidate nothing else would say why there is one stream.
    assert executable.notes == (["not every plan could be tried: pretended"] if number == 1 else [])
    if number < 3:
        assert executable.num_streams == 1
    torch.randn(3, device="cuda")  # the generator works on


class Forbidden:
    """A run of a plan on several streams that ends with what no capture allows."""

    def __init__(self, run):
        self.run, self.events = run, run.events

    def __call__(self, inputs):
        outputs = self.run(inputs)
        torch.cuda.synchronize()
        return outputs


def forbid_streams(monkeypatch):
    """Let every capture of a plan on several streams fail when it is nearly through."""
    compile_plan = captured.compile_plan

    def forbidding(program, plan, *args, **kwargs):
        run = compile_plan(program, plan, *args, **kwargs)
        return Forbidden(run) if plan.num_streams > 1 else run

    monkeypatch.setattr(captured, "compile_plan", forbidding)


def assert_allocator_gives_back():
    """An allocator that takes it that a capture is under way keeps what ``record_stream`` was called for."""
    torch.cuda.synchronize()
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    block.record_stream(torch.cuda.Stream())
    del block
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == active


def test_a_capture_on_streams_that_fails_falls_back(monkeypatch):
    model, x, expected = towers()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        forbid_streams(patch)
        warnings.simplefilter("ignore", ms.FallbackWarning)
        y, _ = called(ms.compile(model, streams=4, memory=100.0), x, times=5)
        networks.assert_close(y, expected, 1e-4)
    # The streams of the failed capture, the allocator and the random generator serve others as before.
    assert_allocator_gives_back()
    for engine in ("streams", "graph"):
        torch._dynamo.reset()
        again, executable = called(ms.compile(model, engine=engine, streams=4, memory=100.0, strict=True), x)
        assert torch.equal(again, y)
        assert executable.num_streams > 1
    torch.randn(3, device="cuda")


@pytest.mark.parametrize("streams", [1, 4])
def test_slots_are_given_back_behind_the_last_stream_that_used_them(streams, monkeypatch):
    """A replay that is still to come writes there; until then nobody else may."""
    monkeypatch.setattr(in_place, "FORCED", False)
    model, x, _ = towers(batch=1024)
    compiled = ms.compile(model, streams=streams, memory=100.0, strict=True)
    called(compiled, x)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        compiled(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        compiled(x)
    del compiled
    torch._dynamo.reset()
    gc.collect()
    others = [torch.full_like(x, 7) for _ in range(50)]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)


def test_a_capture_on_streams_that_fails_in_a_trial_costs_only_the_trial(monkeypatch):
    forbid_streams(monkeypatch)
    model, x, expected = towers()
    y, executable = called(ms.compile(model, strict=True), x)
    networks.assert_close(y, expected, 1e-4)
    assert executable.is_captured
    assert executable.num_streams == 1
