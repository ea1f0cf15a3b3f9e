"""``millstream profile`` and ``syncs``: the script's output and exit code are its own, however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from millstream.cli import main
from millstream.cli.profile import EXIT_CONDITION
from millstream.errors import ArgumentError
from millstream.insight import ProfiledStep, Recording, Sample, analyse
from millstream.report.idle import Condition, compare
from tests.clocks import HANG_S

STEPS = """
    import sys, torch
    from torch import nn
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    def train(steps):
        for _ in range(steps):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in a process of its own, plainly and profiled."""

    def run(body, *options, command="profile", before=STEPS, arguments=(), plain=False):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(before) + textwrap.dedent(body), encoding="utf-8")
        words = [] if plain else ["-m", "millstream", command, *options]
        return subprocess.run(
            [sys.executable, *words, str(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    return run


def test_output_random_numbers_and_exit_code_are_the_scripts(run):
    body = """
        train(5)
        print(sys.argv[1:], torch.rand(2).tolist(), float(model.weight.detach().sum()), __name__, __file__)
        sys.exit(7)
    """
    seeded = "import torch\ntorch.manual_seed(0)\n" + textwrap.dedent(STEPS)
    options = {"before": seeded, "arguments": ("--lr", "3")}
    plain, profiled = run(body, plain=True, **options), run(body, **options)
    assert profiled.stdout == plain.stdout
    assert profiled.returncode == plain.returncode == 7
    assert "CPU, 3 steps," in profiled.stderr  # of five, one begins the first and one warms up


SLOW_LOADER = """
import time
class Slow:
    def __len__(self):
        return 10
    def __getitem__(self, number):
        time.sleep(0.01)
for _ in torch.utils.data.DataLoader(Slow(), batch_size=None):
    train(1)
