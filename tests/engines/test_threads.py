"""Plans on threads: the bits of the serial engine, errors, callers at the same time, and when threads are chosen."""

import copy
import ctypes
import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import millstream as ms
from millstream import _native
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Costs, KernelCost, roofline
from millstream.engine.arena import bind_arena
from millstream.engine.cpu import cpu_choice, threads_native
from millstream.engine.cpu.threads_native import compile_threads
from millstream.engine.cpu.worker_pool import intra_op_threads, worker_pool
from millstream.errors import ArgumentError
from millstream.graph import CHOSEN
from millstream.lower.inductor.generated_kernels import NativeKernel, for_threads
from millstream.schedule import assign_offsets, plan_graph
from millstream.schedule.choose import Rules
from tests import networks
from tests.clocks import HANG_S
from tests.engines.test_step import OPTIMIZERS, assert_trained_alike, train
from tests.networks import lowered

pytestmark = pytest.mark.usefixtures("lowered_once")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Waits cost nothing here, so that plans of tiny networks use what streams they may."""
    torch._dynamo.reset()
    monkeypatch.setattr(roofline, "CPU", dataclasses.replace(roofline.CPU, wait_ns=0))
    num_threads, num_before = torch.get_num_threads(), len(_workers())
    yield
    assert torch.get_num_threads() == num_threads
    assert len(_workers()) <= max(num_before, 7)
    torch.set_num_threads(num_threads)


def _workers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("millstream-stream")}


@pytest.fixture
def scalar_loops():
    """Kernels without vectors: Inductor writes them in half the time, and here it is about where they run."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


def settled(compiled, *inputs):
    """Call often enough that the engine has its plan; return the last result."""
    for _ in range(4):
        result = compiled(*inputs)
    return result


def is_the_same(ours, theirs):
    ours, theirs = (torch.utils._pytree.tree_leaves(tree) for tree in (ours, theirs))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", networks.ALL)
@torch.no_grad()
def test_inference_gives_the_bits_of_the_serial_engine(kind):
    model = kind().eval()
    serial = ms.compile(model, engine="serial", strict=True)
    batches = [networks.example(kind)[0] for _ in range(6)]
    expected = [serial(x) for x in batches]
    networks.assert_close(expected, [model(x) for x in batches])
    torch._dynamo.reset()
    threads = ms.compile(model, engine="threads", streams=2, strict=True)
    results = [threads(x) for x in batches]
    assert is_the_same(results, expected)
    (executable,) = executables(threads)
    assert executable.name == "threads"
    if kind in (networks.Inception, networks.Lstm):
        assert executable.num_streams == 2
        assert executable.candidates[1].outcome == CHOSEN


@pytest.mark.parametrize("kind", networks.ALL)
def test_training_steps_give_the_bits_of_the_serial_engine(kind):
    runs = []
    for engine in ("serial", "threads"):
        torch.manual_seed(5)
        torch._dynamo.reset()
        captured, sides, losses = train(kind, OPTIMIZERS["momentum"], 6, engine=engine)
        assert_trained_alike(sides, losses)
        assert not captured.fallbacks
        model, optimizer, _ = sides[0]
        runs.append((losses[0], list(model.state_dict().values()), networks.optimizer_state(optimizer)))
    (executable,) = executables(captured)
    assert (executable.name, executable.num_streams) == ("threads", 2)
    assert is_the_same(*runs)


@pytest.mark.usefixtures("scalar_loops")
def test_forward_and_backward_of_a_compiled_model():
    model = networks.Inception()
    gradients = []
    for engine in ("serial", "threads"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        compiled = ms.compile(twin, engine=engine, strict=True)
        torch.manual_seed(1)
        for _ in range(5):
            x, y = networks.example(networks.Inception)
            F.cross_entropy(compiled(x), y).backward()
        gradients.append([parameter.grad for parameter in twin.parameters()])
    assert is_the_same(*gradients)


@pytest.mark.parametrize(("policy", "packed"), [("list", False), ("slack", True), ("chains", False), ("chains", True)])
@torch.no_grad()
def test_every_plan_gives_the_same(policy, packed):
    program, inputs, expected = lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    for num_streams in (2, 4):
        plan, run = threaded(program.program, num_streams, policy, packed)
        assert plan.num_streams > 1
        for _ in range(100):
            assert torch.equal(run(list(inputs))[0], expected)


def threaded(program, num_streams=2, policy="list", packed=True, bound=True):
    """A plan with waits of no cost, and the function that runs it on threads."""
    costs = Costs(tuple(KernelCost(1000) for _ in program.graph.kernels))
    plan = plan_graph(program.graph, costs, num_streams, policy, packed=packed)
    layout = plan.layout or assign_offsets(plan)
    check_plan(plan, layout)
    return plan, compile_threads(program, plan, bind_arena(program, layout) if bound else {}, worker_pool(), 1)


@torch.no_grad()
def test_values_that_are_not_bound():
    program, inputs, expected = lowered(networks.Lstm().eval(), networks.example(networks.Lstm)[0])
    _, run = threaded(program.program, bound=False)
    for _ in range(20):
        assert torch.equal(run(list(inputs))[0], expected)


@torch.no_grad()
def test_views_of_inputs_and_offsets():
    def function(x, table):
        rows = [x[i : i + 2].sum(0) * (i + 1) for i in range(4)]
        table[1:].mul_(2)
        return torch.stack(rows), x.t()[1:] + 1, table.sum()

    serial = ms.compile(function, engine="serial", strict=True)
    threads = ms.compile(function, engine="threads", strict=True)
    for _ in range(5):
        x, table = torch.randn(9, 8)[2:, 1:], torch.randn(5, 3)
        ours, theirs = table.clone(), table.clone()
        assert is_the_same(threads(x, ours), serial(x, theirs))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [networks.Inception, networks.Lstm])
