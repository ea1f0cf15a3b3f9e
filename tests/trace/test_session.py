"""What a profile leaves behind, and what it changes: nothing."""

import gc
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset, dataloader
from torch.utils.data._utils import fetch

import millstream as ms
from millstream.errors import ArgumentError
from millstream.insight import Cause
from millstream.insight.host import spans_of
from millstream.trace import ProfiledRun, frames
from millstream.trace.log import Log
from millstream.trace.sampler import MAX_THREADS, Look, Sampler, ThreadLook, cpu_ns_of_threads


def look():
    return (
        vars(dataloader._BaseDataLoaderIter)["__next__"],
        vars(fetch._MapDatasetFetcher)["fetch"],
        torch.save,
        list(gc.callbacks),
        dict(optimizer._global_optimizer_post_hooks),
        threading.active_count(),
        sys.getswitchinterval(),
        vars(torch.Tensor).get("tolist"),
    )


def train():
    model = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    for (x,) in DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True):
        model(x).sum().backward()
        sgd.step()
    return model.weight.detach().clone()


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


@pytest.mark.parametrize("watch", [ms.profile, ms.trace_syncs])
def test_nothing_is_left_behind_and_no_random_number_is_drawn(watch):
    seed()
    plain, states = train(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    before = look()
    seed()
    with watch():
        watched = train()
    assert look() == before
    assert torch.equal(plain, watched)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_error_within_is_raised_and_what_was_seen_is_kept():
    def fail():
        train()
        raise ZeroDivisionError

    before = look()
    run = ms.profile()
    with pytest.raises(ZeroDivisionError), run:
        fail()
    assert look() == before
    assert len(run.findings.recording.steps) == 5


def test_patch_of_somebody_else_made_meanwhile_stays():
    before = torch.save

    def save(*arguments):
        return before(*arguments)

    try:
        with ms.profile():
            torch.save = save
        assert torch.save is save
    finally:
        torch.save = before


def test_profile_within_a_profile_reports_its_own_time():
    before = look()
    with ms.profile() as outer:
        train()
        with ms.profile() as inner:
            train()
        between = look()
        train()
    assert look() == before != between
    outer, inner = outer.findings.recording, inner.findings.recording
    assert (len(outer.steps), len(inner.steps)) == (17, 5)
    assert outer.steps[6:11] == inner.steps
    assert all(inner.start_ns <= each.end_ns <= inner.end_ns for each in (*inner.spans, *inner.samples))
    assert [loader.num_batches for loader in (*outer.loaders, *inner.loaders)] == [18, 6]


def test_profiles_of_two_threads_may_overlap():
    before = look()
    first, second = ms.profile(), ms.profile()
    with first:
        second.__enter__()
    train()
    second.__exit__(None, None, None)
    assert look() == before
    assert not first.findings.recording.has_steps
    assert len(second.findings.recording.steps) == 5


def test_profile_is_read_after_it_is_over(tmp_path):
    with ms.profile() as run, pytest.raises(ArgumentError, match="not over"):
        str(run)
    with pytest.raises(ArgumentError, match="must end with"):
        run.save(tmp_path / "run.pdf")
    with pytest.raises(ArgumentError, match="must end with"):
        ms.profile(save="run.txt")


def test_decorated_function_returns_its_result_and_is_reported(capsys):
    @ms.profile
    def work(steps):
        for _ in range(steps):
            train()
        return steps

    assert work(2) == 2
    assert "CPU, 9 steps," in capsys.readouterr().err


def test_saved_profile_is_written_when_it_is_over(tmp_path):
    with ms.profile(save=tmp_path / "run.html"):
        train()
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_started_for_each_pass_are_told_of(persistent):
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, num_workers=1, persistent_workers=persistent)
    with ms.profile() as run:
        for _ in range(3):
            for _ in loader:
                pass
    starts = [span for span in run.findings.recording.spans if span.cause is Cause.PASS]
    # Each pass starts workers and waits until they make its first batch, and ends.
    assert len(starts) == (5 if persistent else 9)
    assert run.findings.recording.user_site(starts[0].stack).file == __file__
    waits = [span for span in run.findings.recording.spans if span.cause is Cause.DATA_WAIT]
    assert len(waits) == 12
    began = {span.end_ns for span in starts}
    firsts = [span.end_ns - span.start_ns for span in waits if span.start_ns in began]
    assert len(firsts) == (1 if persistent else 3)
    assert 0 < max(firsts) <= run.findings.recording.loaders[0].batch_ns
    del loader


def test_steps_that_the_user_tells_of_count_alone():
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with ms.profile() as outer, ms.profile() as run:
        for _ in range(5):
            sgd.step()
            sgd.step()
            run.step()
    assert len(run.findings.recording.steps) == len(outer.findings.recording.steps) == 4


def test_processes_that_do_the_work_are_told_of():
    with ms.profile() as run:
        subprocess.run([sys.executable, "-S", "-c", "sum(range(10_000_000))"], check=True)
    assert run.findings.why_unreliable.startswith("processes that this one started ran for ")


