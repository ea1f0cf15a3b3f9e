"""Which code is the user's own, and which a library's."""

import importlib.util
import json
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import millstream as ms
from millstream.capture import lines
from millstream.capture.lines import claim, find_packages_elsewhere, find_site_folders, is_users_own


def test_packages_of_other_environments_are_libraries(tmp_path):
    borrowed = [tmp_path / "home" / "site-packages", tmp_path / "system" / "dist-packages"]
    found = find_site_folders([str(tmp_path), str(tmp_path / "src"), *map(str, borrowed)])
    assert found - {Path(sysconfig.get_paths()[key]).resolve() for key in ("purelib", "platlib")} == {*borrowed}


def test_packages_of_this_environment_are_libraries_wherever_the_path_has_them():
    own = Path(sysconfig.get_paths()["purelib"]).resolve()
    assert own in find_site_folders([])
    assert own in find_site_folders(sys.path)


def test_every_module_of_the_project_is_its_own_also_those_at_its_top():
    files = [Path(ms.__file__).parent / name for name in ("locks.py", "errors.py", "capture/lines.py")]
    assert not any(map(lines.is_users, map(str, files)))


def recorded(folder, file):
    return f"{folder}/{file},,\n"


def write_package(folder, name, **files):
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    for file, text in ({"METADATA": f"Name: {name}\nVersion: 1.0\n", "WHEEL": ""} | files).items():
        (metadata / file.replace("_json", ".json")).write_text(text)


def test_packages_in_clones_and_target_folders_are_libraries_and_what_one_works_on_is_not(tmp_path):
    environment, target = tmp_path / "site-packages", tmp_path / "target"
    for name in ("clone", "mine"):
        origin = {"url": (tmp_path / name).as_uri(), "dir_info": {"editable": True}}
        write_package(environment, name, direct_url_json=json.dumps(origin))
    write_package(environment, "usual", RECORD=recorded("usual", "__init__.py"))
    files = recorded("there", "__init__.py"), recorded("there/deep", "code.py"), "_there.py,,\n../bin/there,,\n"
    write_package(target, "there", RECORD="".join(files))
    search_path, at_work = [str(tmp_path), str(environment), str(target)], [tmp_path / "mine" / "scripts"]
    found = find_packages_elsewhere(search_path, at_work)
    metadata = {each for each in found if each.suffix == ".dist-info"}
    assert found - metadata == {tmp_path / "clone", target / "there", target / "_there.py"}


def test_the_project_of_a_step_is_the_users_own(tmp_path, monkeypatch):
    packages = {tmp_path / "clone", tmp_path / "mine"}
    monkeypatch.setattr(lines, "_packages_elsewhere", lambda: packages)
    codes = {}
    for name in ("clone", "mine"):
        exec(compile("def step(): pass", str(tmp_path / name / "code.py"), "exec"), codes.setdefault(name, {}))
    assert not any(is_users_own(str(each / "code.py")) for each in packages)
    claim(codes["mine"]["step"])
    assert is_users_own(str(tmp_path / "mine" / "code.py"))
    assert not is_users_own(str(tmp_path / "clone" / "code.py"))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed, with a function that branches on a value, and one that needs an array."""
    file = tmp_path / "readers.py"
    text = """def read(x):
    return x if x.sum().item() > 0 else -x
def export(x):
    return x * x.detach().numpy().sum().item()
"""
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(lines, "_packages_elsewhere", lambda: {tmp_path})
    is_users_own.cache_clear()
    spec = importlib.util.spec_from_file_location("readers", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    monkeypatch.undo()
    is_users_own.cache_clear()


def test_a_reason_names_the_users_line_then_the_librarys(library):
    weight = torch.ones(3, requires_grad=True)

    def before(x):
        loss = library.export(x * weight).sum()
        loss.backward()
        return loss

    def after(x):
        weight.sum().backward()
        return library.export(x)

    place = rf"{re.escape(__file__)}:{{}}, which comes to {re.escape(library.__file__)}:4"
    for function, remedy in ((before, "an option of .* or compile the parts"), (after, r"Or put line \d+ into")):
        where = place.format(function.__code__.co_firstlineno + (1 if function is before else 2))
        with pytest.warns(ms.FallbackWarning, match=rf"At {where}\. .*{remedy}"):
            ms.step(function)(torch.ones(3))


def test_a_cut_names_the_users_line_then_the_librarys_and_dynamos_reason(library):
    torch._dynamo.reset()

    def model(x):
        return library.read(x + 1) * 2

    line = model.__code__.co_firstlineno + 1
    places = rf"{re.escape(__file__)}:{line} in model, which comes to {re.escape(library.__file__)}:2 in read"
    with pytest.warns(ms.FallbackWarning) as caught:
        ms.compile(model)(torch.ones(3))
    told = [str(each.message) for each in caught]
    assert re.search(rf"the graph is cut at {places} \(.*item.*: Dynamo .*\);.*an option of", told[0])
    assert sum("readers.py:2" in each for each in told) == 1
