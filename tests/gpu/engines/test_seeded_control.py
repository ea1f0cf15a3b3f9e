"""Random numbers in branches and loops of one CUDA graph: from a seed, as often as the device decides."""

import pytest
import torch

import millstream as ms
from millstream.api import executables
from tests.api import test_seeded_control as on_cpu

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def assert_one_graph(compiled):
    assert {each.name for each in executables(compiled)} == {"graph"}
    assert all(each.is_captured for each in executables(compiled))


@pytest.mark.parametrize("name", on_cpu.GRADED)
def test_gradients_are_those_of_what_was_drawn(name):
    found = [on_cpu.runs_of(on_cpu.GRADED[name], "cuda", engine=engine) for engine in ("graph", "serial", "streams")]
    on_cpu.check_dropped(found[0])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert all(map(torch.equal, ours, theirs))


@torch.no_grad()
def test_turns_draw_numbers_of_their_own_in_one_graph():
    found = []
    for engine in ("graph", "serial"):
        step = ms.step(on_cpu.noisy, engine=engine, strict=True)
        compiled = ms.compile(on_cpu.noisy, engine=engine, strict=True)
        for _ in range(3):
            step(torch.ones(256, device="cuda"))
            compiled(torch.ones(256, device="cuda"))
        found += [on_cpu.check_noisy(step, "cuda"), on_cpu.check_noisy(compiled, "cuda")]
        if engine == "graph":
            assert_one_graph(step)
            assert_one_graph(compiled)
    for one in found[1:]:
        for ours, theirs in zip(one, found[0], strict=True):
            assert all(map(torch.equal, ours, theirs))


@torch.no_grad()
@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_samples_are_drawn_until_an_end_token_in_one_graph(wrap):
    call = wrap(on_cpu.sampled, strict=True)
    for _ in range(6):
        on_cpu.check_sampled(call, "cuda")
    assert_one_graph(call)
