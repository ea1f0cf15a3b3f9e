"""The command line answers bad input with one line and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import millstream
from millstream.cli import command, main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("millstream ")


def test_package_is_the_command():
    source = str(Path(millstream.__file__).parents[1])
    command = [sys.executable, "-m", "millstream", "--version"]
    told = subprocess.run(command, env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True, check=True)
    assert told.stdout == f"millstream {millstream.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train char-rnn --steps 0", "0 is not 1 or more"),
        ("train char-rnn --steps 99999999999999999999999", "is not from 1 to"),
        ("train char-rnn --compare 99999999999999999999999", "is not from 0 to"),
        ("train char-rnn --steps many", "invalid int value: 'many'"),
        ("train char-rnn --seconds nan", "nan is not 0 or more"),
        ("train char-rnn --temperature 0", "0 is not 0.01 or more"),
        ("train digits --seed -1", "-1 is not from 0 to 4294967295"),
        ("train shakespeare", "invalid choice: 'shakespeare'"),
        ("train", "JOB"),
        ("", "COMMAND"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train digits --device tpu", "--device 'tpu' is no device"),
        ("train digits --device meta", "--device 'meta' is not supported"),
        ("train digits --device cuda:99", "--device 'cuda:99' is not there"),
        ("train digits --device cpu:3", "--device 'cpu:3' is not there; there is one CPU"),
        ("train digits --batch 5000", "--batch 5000 is more than the 1,437 images"),
        ("train char-rnn --text absent.txt", "cannot read --text absent.txt: No such file"),
        ("train char-rnn --text .", "cannot read --text .: Is a directory"),
        ("train char-rnn --text bytes.bin", "--text bytes.bin is no UTF-8 text"),
        ("train char-rnn --text short.txt", "the text has 12 characters, but one batch"),
        ("train char-rnn --text short.txt --batch 12 --sequence 1", "needs 13"),
        ("train digits --resume absent.pt", "cannot read --resume absent.pt: No such file"),
        ("train digits --resume short.txt", "--resume short.txt is no checkpoint of this program"),
        ("train digits --checkpoint short.txt/x.pt", "cannot write --checkpoint short.txt/x.pt"),
        ("train digits --checkpoint .", "cannot write --checkpoint .: it is a directory"),
        ("explain digits --device tpu", "--device 'tpu' is no device"),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("twelve chars", encoding="utf-8")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\xfd")
    assert main(arguments.split()) == command.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_too_little_memory_is_no_traceback_and_other_errors_are(error, monkeypatch, capsys):
    raised = [error]
    monkeypatch.setattr(command, "_train", lambda arguments: (_ for _ in ()).throw(raised[0]))
    assert main(["train", "digits"]) == command.EXIT_BAD_INPUT
    assert capsys.readouterr().err == "millstream: error: not enough memory for a model of this size\n"
    raised[0] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "digits"])


def test_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_train", interrupt)
    assert main(["train", "digits"]) == command.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "millstream: interrupted\n"
