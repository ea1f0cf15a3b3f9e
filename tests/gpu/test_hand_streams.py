"""Streams by hand on a real device: the bits of one stream, whatever is written."""

import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import millstream as ms
from millstream.errors import StreamError
from millstream.manual.ordering import Ordering
from millstream.manual.scope import SerialScope
from tests.manual.programs import NUM_INPUTS, make_program, run_program

pytestmark = pytest.mark.gpu

NUM_STREAMS = 8
NUM_PROGRAMS = int(os.environ.get("MILLSTREAM_STRESS_PROGRAMS", "1000"))
ROOT = Path(__file__).parents[2]


def make_inputs(seed, size=8):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.rand(size, size, device="cuda", generator=generator) for _ in range(NUM_INPUTS)]


def delays(seed):
    """Now and then something long before a step, on whatever stream is current, so that others get ahead."""
    rng = random.Random(seed)
    return lambda position: torch.cuda._sleep(2_000_000) if rng.random() < 0.03 else None  # a millisecond


def run_both(steps, seed, size=8, num_streams=NUM_STREAMS):
    """On one stream, and on several with delays."""
    with torch.no_grad():
        expected = run_program(steps, make_inputs(seed, size), SerialScope, num_streams, size=size)
        left = run_program(steps, make_inputs(seed, size), ms.streams, num_streams, delays(seed), size=size)
    return expected, left


