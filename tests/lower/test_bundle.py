"""Programs in a file: taken in by an empty machine, or refused whole."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import millstream as ms
from millstream.cli.command import main
from millstream.lower.kept import bundle, used
from tests.processes import run_python

SCRIPT = """
import torch
import millstream as ms

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), 0.5)

@ms.step(strict=True)
def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

print([train(torch.ones(2, 4)).item() for _ in range(3)])
"""


def entries(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write(path, files):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of this test's own, in a process that has used nothing yet."""
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    monkeypatch.setattr(used, "_programs", {})
    monkeypatch.setattr(used, "_compiled", {})
    monkeypatch.setattr(used, "libraries", lambda folder: [])
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle from another machine of the same kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path_factory.mktemp("other")))
        patch.setenv("MILLSTREAM_WARM_START", "1")
        patch.setattr(used, "_programs", {})
        patch.setattr(used, "libraries", lambda folder: [])
        model = torch.nn.Linear(3, 3)
        step = ms.step(lambda x: model(x).sum().backward(), strict=True)
        for _ in range(2):
            step(torch.ones(2, 3))
        path = tmp_path_factory.mktemp("made") / "run.msc"
        assert ms.save_programs(path, key=b"secret") > 0
    return path


@pytest.fixture
def file(made, tmp_path):
    """A copy of it, to be changed."""
    return Path(shutil.copy(made, tmp_path))


def written(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_an_empty_machine_compiles_no_kernel(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "key").write_text("secret\n")
    compiler = tmp_path / "c++"  # PyTorch asks each process's for its version, and has it read a header
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *.hpp*) ;; *) [ -e {tmp_path}/broken ] && [ $# -gt 1 ] && exit 1 ;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # which PyTorch would compile something to find out

    def run(machine, program):
        monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / machine / "own"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine / "inductor"))
        done = run_python(f"import sys\nfrom millstream.cli.command import main\n{program}", cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    export = "sys.exit(main(['cache', 'export', '--key', 'key', 'run.msc', 'script.py']))"
    take = "assert not main(['cache', 'import', 'run.msc', '--key', 'key'])\nimport runpy\nrunpy.run_path('script.py')"
    expected = run("there", export)
    (tmp_path / "broken").touch()
    assert run("here", take) == expected


def test_no_file_is_a_pickle(file):
    programs = [content for name, content in entries(file).items() if name.endswith(".program")]
    (file.parent / "programs").mkdir(mode=0o700)
    for number, content in enumerate(programs):
        path = file.parent / "programs" / str(number)
        path.write_bytes(content)
        path.chmod(0o600)
        assert not bundle.read_content(path).get("tuners")


def test_what_is_there_stays(file, folder):
    ms.load_programs(file)
    first = written(folder)[0]
    first.write_bytes(b"its own")
    ms.load_programs(file)
    assert first.read_bytes() == b"its own"


@pytest.mark.parametrize("name", ["../x.program", "/etc/passwd", "millstream/programs/../../x.so", "triton/0/../x"])
def test_names_do_not_lead_out_of_the_caches(file, folder, name):
    files = entries(file)
    manifest = json.loads(files[bundle.MANIFEST])
    manifest["files"][name] = manifest["files"].popitem()[1]
    write(file, {**files, bundle.MANIFEST: json.dumps(manifest)})
    with pytest.raises(ms.ArgumentError, match="no place"):
        ms.load_programs(file)
    assert not written(folder)


def test_another_machine_is_named(file, folder, monkeypatch):
    here = bundle.describe_machine()
    monkeypatch.setattr(bundle, "describe_machine", lambda: {**here, "torch": "9.9"})
    with pytest.raises(ms.ArgumentError, match=rf"torch was {torch.__version__}.*is 9\.9".replace("+", r"\+")):
        ms.load_programs(file)
    assert not written(folder)


def test_only_what_is_signed_with_the_key_is_taken(file, folder):
    with pytest.raises(ms.ArgumentError, match="not signed"):
        ms.load_programs(file, key=b"another")
    files = entries(file)
    del files[bundle.SIGNATURE]
    write(file, files)
    with pytest.raises(ms.ArgumentError, match="not signed"):
        ms.load_programs(file, key=b"secret")
    assert not written(folder)
    assert ms.load_programs(file) > 0  # nobody asked for a signature


@pytest.mark.parametrize("damage", ["content", "missing", "manifest", "cut off", "no zip", "a program changed"])
def test_what_is_damaged_is_refused_whole(file, folder, damage):
    files = entries(file)
    last = [*files][-1]
    if damage == "content":
        files[last] += b"1"
    elif damage == "missing":
        del files[last]
    elif damage == "manifest":
        files[bundle.MANIFEST] = b"[1]"
    write(file, files)
    if damage in ("cut off", "no zip"):
        file.write_bytes(file.read_bytes()[:-50] if damage == "cut off" else b"#!/bin/sh")
    elif damage == "a program changed":
        content = bytearray(file.read_bytes())
        content[file.stat().st_size // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(ms.ArgumentError, match=r"run\.msc"):
        ms.load_programs(file)
    assert not written(folder)


def test_a_cache_that_others_can_write_takes_nothing_in(file, folder):
    (folder / "programs").mkdir(parents=True)
    (folder / "programs").chmod(0o777)
    with pytest.raises(ms.ArgumentError, match="cannot be written"):
        ms.load_programs(file)


def test_nothing_to_save_is_said(tmp_path):
    with pytest.raises(ms.ArgumentError, match="no programs to save"):
        ms.save_programs(tmp_path / "run.msc")
    assert not (tmp_path / "run.msc").exists()
    with pytest.raises(ms.ArgumentError, match="there is no folder"):
        ms.save_programs(tmp_path / "absent" / "run.msc")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "x.msc"], "which script"),
        (["import", "absent.msc"], "cannot read"),
        (["import", "."], "cannot read"),
    ],
)
def test_wrong_uses_of_the_commands(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["cache", *arguments]) == 2
    assert said in capsys.readouterr().err
