"""What was found fastest is taken again: by a tuner as upstream's are, with configurations that only have names."""

import types

import pytest
import torch

from millstream.lower import tuning
from millstream.lower.tuning import keep_choice

SOURCE = "def kernel(): ..."


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    return tmp_path


def config(block, warps=4):
    return types.SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=warps, num_stages=1)


def make_tuner(*configs, kind="cuda"):
    launchers = [types.SimpleNamespace(config=each) for each in configs or (config(1), config(8), config(8, warps=8))]
    return types.SimpleNamespace(
        launchers=launchers, device_props=types.SimpleNamespace(type=kind, index=0), save_cache_hook=None
    )


def tune(tuner, index):
    """Find one of its configurations fastest, as upstream does."""
    tuner.launchers = [tuner.launchers[index]]
    tuner.save_cache_hook(tuner.launchers[0].config, 17, triton_cache_hash="?")


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
    assert second.save_cache_hook is None


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


def test_the_first_of_two_that_tune_at_once_is_kept():
    first, second, third = make_tuner(), make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    keep_choice(second, SOURCE)
    tune(first, 0)
    tune(second, 1)
    keep_choice(third, SOURCE)
    assert blocks(third) == [(1, 4)]


def test_upstream_is_told_as_well():
    tuner, told = make_tuner(), []
    tuner.save_cache_hook = lambda *args, **kwargs: told.append((args, kwargs))
    keep_choice(tuner, SOURCE)
    tune(tuner, 1)
    assert told == [((tuner.launchers[0].config, 17), {"triton_cache_hash": "?"})]


def test_where_coordinate_descent_went_on_to_is_upstreams():
    first, second = make_tuner(), make_tuner()
    keep_choice(first, SOURCE)
    first.save_cache_hook(config(8), 17)
    first.save_cache_hook(config(1024), 17, found_by_coordesc=True)
    keep_choice(second, SOURCE)
    assert blocks(second) == [(8, 4)]  # from where it goes on


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
