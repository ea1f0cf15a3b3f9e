"""``millstream cache`` and ``millstream warm``: what is shown, what goes first, and what is left alone."""

import os

import pytest

from millstream import cache
from millstream.cli.command import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    for age, name in enumerate(("programs/new.program", "tuning/middle.json", "programs/old.program")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (10**9 - age, 10**9 - age))
    (tmp_path / "thesis.txt").write_text("mine")
    return tmp_path


def left(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_limit_removes_what_is_unused_for_longest(folder, capsys):
    assert main(["cache", "--limit", "2k"]) == 0
    assert left(folder) == ["middle.json", "new.program", "thesis.txt"]
    assert "removed 1 files" in capsys.readouterr().out


def test_clear_leaves_other_files_alone(folder):
    assert main(["cache", "--clear"]) == 0
    assert left(folder) == ["thesis.txt"]


def test_show_counts_each_kind(folder, capsys):
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "programs           2 files" in shown
    assert "choices            1 files" in shown


def test_limit_that_is_no_size_is_refused(folder, capsys):
    assert main(["cache", "--limit", "much"]) == 2
    assert "500M" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("10", 10), ("1.5k", 1536), ("2 GiB", 2 << 30), ("x", None), ("", None)]
)
def test_sizes_are_read(text, expected):
    assert cache.parse_bytes(text) == expected


def test_what_is_written_keeps_to_the_limit(folder, monkeypatch):
    from millstream.lower.kept import program_files

    monkeypatch.setenv("MILLSTREAM_CACHE_LIMIT", "1500")
    program_files._write("f" * 64, {})
    assert left(folder) == [f"{'f' * 40}.program", "new.program", "thesis.txt"]


def test_warm_runs_a_script_and_says_what_is_new(folder, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "Path(__file__).with_name('programs').joinpath('x.program').write_bytes(b'1')\nprint(sys.argv[1:])\n"
    )
    assert main(["warm", str(script), "--clear"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "['--clear']\n"
    assert "1 new programs" in shown.err