@torch.no_grad()
def test_common_kernels_run_without_the_interpreter(monkeypatch, kind):
    given_back = []
    monkeypatch.setattr(threads_native._RegisterValues, "step", lambda _, kernel: given_back.append(kernel) or 1)
    program, inputs, expected = lowered(kind().eval(), networks.example(kind)[0])
    assert torch.equal(threaded(program.program)[1](list(inputs))[0], expected)
    assert not given_back


@torch.no_grad()
def test_an_error_of_an_operator_keeps_its_type_and_names_the_kernel():
    program, inputs, _ = lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    calls = list(program.program.calls)
    names = [kernel.name for kernel in program.program.graph.kernels]
    broken = names.index("aten.convolution.default")
    calls[broken] = dataclasses.replace(calls[broken], kwargs={**calls[broken].kwargs, "stride": [-1, -1]})
    _, run = threaded(dataclasses.replace(program.program, calls=tuple(calls)))
    with pytest.raises(RuntimeError, match="stride") as caught:
        run(list(inputs))
    assert "kernel aten.convolution" in caught.value.__notes__[0]


@torch.no_grad()
def test_an_error_in_a_kernel_reaches_the_caller_and_leaves_the_engine_usable():
    model, (x, _) = networks.Inception().eval(), networks.example(networks.Inception)
    compiled = ms.compile(model, engine="threads", strict=True)
    expected = settled(compiled, x)
    (executable,) = executables(compiled)
    program, plan = executable.lowered.program, executable.plan
    assert plan.num_streams == 2
    workers = _workers()
    for broken in range(len(program.calls)):
        call = program.calls[broken]

        def fail(*_, **__):
            raise ValueError("the kernel is broken")

        calls = tuple(dataclasses.replace(call, target=fail) if i == broken else c for i, c in enumerate(program.calls))
        executable.lowered = dataclasses.replace(executable.lowered, program=dataclasses.replace(program, calls=calls))
        executable.release()
        with pytest.raises(ValueError, match="the kernel is broken") as caught:
            compiled(x)
        assert caught.traceback[-2].name == "step"
        executable.lowered = dataclasses.replace(executable.lowered, program=program)
        assert torch.equal(compiled(x), expected)
    assert _workers() == workers


@torch.no_grad()
def test_a_signal_that_arrives_as_a_step_in_python_begins_reaches_the_caller(monkeypatch):
    """The interpreter raises it in front of the step's first line, where no code of the library can catch it."""

    def interrupted(values, kernel):
        raise KeyboardInterrupt

    program, inputs, _ = lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    calls = tuple(dataclasses.replace(call, target=lambda *_, **__: None) for call in program.program.calls)
    monkeypatch.setattr(threads_native._RegisterValues, "step", interrupted)
    _, run = threaded(dataclasses.replace(program.program, calls=calls))
    with pytest.raises(KeyboardInterrupt):
        run(list(inputs))


@pytest.fixture
def raising():
    """An operator implemented in Python, and what it raises, if that is set."""
    library, error = torch.library.Library("millstream_threads", "DEF"), []

    def implementation(x):
        if error:
            raise error[0]
        return x * 2

    library.define("raising(Tensor x) -> Tensor")
    library.impl("raising", implementation, "CPU")
    library.impl("raising", torch.empty_like, "Meta")
    yield torch.ops.millstream_threads.raising, error
    library._destroy()