"""

GROUPED = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("body", "code", "steps", "said"),
    [
        ("train(5)\nraise ValueError('broken')", 1, "3 steps", "ValueError: broken"),
        ("train(5)\nraise KeyboardInterrupt", 130, "3 steps", "KeyboardInterrupt"),
        (GROUPED + "train(5)\nraise ValueError('broken')", 1, "3 steps", "ValueError: broken"),
        ("train(5)\nsys.exit('no more')", 1, "3 steps", "no more"),
        ("train(5)\nsys.exit(-1)", 255, "3 steps", ""),
        ("print('nothing')", 0, "no steps", "No diagnosis: no step was seen"),
        ("train(1)", 0, "no steps", "No diagnosis: 1 steps are too few"),
        ("import threading\nthreading.Thread(target=train, args=(8,)).start()", 0, "6 steps", ""),
        (
            "from concurrent.futures import ThreadPoolExecutor as E\ne = E(1)\ne.submit(train, 8).result()",
            0,
            "6 steps",
            "",
        ),
        ("syntax error", 1, "no steps", "SyntaxError"),
        (SLOW_LOADER, 0, "8 steps", "Reliable.\n"),
    ],
)
def test_however_it_ends_there_is_a_report(body, code, steps, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STEPS) + body, encoding="utf-8")
    before = sys.argv[:], sys.path[:]
    assert main(["profile", str(script)]) == code
    told = capsys.readouterr().err
    assert said in told
    assert f"CPU, {steps}," in told
    assert "millstream/cli/running.py" not in told  # a traceback begins in the script
    assert (sys.argv, sys.path) == before


def test_forked_child_reports_nothing_unless_it_profiles_itself(run):
    done = run(
        """
        import os
        import millstream as ms
        train(5)
        child = os.fork()
        if child == 0:
            with ms.profile() as p:
                train(6)
            print("child", len(p.findings.recording.steps))
            sys.exit(5)
        print("child gave", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert done.returncode == 0
    assert sorted(done.stdout.split("\n")) == ["", "child 5", "child gave 5"]
    assert done.stderr.count("profiling cost") == 1
    assert "CPU, 3 steps," in done.stderr


SCHEDULE = "schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)"


@pytest.mark.parametrize(
    ("body", "out", "steps"),
    [
        (
            f"""
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], {SCHEDULE}) as profiler:
                for _ in range(9):
                    train(1)
                    profiler.step()
            print(any("addmm" in event.key for event in profiler.key_averages()))
            """,
            "True",
            7,
        ),
        (
            """
            import cProfile
            with cProfile.Profile() as profiler:
                train(5)
            print(any(entry.code is train.__code__ for entry in profiler.getstats()))
            """,
            "True",
            3,
        ),
        (
            """
            import millstream as ms
            @ms.profile
            def short():
                train(5)
            short()
            with ms.profile() as p:
                short()
            print(len(p.findings.recording.steps))
            """,
            "4",
            8,
        ),
    ],
)
def test_other_profiler_of_the_script_works_as_ever(body, out, steps, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STEPS) + textwrap.dedent(body))
    assert main(["profile", str(script)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert f"CPU, {steps} steps," in told.err


def test_interrupt_from_outside_is_the_scripts_and_reported(tmp_path):
    script = tmp_path / "endless.py"
    heeds = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a shell's background
    )
    script.write_text(heeds + textwrap.dedent(STEPS) + "train(5)\nprint('ready', flush=True)\nwhile True: train(1)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "millstream", "profile", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    try:
        _, told = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.search(r"CPU, \d+ steps,", told)


def test_reports_are_saved_compared_and_held_against_bounds(tmp_path, capsys, monkeypatch):
    page, data, trace = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "r.trace.json"
    body = "import time\nfor _ in range(12):\n    train(1)\n    time.sleep(0.01)\n"
    options = [word for path in (page, data, trace) for word in ("--save", str(path))]
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STEPS) + body)
    code = main(["profile", *options, "--fail-if", "idle>20%", "--fail-if", "gc>90%", str(script)])
    assert code == EXIT_CONDITION
    assert "idle>20% holds" in capsys.readouterr().err
    report = json.loads(data.read_text())
    assert report["num_steps"] == 9
    documented = Path(__file__, "../../../docs/idle_report.md").resolve().read_text(encoding="utf-8")
    assert all(f"`{key}`" in documented for key in (*report, *report["rows"][0]))
    assert report["idle"] > 0.2
    text = page.read_text()
    assert "src=" not in text
    assert text.count("<title>step ") >= report["num_steps"]
    assert page.stat().st_size < 2_000_000
    assert any(event["name"] == "step 0" for event in json.loads(trace.read_text())["traceEvents"])
    assert "as fast" in compare(report, report)


@pytest.mark.parametrize("code", [0, 4])
def test_without_a_diagnosis_no_condition_fails_a_script(tmp_path, capsys, monkeypatch, code):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({code})\n")
    assert main(["profile", "--fail-if", "idle>20%", "--fail-if", "step<1ms", str(script)]) == code
    told = capsys.readouterr().err
    assert "cannot tell whether idle>20%, step<1ms holds: no step was seen" in told


