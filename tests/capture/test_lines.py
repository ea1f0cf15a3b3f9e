"""Which code is the user's own, and which a library's."""

import sys
import sysconfig
from pathlib import Path

from millstream.capture.lines import find_site_folders


def test_packages_of_other_environments_are_libraries(tmp_path):
    borrowed = [tmp_path / "home" / "site-packages", tmp_path / "system" / "dist-packages"]
    found = find_site_folders([str(tmp_path), str(tmp_path / "src"), *map(str, borrowed)])
    assert found - {Path(sysconfig.get_paths()[key]).resolve() for key in ("purelib", "platlib")} == {*borrowed}


def test_packages_of_this_environment_are_libraries_wherever_the_path_has_them():
    own = Path(sysconfig.get_paths()["purelib"]).resolve()
    assert own in find_site_folders([])
    assert own in find_site_folders(sys.path)
