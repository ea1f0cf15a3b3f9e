"""Compiled code is kept, found again where it may be trusted, and what keeps it from being there is said."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from contextlib import nullcontext

import pytest

from millstream import _native
from millstream._native import build
from millstream._torch.workarounds import without
from tests.clocks import HANG_S

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty cache, and sources that are compiled in no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "core.cpp").write_text('#include "number.h"\nextern "C" int number() { return NUMBER; }\n')
    (sources / "number.h").write_text("#define NUMBER 3\n")
    monkeypatch.setattr(build, "FOLDER", sources)
    monkeypatch.setattr(build, "_SOURCES", {"core": ("core",)})
    cache = tmp_path / "cache"
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(cache))
    return cache


def made():
    module = _native._Module("core")
    return module.find(), module.failure


def compiled():
    path, failure = made()
    assert path is not None, failure
    return path


@needs_compiler
def test_what_was_compiled_is_kept_until_a_source_changes(folder, monkeypatch):
    first = compiled()
    with monkeypatch.context() as patch:
        patch.setattr(_native, "_compile", lambda *_: pytest.fail("compiled twice"))
        assert compiled() == first
    (build.FOLDER / "number.h").write_text("#define NUMBER 4\n")
    assert compiled() != first
    assert {each.suffix for each in folder.iterdir()} == {".so", ".lock"}


@needs_compiler
def test_what_was_compiled_for_another_machine_is_replaced(folder, monkeypatch):
    name = compiled().name
    other = folder.with_name("other")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(other))
    other.mkdir()
    (other / name).write_bytes(b"of another machine")
    assert compiled() == other / name


@needs_compiler
def test_what_others_could_have_written_is_not_run(folder):
    compiled()
    folder.chmod(0o777)
    assert made() == (None, f"others can write into the cache folder {folder}")


@needs_compiler
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_what_was_cut_off_is_compiled_again(folder, part):
    """Loading it would end the process, so that it must not be tried."""
    library = compiled()
    whole = library.read_bytes()
    library.unlink()  # it is loaded, and must stay as it is
    library.write_bytes(whole[: int(part * len(whole))])
    assert compiled().read_bytes() == whole


@needs_compiler
def test_a_compiler_may_have_arguments(folder, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('g++') or shutil.which('c++')} -O1")
    compiled()


@needs_compiler
def test_what_the_compiler_complains_of_is_said(folder):
    (build.FOLDER / "core.cpp").write_text("int number() { return nothing; }\n")
    path, failure = made()
    assert path is None
    assert "nothing" in failure


@needs_compiler
def test_another_process_that_compiled_meanwhile_need_not_be_repeated(folder, monkeypatch):
    library = compiled()
    found = iter([None, library, library])
    monkeypatch.setattr(_native, "_find_kept", lambda stem: next(found))
    monkeypatch.setattr(_native, "_compile", lambda *_: pytest.fail("compiled twice"))
    monkeypatch.setattr(_native, "file_lock", lambda path, timeout_s: nullcontext(True))
    assert compiled() == library


def test_where_nothing_can_be_kept_nothing_is_compiled(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "_compile", lambda *_: pytest.fail("compiled for nothing"))
    monkeypatch.setenv("CXX", "c++")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, reason in (("file", "nothing can be kept in .*file"), ("open", "others can write into .*open")):
        monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / name))
        path, failure = made()
        assert path is None
        assert re.search(reason, failure)


@pytest.mark.parametrize(
    ("compiler", "reason"), [('"g++', "there is no compiler"), ("/nonexistent/compiler", "does not run")]
)
def test_without_a_compiler_it_says_so(folder, monkeypatch, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    path, failure = made()
    assert path is None
    assert reason in failure


def test_it_can_be_left_out(folder):
    with without(["native"]):
        assert made() == (None, "MILLSTREAM_WITHOUT=native leaves it out")


@needs_compiler
def test_what_a_wheel_has_brought_is_taken(folder, monkeypatch):
    library, brought = compiled(), build.FOLDER / build.PREBUILT_FILE
    brought.write_bytes(b"of another machine")
    assert compiled() == library
    library.replace(brought)
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert compiled() == brought


@needs_compiler
def test_a_child_that_is_forked_while_another_thread_compiles_does_not_wait(folder):
    module = _native._Module("core")
    holds, ends = threading.Event(), threading.Event()

    def compile_long():
        with module.lock:
            holds.set()
            ends.wait(HANG_S)

    thread = threading.Thread(target=compile_long)
    thread.start()
    assert holds.wait(HANG_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(HANG_S))
        os._exit(0 if module.find() is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ends.set()
    thread.join()
