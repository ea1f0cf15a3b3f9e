"""What users can rely on: the names, a quiet import, and a core that needs no torch."""

import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest
import torch

import millstream as ms
from millstream.api import dynamo_backend

SOURCE = Path(ms.__file__).parents[1]
NAMES = [
    "ArgumentError",
    "CaptureError",
    "Explanation",
    "FallbackWarning",
    "MillstreamError",
    "callback",
    "compile",
    "eager_region",
    "explain",
    "feed",
    "fetch",
    "full_state_dict",
    "load_programs",
    "precompile",
    "profile",
    "save_programs",
    "step",
    "streams",
    "trace_syncs",
    "version_report",
]
MODULES = ["data", "device", "errors", "manual", "results"]
CORE = ["errors", "graph", "cost", "schedule", "placement", "check", "simulate", "insight", "report"]


def run_python(code):
    """Run ``code`` in a fresh interpreter that finds the package's source; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names():
    assert sorted(ms.__all__) == NAMES
    assert [name for name in NAMES if not hasattr(ms, name)] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parallel", ms.manual.parallel),
        ("device_context", ms.device.context),
        ("FeedError", ms.errors.FeedError),
    ],
)
def test_names_that_moved_say_where_they_are(old, new):
    vars(ms).pop(old, None)  # once found it stays
    with pytest.warns(DeprecationWarning, match=f"ms.{old} is ms.{new.__module__.split('.')[1]}"):
        assert getattr(ms, old) is new


def test_dir_names_what_is_imported_late():
    listed = run_python("import millstream as ms; print(*dir(ms))").split()
    assert [name for name in NAMES if name not in listed] == []


def test_version_report_names_versions_and_hides_the_home_folder():
    report = ms.version_report()
    assert f"millstream   {ms.__version__}" in report
    assert torch.__version__ in report
    assert str(Path.home()) not in report


def test_import_has_no_side_effects():
    printed = run_python(
        """
import os, random, threading, warnings
import numpy, torch
def look():
    return (
        torch.cuda.is_initialized(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()),
        threading.active_count(), dict(os.environ), list(warnings.filters), os.listdir("."),
    )
before = look()
import millstream
assert look() == before
assert not torch.cuda.is_initialized()
assert "torch._inductor" not in sys.modules, "takes seconds and belongs after the first use"
""",
    )
    assert printed == ""


def test_functions_win_over_rooms_of_the_same_name():
    run_python(
        """
import millstream.data
import millstream as ms
assert callable(ms.feed) and callable(ms.compile) and callable(ms.step)
"""
    )


@pytest.mark.parametrize("package", CORE)
def test_core_imports_no_torch(package):
    # The package's own __init__ imports torch, so a bare package of the same path stands in for it.
    run_python(
        f"""
import importlib, pkgutil, types
sys.modules["torch"] = None
package = types.ModuleType("millstream")
package.__path__ = [{str(SOURCE / "millstream")!r}]
sys.modules["millstream"] = package
part = importlib.import_module("millstream.{package}")
for module in pkgutil.walk_packages(getattr(part, "__path__", []), "millstream.{package}."):
    importlib.import_module(module.name)
"""
    )


def test_types_are_shipped():
    assert (resources.files("millstream") / "py.typed").is_file()


def test_backend_is_registered_with_torch():
    entries = metadata.entry_points(group="torch_dynamo_backends", name="millstream")
    if not entries:
        pytest.skip("runs from source, without metadata")
    assert next(iter(entries)).load() is dynamo_backend


def test_version_is_in_the_changelog():
    changelog = (SOURCE.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{ms.__version__}]" in changelog


def test_no_package_has_the_name_of_a_function():
    """Importing it would put the package in the function's place."""
    folder = Path(ms.__file__).parent
    packages = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert not packages & {*ms.__all__}


def test_completion_shows_what_is_public_and_nothing_else():
    assert {name for name in dir(ms) if not name.startswith("__")} == {*ms.__all__, *MODULES}


def test_an_unknown_option_says_where_our_own_go():
    with pytest.raises(ms.ArgumentError, match=r"streams=2, are arguments"):
        ms.compile(torch.nn.Linear(2, 2), options={"streams": 2})


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ms.step(abs, stream=2), "streams"),
        (lambda: ms.compile(abs, enigne="serial"), "engine"),
        (lambda: ms.feed([], "cpu", dept=3), "depth"),
        (lambda: ms.compile(abs, options={"max_autotunes": True}), "max_autotune"),
    ],
)
def test_a_slip_in_a_name_is_answered_by_what_was_meant(call, meant):
    with pytest.raises((TypeError, ms.ArgumentError), match=f"Did you mean '{meant}'"):
        call()


def test_what_is_like_no_name_gets_no_suggestion():
    with pytest.raises(TypeError, match=r"argument 'zzz'\.$"):
        ms.step(abs, zzz=2)


def test_step_says_of_a_model_what_it_takes():
    with pytest.raises(ms.ArgumentError, match=r"not a model \(Linear\).*Call ms\.compile\(model\)"):
        ms.step(torch.nn.Linear(2, 2))