def agree(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_thousand_random_programs_give_the_bits_of_one_stream():
    wrong = [seed for seed in range(NUM_PROGRAMS) if not agree(*run_both(make_program(seed, 200, NUM_STREAMS), seed))]
    assert wrong == []


def test_programs_under_memory_pressure():
    total = torch.cuda.get_device_properties(0).total_memory
    for seed in range(5):
        steps, size = make_program(seed, 200, NUM_STREAMS), 1024
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            expected = run_program(steps, make_inputs(seed, size), SerialScope, NUM_STREAMS, size=size)
            needed = torch.cuda.max_memory_allocated() - before
            expected = [tensor.cpu() for tensor in expected]
            torch.cuda.empty_cache()
            # A quarter more than one stream needs, and what the allocator takes at least for each of its pools.
            room = torch.cuda.memory_reserved() + 1.25 * needed + (NUM_STREAMS + 8) * (20 << 20)
            torch.cuda.set_per_process_memory_fraction(room / total)
            try:
                left = run_program(steps, make_inputs(seed, size), ms.streams, NUM_STREAMS, delays(seed), size=size)
                left = [tensor.cpu() for tensor in left]
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
        assert agree(expected, left), seed


class Dropped:
    """Leaves out one wait that is asked for, and has what it waited for run late."""

    def __init__(self, monkeypatch, which):
        self.count, self.producers = 0, []
        wait = Ordering._wait

        def drop(ordering, event, stream, steps):
            wait(ordering, event, stream, steps)
            if event % 2 == 0:  # a tail
                self.producers.append(ordering._marks[event].stream)
                if self.count == which:
                    steps.pop()
                self.count += 1

        monkeypatch.setattr(Ordering, "_wait", drop)


def test_every_wait_is_needed(monkeypatch):
    seed, num_streams = 1, 4
    steps = [step for step in make_program(seed, 60, num_streams, flat=True) if step[0] != "free"]  # all is looked at
    with monkeypatch.context() as patch, torch.no_grad():
        counted = Dropped(patch, None)
        run_program(steps, make_inputs(seed), ms.streams, num_streams)
    handles = {}

    def late(producer, cycles):
        """Before each step the stream that was to be waited for gets something long to do."""

        def before(position):
            with handles["scope"][producer]:
                torch.cuda._sleep(cycles)

        return before

    def open_scope(n):
        handles["scope"] = ms.streams(n)
        return handles["scope"]

    def is_right_without(which, cycles):
        salt = seed + 100 + which  # other numbers each time: what is left in memory is wrong
        with torch.no_grad():
            expected = run_program(steps, make_inputs(salt), SerialScope, num_streams)
            with monkeypatch.context() as patch:
                Dropped(patch, which)
                before = late(counted.producers[which], cycles)
                left = run_program(steps, make_inputs(salt), open_scope, num_streams, before)
        is_right = agree(expected, left)
        torch.cuda.synchronize()
        return is_right

    # Half a millisecond is longer than an idle host takes for a step; a busy one gets ten.
    missed = [
        which
        for which in range(counted.count)
        if all(is_right_without(which, cycles) for cycles in (1_000_000, 20_000_000))
    ]
    assert counted.count > 10
    assert missed == []


def test_what_is_held_is_needed(monkeypatch):
    from millstream.manual.issuing import Issuer

    def run():
        a = torch.rand(512, 512, device="cuda")
        with torch.no_grad(), ms.streams(3) as s:
            made = s[1].mul(a, 2.0)
            with s[2]:
                torch.cuda._sleep(5_000_000)
            kept = s[2].add(made, 1.0)
            del made
            for _ in range(20):
                s[1].mul(a, 7.0)
        return torch.equal(kept, a * 2 + 1)

    assert run()
    monkeypatch.setattr(Issuer, "protect", lambda *args: None)
    assert not run()


def test_sanitizer_finds_nothing():
    code = """
import torch
from tests.gpu.test_hand_streams import make_inputs, make_program, run_program
import millstream as ms
with torch.no_grad():
    for seed in range(5):
        run_program(make_program(seed, 100, 4), make_inputs(seed), ms.streams, 4)
    torch.cuda.synchronize()
    print("clean")
    from millstream.manual.ordering import Ordering
    wait = Ordering._wait
    def drop(ordering, event, stream, steps):
        wait(ordering, event, stream, steps)
        if event % 2 == 0:  # a tail
            steps.pop()
    Ordering._wait = drop
    try:
        run_program(make_program(0, 100, 4), make_inputs(0), ms.streams, 4)
    except Exception as error:
        print(type(error).__name__)
"""
    env = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["clean", "CUDASanitizerErrors"], done.stderr[-3000:]


def test_a_captured_program_gives_the_bits_of_one_stream():
    for seed in range(20):
        steps = make_program(seed, 100, NUM_STREAMS)
        inputs = make_inputs(seed)
        start = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            expected = run_program(steps, [tensor.clone() for tensor in start], SerialScope, NUM_STREAMS)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                left = run_program(steps, inputs, ms.streams, NUM_STREAMS)
            for _ in range(3):
                for tensor, value in zip(inputs, start, strict=True):
                    tensor.copy_(value)
                graph.replay()
        assert agree(expected, left), seed


class Towers(nn.Module):
    def __init__(self, num_streams):
        super().__init__()
        self.num_streams = num_streams
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)
        )

    def forward(self, x):
        shared = torch.tanh(x)
        left, right, *rest = ms.manual.parallel(self.towers, shared, num_streams=self.num_streams)
        return (left * right + sum(rest)).square().mean()


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_are_those_of_one_stream(captured):
    results = []
    for num_streams in (1, 4):
        torch.manual_seed(0)
        model = Towers(num_streams).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(32, 64, device="cuda")

        def step(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad(set_to_none=True)
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            for _ in range(20):
                graph.replay()
                losses.append(loss.clone())
        else:
            losses += [step() for _ in range(20)]
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert agree(*results)


def random_convolution(seed):
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 1, 2, 4])
    fan_in, fan_out = (groups * rng.choice([2, 3, 8]) for _ in range(2))
    options = {"stride": rng.choice([1, 2]), "padding": rng.choice([0, 1, 2]), "dilation": rng.choice([1, 1, 2])}
    kind = rng.choice([nn.Conv1d, nn.Conv2d, nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
    dims = {nn.Conv1d: 1, nn.Conv3d: 3}.get(kind, 2)
    layer = kind(fan_in, fan_out, rng.choice([1, 3, 5]), groups=groups, bias=rng.random() < 0.5, **options)
    return layer, (rng.choice([1, 4]), fan_in, *(rng.choice([12, 17]) for _ in range(dims)))


def output_and_gradients(layer, x):
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out.sum() + out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_convolutions_have_the_gradients_of_one_stream(dtype, engine, exact):
    for seed in range(20):
        torch.manual_seed(seed)
        layer, shape = random_convolution(seed)
        layer = layer.to("cuda", dtype)
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        sides = []
        for dual in (False, True):
            ms.manual.dual_stream_backward(layer, enabled=dual)
            results = output_and_gradients(layer, x)
            if engine == "graph":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    results = output_and_gradients(layer, x)
                graph.replay()
            sides.append(results)
        assert agree(*sides), (seed, layer)


def test_dual_backward_with_autocast_and_linear_layers_is_exact(exact):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    model = model.cuda()
    x = torch.randn(4, 3, 8, 8, device="cuda")
    sides = []
    for dual in (False, True):
        ms.manual.dual_stream_backward(model, enabled=dual)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), torch.arange(4, device="cuda"))
        sides.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert agree(*sides)