@torch.no_grad()
def test_what_an_operator_in_python_raises_keeps_its_type(raising):
    operator, error = raising
    model, (x, _) = networks.Inception().eval(), networks.example(networks.Inception)
    compiled = ms.compile(lambda x: (operator(model(x)), operator(x)), engine="threads", streams=2, strict=True)
    expected = settled(compiled, x)
    assert executables(compiled)[0].num_streams == 2
    for kind in (ValueError, KeyboardInterrupt, SystemExit, torch.linalg.LinAlgError):
        error[:] = [kind("as it was raised")]
        with pytest.raises(kind, match="as it was raised"):
            compiled(x)
        error.clear()
        assert is_the_same(compiled(x), expected)


@torch.no_grad()
def test_a_kernel_that_checks_its_indices_raises():
    table = torch.randn(5, 8)

    def function(i, x):
        return F.embedding(i, table).sum(0), x @ x

    compiled = ms.compile(function, engine="threads", strict=True)
    good, x = torch.tensor([1, 4]), torch.randn(4, 4)
    expected = settled(compiled, good, x)
    with pytest.raises(IndexError, match="a dimension has 5 elements"):
        compiled(torch.tensor([1, 7]), x)
    assert is_the_same(compiled(good, x), expected)


@torch.no_grad()
def test_several_callers_at_the_same_time():
    cases = []
    for kind in (networks.Inception, networks.Lstm):
        x, _ = networks.example(kind)
        compiled = ms.compile(kind().eval(), engine="threads", strict=True)
        cases.append((compiled, x, settled(compiled, x)))
    (engine,) = executables(cases[0][0])
    errors = []

    def call(number):
        with torch.no_grad():
            for i in range(60):
                compiled, x, expected = cases[(i + number) % 2]
                if not torch.equal(compiled(x), expected):
                    errors.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(HANG_S)
    assert not errors
    with worker_pool().busy:  # as from inside of a kernel: nobody waits for anybody
        assert torch.equal(cases[0][0](cases[0][1]), cases[0][2])
    assert engine.plan.num_streams == 2


@torch.no_grad()
def test_hundreds_of_quick_calls_hold_nothing():
    program, inputs, expected = lowered(networks.Lstm().eval(), networks.example(networks.Lstm)[0])
    _, run = threaded(program.program, 4)
    for _ in range(500):
        result = run(list(inputs))[0]
    assert torch.equal(result, expected)
    held = sys.getrefcount(inputs[0])
    run(list(inputs))
    held_now = sys.getrefcount(inputs[0])
    assert held_now == held


@torch.no_grad()
def test_inference_mode_and_no_gradients_on_every_thread():
    model, (x, _) = networks.Inception().eval(), networks.example(networks.Inception)
    compiled = ms.compile(model, engine="threads", strict=True)
    expected = compiled(x)
    for _ in range(4):
        with torch.inference_mode():
            assert torch.equal(compiled(x), expected)