def test_gpu_that_is_not_used_is_not_touched(monkeypatch):
    # A script may set CUDA_VISIBLE_DEVICES, or fork processes that use the GPU, as long as nobody has initialized CUDA.
    monkeypatch.setattr("millstream.trace.profiled_run.has_gpu", lambda: True)
    monkeypatch.setattr("millstream.trace.watchers.has_gpu", lambda: True)
    for name in ("_lazy_init", "synchronize", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was called"))
    before = look()
    with ms.profile() as run:
        for _ in range(8):
            train()
    assert look() == before
    assert run.findings.recording.is_synchronous
    assert run.findings.recording.device == "CPU"


def test_thread_that_works_is_looked_at_where_nothing_steps():
    def work():
        end = time.thread_time() + 0.3  # a busy machine looks rarely
        while time.thread_time() < end:
            sum(range(1000))

    with ms.profile() as run:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert run.findings.recording.thread == thread.ident


@pytest.mark.parametrize(("num_first", "expected"), [(2, {0: 30, 1: 10, 99: 70}), (MAX_THREADS, {0: 30, 1: 10, 99: 0})])
def test_a_thread_that_begins_within_a_profile_counts_from_its_start(num_first, expected):
    """Where the first look had no room for all threads, one that is missing in it may have run before."""

    def look(at_ns, **cpu_ns):
        threads = [ThreadLook(int(name[1:]), (), ran_ns, -1, None) for name, ran_ns in cpu_ns.items()]
        return Look(at_ns, 0, (), 0, tuple(threads))

    first = {f"t{ident}": 100 for ident in range(num_first)}
    found = cpu_ns_of_threads([look(0, **first), look(1, t0=130, t1=110, t99=70)])
    assert {ident: found[ident] for ident in expected} == expected
    assert cpu_ns_of_threads([]) == {}


def test_two_optimizers_that_take_turns_make_one_step():
    one, other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    with ms.profile() as run:
        for _ in range(10):
            one.step()
            other.step()
    assert len(run.findings.recording.steps) == 9


def test_loop_without_optimizer_is_counted_by_batches():
    with ms.profile() as run:
        for _ in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4):
            pass
    assert len(run.findings.recording.steps) == 9
    assert any("no optimizer" in caveat for caveat in run.findings.recording.caveats)


@pytest.fixture
def collects_when_asked():
    """Python's collector runs where a test calls it, and nowhere else."""
    gc.disable()
    yield
    gc.enable()


class Compiler:
    def compile(self):
        gc.collect()
        return 7


def test_collection_while_a_step_is_captured_is_compiling(collects_when_asked):
    before = Compiler.compile
    session = ProfiledRun(compilers=((Compiler, "compile"),), uses_device=False)
    session.start()
    assert Compiler().compile() == 7
    recording = session.stop()
    assert Compiler.compile is before
    spans = {span.cause: span for span in recording.spans}
    outer, inner = spans[Cause.COMPILE], spans[Cause.GC]
    assert outer.start_ns <= inner.start_ns < inner.end_ns <= outer.end_ns
    assert {span.cause for _, _, span in spans_of(recording)} == {Cause.COMPILE}
    assert 0 < recording.always_on_share < 1


def test_collection_knows_what_garbage_took():
    session = ProfiledRun(uses_device=False)
    gc.collect()
    session.start()
    for _ in range(1000):
        cycle = []
        cycle.append(cycle)
    del cycle
    gc.collect()
    spans = [span for span in session.stop().spans if span.cause is Cause.GC]
    assert sum(span.stays_ns for span in spans) > 0
    assert all(0 <= span.stays_ns <= span.end_ns - span.start_ns for span in spans)


def test_event_of_another_thread_that_comes_late_does_no_harm(monkeypatch):
    session = ProfiledRun(uses_device=False)
    session.start()
    gc.collect()
    gc.collect()
    log = session._watch.log
    original = frames.sites_of

    def sites_of(stack):
        log.add_span(0, Cause.GC)
        return original(stack)

    monkeypatch.setattr(frames, "sites_of", sites_of)
    recording = session.stop()
    assert sum(span.cause is Cause.GC for span in recording.spans) >= 2


def test_events_of_one_place_share_their_stack():
    log = Log()
    for _ in range(3):
        log.add_span(0, Cause.IO, depth=1)
    log.add_span(0, Cause.IO, depth=1)
    stacks = [span[4] for span in log.spans]
    assert stacks[0] is stacks[1] is stacks[2]
    assert frames.sites_of(stacks[3])[0].line == frames.sites_of(stacks[0])[0].line + 1


def test_sampler_forgets_threads_that_are_gone_and_sees_the_main_thread_among_many():
    sampler, hold = Sampler(), threading.Event()
    mine = threading.get_ident()
    for _ in range(6):
        threads = [threading.Thread(target=hold.wait) for _ in range(20)]
        for thread in threads:
            thread.start()
        look = sampler._look(-1, 0, 0, (0,))
        assert len(look.threads) == MAX_THREADS
        assert mine in {each.ident for each in look.threads}
        hold.set()
        for thread in threads:
            thread.join()
        hold.clear()
    assert len(sampler._files) <= 6 * MAX_THREADS  # two of each thread
    assert len(sampler._latest) <= 3 * MAX_THREADS
    sampler.stop()
    assert not sampler._files
