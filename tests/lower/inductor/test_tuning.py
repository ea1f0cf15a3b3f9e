"""What was found fastest is taken again: by a tuner as upstream's are, with configurations that only have names."""

import contextlib
import threading
import types

import pytest
import torch

from millstream.lower.inductor import tuning
from millstream.lower.inductor.tuning import keep_choice
from tests.clocks import HANG_S

SOURCE = "def kernel(): ..."


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    return tmp_path


def config(block, warps=4):
    return types.SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=warps, num_stages=1)


class Launcher:
    """As upstream's, of which dicts are made."""

    n_regs = n_spills = shared = cache_hash = 0

    def __init__(self, config):
        self.config = config


def make_tuner(*configs, kind="cuda"):
    launchers = [Launcher(each) for each in configs or (config(1), config(8), config(8, warps=8))]
    tuner = types.SimpleNamespace(
        launchers=launchers, device_props=types.SimpleNamespace(type=kind, index=0), fastest=0, num_measured=0
    )

    def benchmark_all_configs():
        tuner.num_measured += 1
        return {launcher: float(i != tuner.fastest) for i, launcher in enumerate(tuner.launchers)}

    tuner.benchmark_all_configs = benchmark_all_configs
    return tuner


def tune(tuner, index):
    """Find one of its configurations fastest, as upstream does."""
    tuner.fastest = index
    timings = tuner.benchmark_all_configs()
    tuner.launchers = [min(timings, key=timings.get)]


def blocks(tuner):
    return [(each.config.kwargs["XBLOCK"], each.config.num_warps) for each in tuner.launchers]


@pytest.mark.parametrize("in_another_process", [False, True])
def test_what_was_found_fastest_is_taken_again(in_another_process):
    first, second = make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    assert len(first.launchers) == 3
    tune(first, 2)
    if in_another_process:
        tuning._known.clear()
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 8)]


def test_where_nothing_can_be_written_the_process_remembers(folder, monkeypatch):
    monkeypatch.setattr(tuning, "cache_folder", lambda: folder / "file")
    (folder / "file").write_text("")
    first, second = make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    tune(first, 1)
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 4)]


@pytest.mark.parametrize("other", ["source", "device"])
def test_others_are_tuned_for_themselves(other, monkeypatch):
    first = make_tuner()
    keep_choice(first, SOURCE)
    tune(first, 0)
    second = make_tuner()
    if other == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "another GPU")
    keep_choice(second, SOURCE + (" # other" if other == "source" else ""))
    assert len(second.launchers) > 1


@pytest.mark.parametrize("others", [(config(8, warps=8),), (config(8), config(8, warps=8), config(4)), (config(4),)])
def test_what_was_found_is_taken_from_among_others(others):
    """Upstream derives configurations from those that it has, not always the same ones."""
    first, second = make_tuner(), make_tuner(config(1), *others)
    keep_choice(first, SOURCE)
    tune(first, 0)
    keep_choice(second, SOURCE)
    assert blocks(second) == [(1, 4)]


def test_what_is_not_there_any_more_is_found_anew():
    first, second, third = make_tuner(), make_tuner(config(2), config(4)), make_tuner(config(2), config(4))
    keep_choice(first, SOURCE)
    tune(first, 0)
    keep_choice(second, SOURCE)
    assert len(second.launchers) == 2
    tune(second, 1)
    keep_choice(third, SOURCE)
    assert blocks(third) == [(4, 4)]


def test_who_tunes_behind_another_takes_what_was_found():
    first, second, third = make_tuner(), make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    keep_choice(second, SOURCE)
    tune(first, 0)
    tune(second, 1)
    keep_choice(third, SOURCE)
    assert blocks(first) == blocks(second) == blocks(third) == [(1, 4)]
    assert second.num_measured == 0


def test_of_two_that_tune_at_once_one_measures(monkeypatch):
    first, second = make_tuner(), make_tuner()
    measure, inside, go_on = first.benchmark_all_configs, threading.Event(), threading.Event()

    def measure_slowly():
        inside.set()
        assert go_on.wait(HANG_S)
        return measure()

    first.benchmark_all_configs = measure_slowly
    waiting = threading.Event()
    monkeypatch.setattr(tuning, "PATIENCE_S", HANG_S)
    monkeypatch.setattr("millstream.cache.time.sleep", lambda seconds: (waiting.set(), go_on.set()))
    keep_choice(first, SOURCE)
    keep_choice(second, SOURCE)
    thread = threading.Thread(target=tune, args=(first, 2))
    thread.start()
    assert inside.wait(HANG_S)
    tune(second, 1)
    thread.join()
    assert waiting.is_set()
    assert blocks(first) == blocks(second) == [(8, 8)]
    assert second.num_measured == 0


