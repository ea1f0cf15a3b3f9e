"""Wrong uses, as newcomers make them: the error says what was given, what was expected, and what to do."""

import pytest
import torch
from torch._inductor.cpp_builder import cpp_compiler_search

import millstream as ms


@pytest.fixture
def _no_compiler():
    cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield
    cpp_compiler_search.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_a_machine_without_a_compiler_is_named_with_its_remedy(wrap):
    torch._dynamo.reset()
    compiled = wrap(lambda x: torch.tanh(x) * 3 + 17)
    with pytest.warns(ms.FallbackWarning, match=r"no-such-compiler.*Install g\+\+ or clang.*millstream doctor"):
        result = compiled(torch.ones(5))
    torch.testing.assert_close(result, torch.tanh(torch.ones(5)) * 3 + 17)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    step = ms.step(lambda x: x * 2)
    step(torch.ones(4))
    with ms.profile() as profile:
        step(torch.ones(4))
    for report in (ms.explain(step), profile):
        with pytest.raises(ms.ArgumentError, match=r"cannot write .*x\.html: there is no folder .*absent"):
            report.save(tmp_path / "absent" / "x.html")


def test_an_engine_that_the_environment_names_is_said_to_be_its(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_ENGINE", "fast")
    with pytest.raises(ms.ArgumentError, match=r"MILLSTREAM_ENGINE='fast' is no engine; .*'serial'.*unset"):
        ms.step(lambda x: x.tan() + 2)(torch.ones(3))
