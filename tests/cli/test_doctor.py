"""The doctor: what it finds, by planted faults."""

import warnings

import pytest

import millstream as ms
from millstream._torch.workarounds import without
from millstream.cli import doctor, main


def test_healthy_machine(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ok       ms.step on cpu: 1 graph on engine" in text
    assert "ok       ms.compile on cpu: 1 graph on engine" in text
    assert "ok       native tensors: " in text
    assert text.endswith("everything works\n")


def test_a_look_alone_does_not_say_that_everything_works(capsys):
    assert main(["doctor", "--quick"]) == 0
    assert "without --quick it is tried" in capsys.readouterr().out.splitlines()[-1]


def test_why_compiled_code_is_not_there_is_said():
    with without(["native"]):
        findings = [*doctor.find_native()]
    assert {(each.status, each.detail) for each in findings} == {("note", "MILLSTREAM_WITHOUT=native leaves it out")}


def test_what_is_broken_has_a_remedy_and_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "compiler", lambda: "none")
    assert main(["doctor", "--quick"]) == doctor.EXIT_BROKEN
    text = capsys.readouterr().out
    assert "broken   C++ compiler: none" in text
    assert "Install g++ or clang" in text
    assert text.endswith("1 broken\n")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.10.1", "broken"), ("2.14.0a0+git1", "broken")],
)
def test_torch_versions(version, status):
    assert doctor.find_torch(version).status == status


def test_attempts_that_raise_are_broken_and_that_fall_back_are_notes():
    def fail():
        raise RuntimeError("no such kernel\nmore")

    def fall_back():
        warnings.warn(ms.FallbackWarning("it reads values"), stacklevel=1)
        return "done"

    failed, fell_back = doctor.tried("x", fail), doctor.tried("x", fall_back)
    assert (failed.status, failed.detail) == ("broken", "RuntimeError: no such kernel")
    assert fell_back.status == "note"
    assert fell_back.detail.endswith("falls back: it reads values")
    assert doctor.tried("x", lambda: "done").status == "ok"


def test_wrong_values_are_broken(monkeypatch):
    monkeypatch.setattr(ms, "compile", lambda model: lambda x: model(x) + 1)
    found = doctor.tried("x", lambda: doctor._try_model(doctor.torch.device("cpu")))
    assert found.status == "broken"
    assert "values differ from eager's" in found.detail


def test_overrides_and_load_are_told():
    told = [*doctor.find_overrides({"MILLSTREAM_ENGINE": "serial", "OTHER": "1"}), *doctor.find_load(9.0, 2)]
    assert [finding.status for finding in told] == ["note", "note"]
    assert list(doctor.find_load(0.5, 2)) == []