def test_a_tuner_of_two_programs_does_not_wait_for_itself(monkeypatch):
    waited = []
    monkeypatch.setattr("millstream.cache.time.sleep", waited.append)
    monkeypatch.setattr(tuning, "PATIENCE_S", 0.1)
    tuner = make_tuner()
    for _ in range(2):
        keep_choice(tuner, SOURCE)
    tune(tuner, 1)
    assert not waited
    assert tuner.num_measured == 1


def test_who_is_kept_waiting_for_too_long_measures_himself(monkeypatch, folder):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(tuning, "PATIENCE_S", 0.05)
    tuner = make_tuner()
    keep_choice(tuner, SOURCE)
    path = tuning._path(SOURCE, "a GPU")
    path.parent.mkdir()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        tune(tuner, 1)
    assert blocks(tuner) == [(8, 4)]
    assert tuner.num_measured == 1


def test_upstream_goes_on_with_what_was_found_meanwhile():
    """Its own code that chooses, on a tuner that is no more than it asks for."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    told = []
    tuner = object.__new__(heuristics.CachingAutotuner)
    vars(tuner).update(vars(make_tuner()))
    vars(tuner).update(
        fn=types.SimpleNamespace(__name__="kernel"),
        inductor_meta={},
        compile_results=[],
        benchmark_failure_reasons={},
        precompile_time_taken_ns=0,
        save_cache_hook=lambda config, *args, **kwargs: told.append(config),
    )
    other = make_tuner()
    keep_choice(tuner, SOURCE)
    keep_choice(other, SOURCE)
    tune(other, 2)
    tuner.autotune_to_one_config()
    assert blocks(tuner) == [(8, 8)]
    assert told == [tuner.launchers[0].config]


def upstream_remembers(tuner, config):
    """Leave a tuner the one configuration that upstream has found, which can compile others."""
    tuner.launchers = [Launcher(config)]
    tuner.autotune_cache_info = {"autotune_cache_state": "hit"}
    tuner.fn = types.SimpleNamespace(fn=object())
    tuner._precompile_config = lambda config: types.SimpleNamespace(make_launcher=lambda: Launcher(config))
    return tuner


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


@pytest.mark.usefixtures("any_device")
def test_what_was_found_here_goes_before_what_upstream_remembers():
    """Another process may have told upstream at the same time, or without Millstream."""
    first, second = make_tuner(), upstream_remembers(make_tuner(), config(8, warps=8))
    keep_choice(first, SOURCE)
    tune(first, 1)
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 4)]


@pytest.mark.usefixtures("any_device")
def test_the_source_is_read_again_where_a_cache_has_dropped_it():
    first, second = make_tuner(), upstream_remembers(make_tuner(), config(8, warps=8))
    source = second.fn.fn
    second.fn, second._reload_kernel = types.SimpleNamespace(fn=None), lambda: types.SimpleNamespace(fn=second_fn)
    second_fn = types.SimpleNamespace(fn=source)
    keep_choice(first, SOURCE)
    tune(first, 1)
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 4)]
    assert second.fn is second_fn


def test_what_upstream_remembers_is_taken_from_then_on():
    """It may forget."""
    first, second = upstream_remembers(make_tuner(), config(8, warps=8)), make_tuner()
    keep_choice(first, SOURCE)
    keep_choice(second, SOURCE)
    assert blocks(first) == blocks(second) == [(8, 8)]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("why", ["it cannot be compiled", "upstream has changed", "it has other blocks", "no hit"])
def test_else_upstream_chooses(why):
    first, second = make_tuner(), upstream_remembers(make_tuner(), config(8, warps=8))
    keep_choice(first, SOURCE)
    tune(first, 1)
    if why == "it cannot be compiled":
        second._precompile_config = lambda config: 1 / 0
    elif why == "upstream has changed":
        del second._precompile_config
    elif why == "it has other blocks":
        second.launchers[0].config.kwargs["YBLOCK"] = 1
    else:
        second.autotune_cache_info = {"autotune_cache_state": "only 1 config"}
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 8)]


def test_a_kernel_of_one_configuration_needs_no_file(folder):
    keep_choice(make_tuner(config(4)), SOURCE)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"XBLOCK"', '{"XBLOCK": 3}', "\xff"])
def test_a_file_that_says_nothing_is_as_none(folder, text):
    first, second = make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    tune(first, 1)
    tuning._known.clear()
    (file,) = (folder / "tuning").iterdir()
    file.write_bytes(text.encode("latin-1"))
    keep_choice(second, SOURCE)
    assert len(second.launchers) == 3


@pytest.mark.parametrize(
    "tuner",
    [make_tuner(config(1)), make_tuner(kind="cpu"), types.SimpleNamespace(), types.SimpleNamespace(launchers=None)],
    ids=["one", "on the host", "unknown", "changed"],
)
def test_what_has_no_choice_or_is_not_known_is_left_alone(tuner, folder):
    before = vars(tuner).copy()
    keep_choice(tuner, SOURCE)
    assert vars(tuner) == before
    assert not list(folder.iterdir())