def test_threads_do_not_disturb_each_other():
    errors, barrier = [], threading.Barrier(8)

    def work(number):
        torch.cuda.set_device(0)
        a = torch.full((64, 64), float(number + 1), device="cuda")
        barrier.wait()
        for turn in range(100):
            with torch.no_grad(), ms.streams(4) as s:
                parts = s.run([partial(torch.mul, a, float(k + turn)) for k in range(4)])
                total = s[2].add(parts[0], parts[1]) + s[3].add(parts[2], parts[3])
            expected = (number + 1.0) * (4 * turn + 6)
            if not bool((total == expected).all()):
                errors.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_an_exception_in_a_branch_joins_the_others():
    a = torch.ones(256, 256, device="cuda")
    out = torch.zeros(256, 256, device="cuda")
    torch.cuda.synchronize()

    def slow():
        torch.cuda._sleep(10_000_000)
        out.add_(a)

    def fails():
        raise KeyError("no such gate")

    before = torch.cuda.current_stream()
    with pytest.raises(KeyError, match="no such gate") as caught, ms.streams(3) as s:
        s.run([lambda: None, slow, fails])
    assert torch.cuda.current_stream() == before
    assert torch.equal(out.clone(), a)  # the caller's stream comes after the branch
    assert caught.traceback[-1].name == "fails"


def test_foreign_streams_are_reported():
    foreign = torch.cuda.Stream()
    a = torch.ones(8, 8, device="cuda")
    torch.cuda.synchronize()

    def use(ordered):
        with ms.streams(2, check=True) as s:
            made = s[1].mul(a, 2.0)
            if ordered:
                foreign.wait_stream(s[1].stream)
            with torch.cuda.stream(foreign):
                made.add(1.0)

    with pytest.raises(StreamError, match="not ordered") as caught:
        use(ordered=False)
    assert str(caught.value).count("test_hand_streams.py") >= 2
    use(ordered=True)
    torch.cuda.synchronize()


def test_scope_of_before_a_capture_cannot_be_used_in_it():
    a = torch.ones(8, 8, device="cuda")
    with torch.no_grad(), ms.streams(2) as s:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            b = a + 1
            with pytest.raises(StreamError, match="within it"), s[1]:
                pass
            with pytest.raises(StreamError, match="within it"):
                s[1].mul(b, 2.0)


def test_compiled_functions_wait_for_their_arguments():
    compiled = ms.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda().eval())
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            expected = compiled(x * 2)
        with ms.streams(3) as s:
            with s[1]:
                torch.cuda._sleep(2_000_000)
            doubled = s[1].mul(x, 2.0)
            result = s[2](compiled, doubled)
    assert torch.equal(result, expected)


def test_tensor_that_is_freed_in_a_branch_is_told():
    a = torch.ones(1000, device="cuda")
    with torch.no_grad(), ms.streams(3) as s:
        b = s[1].add(a, 1.0)
        s[2].add(b, 1.0)
        b.untyped_storage().resize_(0)
        with pytest.raises(StreamError, match="freed"):
            s.wait(b)
        del b
    torch.cuda.synchronize()


def test_tensor_of_another_device_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with ms.streams(2, "cuda:0") as s, pytest.raises(StreamError, match="cuda:1"):
        s[1].add(torch.ones(1, device="cuda:1"), 1.0)
