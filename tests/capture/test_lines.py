"""Which code is the user's own, and which a library's."""

import json
import sys
import sysconfig
from pathlib import Path

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
