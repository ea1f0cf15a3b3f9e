"""The commands train and explain, whole: both runs, the comparison, checkpoints that resume exactly."""

import json
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten

import millstream as ms
from millstream.cli import command, main
from millstream.cli.training import train
from millstream.cli.training.train import WARM_UP_STEPS, Run, find_gain, find_largest_difference, take_turns

JOBS = {
    "char-rnn": "char-rnn --layers 1 --hidden 8 --sequence 3 --batch 4 --vocabulary 20 --sample 30",
    "digits": "digits --width 2 --batch 16",
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def eager(monkeypatch):
    """Make ``ms.step`` do nothing, for tests of what stands around it."""
    monkeypatch.setattr(ms, "step", lambda fn: fn)


def run(command, job, options=""):
    return main([command, *JOBS[job].split(), "--device", "cpu", *options.split()])


def load(path):
    return torch.load(path, weights_only=True)


def assert_same_bits(ours, theirs):
    leaves, shape = tree_flatten(ours)
    other_leaves, other_shape = tree_flatten(theirs)
    assert shape == other_shape
    for ours, theirs in zip(leaves, other_leaves, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("job", JOBS)
def test_train(job, capsys):
    assert run("train", job, "--steps 8 --compare 5") == 0
    output = capsys.readouterr().out
    assert re.search(r"eager +[\d,]+ (characters|images)/s", output)
    assert re.search(
        r"one graph +[\d,]+ (characters|images)/s, [\d.]+ (to [\d.]+ )?times eager.* \(ready after [\d.]+ s\)", output
    )
    assert "losses of 5 steps agree: largest relative difference" in output
    assert f"saved runs/{job}.pt after step 8" in output
    assert load(f"runs/{job}.pt")["done"] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_trained_before_an_interrupt_is_saved_and_resumes_exactly(eager, monkeypatch, capsys, number):
    losses = train.Run.losses

    def interrupted(run):
        for loss in losses(run):
            if run.done == 7:
                signal.raise_signal(number)
            yield loss

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "losses", interrupted)
        assert run("train", "digits", "--steps 12 --compare 2 --checkpoint a.pt") == command.EXIT_INTERRUPTED
    assert "interrupted; saved a.pt after step 7" in capsys.readouterr().out
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert run("train", "digits", "--steps 5 --compare 0 --resume a.pt") == 0
    assert run("train", "digits", "--steps 12 --compare 0 --checkpoint b.pt") == 0
    assert_same_bits(load("a.pt"), load("b.pt"))


def test_first_interrupt_is_told_of_and_second_interrupts(capfd):
    with train.stop_after_step() as stops:
        assert not stops()
        signal.raise_signal(signal.SIGINT)
        assert stops()
        assert capfd.readouterr().err == "\nstopping after this step; again to stop now\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_resumed_run_saves_where_it_began(eager):
    assert run("train", "digits", "--steps 3 --compare 0 --checkpoint mine.pt") == 0
    assert run("train", "digits", "--steps 2 --compare 0 --resume mine.pt") == 0
    assert load("mine.pt")["done"] == 5
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail] unexpected pos")]
)
def test_a_disk_that_is_full_costs_no_older_checkpoint(eager, monkeypatch, capsys, error):
    assert run("train", "digits", "--steps 3 --compare 0 --checkpoint a.pt") == 0
    before = Path("a.pt").read_bytes()

    def fail(state, path):
        path.write_bytes(b"some of it")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    assert run("train", "digits", "--steps 2 --compare 0 --resume a.pt") == command.EXIT_BAD_INPUT
    assert "cannot write --checkpoint a.pt (a full disk?)" in capsys.readouterr().err
    assert [(each.name, each.read_bytes()) for each in Path().iterdir()] == [("a.pt", before)]


@pytest.mark.usefixtures("lowered_once")
@pytest.mark.parametrize("job", JOBS)
def test_resume_is_exact(job):
    assert run("train", job, "--steps 8 --checkpoint whole.pt") == 0
    assert run("train", job, "--steps 4 --checkpoint half.pt") == 0
    assert run("train", job, "--steps 4 --checkpoint both.pt --resume half.pt") == 0
    assert_same_bits(load("both.pt"), load("whole.pt"))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("job", JOBS)
def test_comparing_does_not_change_the_training(job):
    assert run("train", job, "--steps 6 --compare 0 --checkpoint apart.pt") == 0
    assert run("train", job, "--steps 6 --compare 4 --checkpoint beside.pt") == 0
    assert_same_bits(load("beside.pt"), load("apart.pt"))


def test_explain(capsys):
    assert run("explain", "digits") == 0
    text = capsys.readouterr().out
    assert re.search(r"\d+ kernels on cpu", text)
    assert "convolution_backward" in text
    assert "nothing fell back" in text


@pytest.mark.usefixtures("eager")
def test_explain_as_json(capsys, monkeypatch):
    class Explanation:
        def to_dict(self):
            return {"kernels": 3}

    monkeypatch.setattr(ms, "explain", lambda step, **_: Explanation())
    assert run("explain", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"kernels": 3}


def test_disagreement_is_a_failure(monkeypatch, capsys, tmp_path):
    def spoil(fn):
        def step(inputs, targets, carry):
            loss, carry = fn(inputs, targets, carry)
            return loss * 1.01, carry

        return step

    monkeypatch.setattr(ms, "step", spoil)
    assert run("train", "digits", "--steps 6") == 1
    assert "losses of 6 steps disagree: largest relative difference 9.9e-03" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.usefixtures("eager")