def test_bad_options_are_told_before_the_script_runs(tmp_path, capsys):
    script = tmp_path / "s.py"
    script.write_text("print('ran')")
    for options, said in (
        (["--fail-if", "speed>3"], "is no condition"),
        (["--fail-if", "slower>3%"], "takes two reports"),
        (["--save", "report.pdf"], "must end with"),
        (["--save", str(tmp_path / "no" / "r.html")], "no folder"),
    ):
        assert main(["profile", *options, str(script)]) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert told.out == ""
    assert main(["profile", "nowhere.py"]) == 2
    assert main(["profile", "-m", "torch.distributed.run", str(script)]) == 2
    assert "torchrun ... -m millstream profile" in capsys.readouterr().err
    assert main(["profile"]) == 2
    assert main(["profile", "--compare", str(script), str(script)]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_what_comes_too_late_is_told_of_and_a_report_that_cannot_be_written_keeps_the_exit_code(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    folder = tmp_path / "reports"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nos.environ['OMP_NUM_THREADS'] = '1'\nos.rmdir({str(folder)!r})\nsys.exit(4)\n")
    assert main(["profile", "--save", str(folder / "r.json"), str(script)]) == 4
    told = capsys.readouterr().err
    assert "the script sets OMP_NUM_THREADS, which PyTorch reads earlier here" in told
    assert "cannot write" in told


@pytest.mark.parametrize("as_module", [False, True])
def test_package_runs_as_python_runs_it(as_module, tmp_path):
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys\nprint(sys.argv, __name__, __package__, sys.path[0], sys.path[1])\n"
    )
    words = ["-m", "job"] if as_module else [str(package)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            [sys.executable, *command, *words, "--lr", "3"],
            capture_output=True,
            check=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        ).stdout.strip()
        for command in ([], ["-m", "millstream", "profile"])
    ]
    assert said[0] == said[1] != ""


def test_syncs_lists_lines_and_keeps_the_exit_code(tmp_path, capsys, monkeypatch):
    saved = tmp_path / "s.json"
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    body = """
        for _ in range(3):
            train(1)
            loss = model.weight.detach().sum().item()  # reads
        sys.exit(4)
        """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STEPS) + textwrap.dedent(body))
    assert main(["syncs", "--json", str(saved), str(script)]) == 4
    assert "# reads" in capsys.readouterr().err
    rows = json.loads(saved.read_text())["rows"]
    assert [row["count"] for row in rows] == [3]


@pytest.mark.parametrize("text", ["idle", "idle>20", "step>20%", "step>5", "data>1s", "data 5%", "idle>1.2.3%", ""])
def test_condition_that_is_none_is_refused(text):
    with pytest.raises(ArgumentError, match=r"condition|bounded|number"):
        Condition.parse(text)


def test_condition_compares_shares_and_lengths():
    report = {"step_ns": 50e6, "num_steps": 2, "idle": 0.3, "idle_ns_by_cause": {"data": 20_000_000}, "exposed_ns": {}}
    assert Condition.parse("idle > 20%").holds(report)
    assert not Condition.parse("idle<20%").holds(report)
    assert Condition.parse("data>=20%").holds(report)
    assert not Condition.parse("host waits>0%").holds(report)
    assert Condition.parse("step>40ms").holds(report)
    assert Condition.parse("Step <= 0.05 s").holds(report)
    assert not Condition.parse("step>50000us").holds(report)


def test_comparison_fails_where_the_second_report_is_slower(tmp_path, capsys):
    steps = tuple(ProfiledStep(at * 10**8, (at + 1) * 10**8) for at in range(12))
    looks = tuple(Sample(0, step.start_ns, step.end_ns, (), 10**8, 0, False) for step in steps)
    report = analyse(Recording("train.py", end_ns=12 * 10**8, steps=steps, samples=looks)).to_dict()
    reports = {"before": report, "after": report | {"usual_step_ns": 106e6}, "bad": report | {"why_unreliable": "lost"}}
    for name, each in reports.items():
        (tmp_path / name).write_text(json.dumps(each))

    def compared(condition, *names):
        return main(["profile", "--fail-if", condition, "--compare", *(str(tmp_path / name) for name in names)])

    assert compared("slower>5%", "before", "after") == EXIT_CONDITION
    assert "slower>5% holds" in capsys.readouterr().err
    assert compared("slower>7%", "before", "after") == 0
    assert compared("step>105ms", "before", "after") == EXIT_CONDITION
    assert compared("slower>5%", "after", "before") == 0
    assert compared("slower>5%", "bad", "after") == 0
    told = capsys.readouterr()
    assert "note: before is unreliable: lost" in told.out
    assert "cannot tell whether slower>5% holds: lost" in told.err
