"""The command line answers bad input with exit code 2, and an interruption without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        ("simulate --devices 2,none run.py", "'2,none' are no numbers of devices"),
        ("simulate --per-host 0 run.py", "'0' is no number of devices"),
        ("shakespeare", "invalid choice: 'shakespeare'"),
        ("explain", "SCRIPT.py:OBJECT"),
        ("", "COMMAND"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_doctor", interrupt)
    assert main(["doctor"]) == command.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "millstream: interrupted\n"