def test_the_time_of_a_run_without_a_length_begins_before_training(monkeypatch):
    monkeypatch.setattr(train, "DEFAULT_SECONDS", 0.0)
    monkeypatch.setattr(train, "LEAST_SECONDS", 0.0)
    assert run("train", "digits", "--compare 4") == 0
    assert load("runs/digits.pt")["done"] == 5


@pytest.mark.usefixtures("eager")
def test_seconds_end_the_run():
    assert run("train", "digits", "--seconds 0 --compare 4") == 0
    assert load("runs/digits.pt")["done"] == 5
    assert run("train", "digits", "--seconds 0 --steps 9 --compare 2") == 0
    assert load("runs/digits.pt")["done"] == 3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("train char-rnn", "--resume runs/digits.pt is a checkpoint of digits, not of char-rnn"),
        ("train digits --batch 32", "--resume runs/digits.pt was made with batch 16, not 32"),
        ("train digits --batch 16 --width 2 --seed 1", "--resume runs/digits.pt was made with seed 0, not 1"),
    ],
)
def test_resume_of_something_else(options, message, capsys):
    assert run("train", "digits", "--steps 1") == 0
    capsys.readouterr()
    assert main([*options.split(), "--resume", "runs/digits.pt"]) == 2
    assert capsys.readouterr().err == f"millstream: error: {message}\n"


@pytest.mark.usefixtures("eager")
def test_resume_with_another_text(tmp_path, capsys):
    (tmp_path / "ab.txt").write_text("ab" * 50, encoding="utf-8")
    (tmp_path / "ba.txt").write_text("ba" * 50, encoding="utf-8")
    assert run("train", "char-rnn", "--steps 1 --text ab.txt") == 0
    capsys.readouterr()
    assert run("train", "char-rnn", "--steps 1 --text ba.txt --resume runs/char-rnn.pt") == 2
    assert capsys.readouterr().err == "millstream: error: --resume runs/char-rnn.pt was made with another text\n"


@pytest.mark.usefixtures("eager")
def test_resume_of_a_damaged_file(tmp_path, capsys):
    assert run("train", "digits", "--steps 1") == 0
    whole = (tmp_path / "runs/digits.pt").read_bytes()
    (tmp_path / "runs/digits.pt").write_bytes(whole[: len(whole) // 2])
    assert run("train", "digits", "--steps 1 --resume runs/digits.pt") == 2
    assert "is no checkpoint of this program, or is damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("eager")
def test_resume_of_a_file_in_which_one_bit_has_changed(tmp_path, capsys):
    assert run("train", "digits", "--steps 1") == 0
    content = bytearray((tmp_path / "runs/digits.pt").read_bytes())
    content[len(content) // 2] ^= 4  # among the weights or the optimizer's numbers
    (tmp_path / "runs/digits.pt").write_bytes(content)
    assert run("train", "digits", "--steps 1 --resume runs/digits.pt") == 2
    assert "or is damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("missing", ["carry", "identity", "cpu_rng"])
def test_resume_of_a_file_without_all_of_it(tmp_path, capsys, missing):
    assert run("train", "digits", "--steps 1") == 0
    state = torch.load(tmp_path / "runs/digits.pt")
    del state[missing]
    torch.save(state, tmp_path / "runs/digits.pt")
    assert run("train", "digits", "--steps 1 --resume runs/digits.pt") == 2
    assert "is no checkpoint of this program" in capsys.readouterr().err


def drawing_run():
    """A run whose losses are random numbers; after the seed is set, as a job does it."""
    job = SimpleNamespace(device=torch.device("cpu"))
    torch.manual_seed(7)
    run = Run(job, None, 0, ())
    return run, (torch.rand(()) for _ in range(100))


@pytest.mark.parametrize("count", [1, WARM_UP_STEPS, WARM_UP_STEPS + 1, WARM_UP_STEPS + 17])
def test_turns_take_exactly_their_steps_and_leave_each_run_its_random_numbers(count):
    runs = [drawing_run(), drawing_run()]
    turns = take_turns(runs, count)
    torch.manual_seed(7)
    alone = [torch.rand(()).item() for _ in range(count + 1)]
    for (run, losses), turn in zip(runs, turns, strict=True):
        assert turn.losses == alone[:count]
        assert bool(turn.seconds) == (count > WARM_UP_STEPS)
        run.restore_randomness()
        assert next(losses).item() == alone[count]


def test_gain_is_of_rounds_and_uncertain_where_they_disagree():
    quiet = find_gain([2.0, 2.1, 1.9, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert quiet.median == 2.0
    assert quiet.is_certain
    slowed_together = find_gain([2.0, 20.0, 2.0, 8.0], [1.0, 10.0, 1.0, 4.0])
    assert slowed_together.median == 2.0
    assert slowed_together.is_certain
    busy = find_gain([2.0, 9.0, 2.0, 1.9], [1.0, 1.0, 4.0, 2.9])
    assert not busy.is_certain
    assert train._describe_gain(busy).startswith("0.50 to 9.00 times eager: this machine is too busy to tell")


def test_largest_difference():
    assert find_largest_difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert find_largest_difference([1.0, 2.0], [1.0, 1.0]) == 0.5
    assert math.isnan(find_largest_difference([math.nan, 1.0], [1.0, 1.0]))