@torch.no_grad()
def test_intra_op_threads_are_divided():
    program, inputs, _ = lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    seen = set()

    def noting(call):
        def target(*args, **kwargs):
            seen.add((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
            return call.target(*args, **kwargs)

        return dataclasses.replace(call, target=target)

    noted = dataclasses.replace(program.program, calls=tuple(map(noting, program.program.calls)))
    with intra_op_threads(3):
        threaded(noted)[1](list(inputs))
    assert seen == {("MainThread", 3, False), ("millstream-stream-1", 1, False)}


def test_all_threads_flush_numbers_that_are_almost_zero_if_the_caller_does():
    function, x = lambda x, y: (x.cumsum(0).cumsum(0), y.cumsum(0).cumsum(0)), torch.full((4, 4), 1e-39)
    compiled = ms.compile(function, engine="threads", streams=2, strict=True)
    assert all(part.all() for part in settled(compiled, x, x.clone()))
    assert executables(compiled)[0].num_streams == 2
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert not any(part.any() for part in compiled(x, x.clone()))
    finally:
        torch.set_flush_denormal(False)


def test_numbers_of_threads_are_those_of_one_thread():
    torch_cpu = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
    functions = [getattr(torch_cpu, f"mkl_serv_get_{name}", None) for name in ("max_threads", "dynamic")]

    def numbers():
        return torch.get_num_threads(), *(function and function() for function in functions)

    with intra_op_threads(3):
        elsewhere = []
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert elsewhere != [3]
    if functions[1]:
        torch_cpu.MKL_Set_Dynamic(1)  # as before anybody calls torch.set_num_threads
    before = numbers()
    with intra_op_threads(3):
        assert numbers() == (3, functions[0] and 3, before[2])
    assert numbers() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@torch.no_grad()
def test_a_forked_child_has_workers_of_its_own():
    program, inputs, expected = lowered(networks.Lstm().eval(), networks.example(networks.Lstm)[0])
    threaded(program.program)[1](list(inputs))
    parents = worker_pool()
    child = os.fork()
    if child == 0:
        right = worker_pool() is not parents and torch.equal(threaded(program.program)[1](list(inputs))[0], expected)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@torch.no_grad()
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent():
    model, (x, _) = networks.Mlp().eval(), networks.example(networks.Mlp)
    compiled = ms.compile(model, engine="serial", strict=True)
    expected = compiled(x)
    (executable,) = executables(compiled)
    with executable.arena.lock:  # as in the middle of a call by another thread
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if torch.equal(compiled(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(compiled(x), expected)


def test_why_there_are_no_threads_is_told(monkeypatch):
    module = sys.modules["millstream.engine.assembly"]  # the package gives its name to the function
    monkeypatch.setattr(module, "find_library", lambda: None)
    monkeypatch.setattr(_native, "why_not", lambda name: "nothing can be kept in the cache folder /full")
    compiled = ms.compile(networks.Mlp().eval(), engine="threads")
    with pytest.warns(ms.FallbackWarning, match="serial engine: nothing can be kept in the cache folder /full"):
        compiled(networks.example(networks.Mlp)[0])


def test_the_environment_asks_for_threads(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_ENGINE", "threads")
    compiled = ms.compile(networks.Mlp().eval(), strict=True)
    compiled(networks.example(networks.Mlp)[0])
    assert executables(compiled)[0].name == "threads"
    monkeypatch.setenv("MILLSTREAM_ENGINE", "thread")
    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=r"'thread'.*threads"):
        ms.compile(networks.Mlp().eval(), strict=True)(networks.example(networks.Mlp)[0])


class Draws(torch.nn.Module):
    """Changes its input and a buffer, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        x.mul_(2)
        return torch.cat([F.dropout(x @ x.t(), 0.5), x @ x.t().relu()]) + self.count


@pytest.mark.parametrize("is_faster", [True, False])
@torch.no_grad()
def test_auto_tries_without_a_trace_and_keeps_the_faster(monkeypatch, is_faster):
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(cpu_choice, "ON_CPU", Rules(-1e9, -1e9, margin=-1e9 if is_faster else 1.0))
        for kind in (networks.Inception, Draws):
            results = []
            for engine in ("serial", None):
                torch._dynamo.reset()
                torch.manual_seed(3)
                model = kind().eval()
                compiled = ms.compile(model, engine=engine, strict=True)
                inputs = [torch.randn(getattr(kind, "example", (6, 6))) for _ in range(6)]
                results.append([[compiled(x) for x in inputs], inputs, list(model.buffers()), torch.rand(2)])
            assert is_the_same(*results)
            (executable,) = executables(compiled)
            outcomes = [candidate.outcome for candidate in executable.candidates]
            tried = outcomes[1] != "rounds otherwise"
            assert tried or kind is networks.Inception  # whose mean is summed in parts, one for each thread
            if tried:
                assert outcomes == (["slower", CHOSEN] if is_faster else [CHOSEN, "slower"])
                assert executable.name == ("threads" if is_faster else "serial")
    finally:
        torch.set_num_threads(1)


@torch.no_grad()
def test_auto_leaves_chains_alone():
    torch.set_num_threads(2)
    try:
        compiled = ms.compile(networks.Mlp().eval(), strict=True)
        x, _ = networks.example(networks.Mlp)
        for _ in range(4):
            compiled(x)
        (executable,) = executables(compiled)
        assert executable.name == "serial"
        assert executable._run is None
        assert not executable.candidates
    finally:
        torch.set_num_threads(1)


def test_loops_take_the_threads_that_they_find():
    loop = "#pragma omp parallel num_threads(4)\n    {\n        int tid = omp_get_thread_num();\n"
    template = "#pragma omp parallel num_threads(4)\n{\n const int tid = omp_get_thread_num();"
    noted = "    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);\n"
    assert "num_threads(std::min(4, omp_get_max_threads()))" in for_threads(loop)
    assert for_threads(template) == template
    # As many as there are processors are not written down, though there is room for no more.
    plain = loop.replace(" num_threads(4)", "")
    assert f"num_threads(std::min({torch.get_num_threads()}, omp_get_max_threads()))" in for_threads(plain)
    assert for_threads(loop + noted) == for_threads(loop)
    assert for_threads("floor_divide_integral(a, b);\n" + noted).endswith(noted)


def test_kernels_of_this_pytorch_can_be_called_without_the_gil():
    program, _, _ = lowered(networks.Inception().eval(), networks.example(networks.Inception)[0])
    kernels = [call.target for call in program.program.calls if isinstance(call.target, NativeKernel)]
    assert kernels
    assert all(kernel.entry for kernel in kernels)
