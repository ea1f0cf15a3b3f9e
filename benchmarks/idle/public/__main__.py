"""``millstream profile`` on training programs as people write them, none of which knows of it.

``resnet`` (torchvision, JPEG files), ``decoder`` (a GPT-2 of transformers in a loop of one's own), ``lightning_module``
(a vision transformer of timm's), ``run_clm`` (Hugging Face's Trainer). All data are made on the spot. Of each: the
report as text, JSON, page and picture; what share of a step nobody knows; and whether the outcome names a line of the
program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.idle.suite import share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_UNKNOWN = 0.10
KINDS = ("json", "html", "svg")


@dataclass(frozen=True)
class Program:
    """A script, and arguments that make it short on a CPU."""

    name: str
    on_cpu: str


PROGRAMS = (
    Program("resnet", "--arch resnet18 --batch-size 4 --image-size 64 --file-size 400 --steps 30 --workers 1"),
    Program("decoder", "--layers 2 --width 128 --block 64 --batch 4 --steps 40"),
    Program("lightning_module", "--model vit_tiny_patch16_224 --image-size 64 --batch-size 4 --steps 30 --workers 1"),
    Program("run_clm", "--layers 2 --width 64 --block 64 --batch 4 --steps 40"),
)


def run(program: Program, out: Path, *, on_gpu: bool, timeout_s: float) -> dict[str, Any]:
    """Profile one program in its own process; its report goes to ``out``, and its row of the table is returned."""
    files = {kind: out / f"{program.name}.{kind}" for kind in KINDS}
    saves = [part for file in files.values() for part in ("--save", str(file))]
    command = [sys.executable, "-m", "millstream", "profile", *saves, str(HERE / f"{program.name}.py")]
    command += [] if on_gpu else program.on_cpu.split()
    # Hubs are not asked for anything, one device trains, and what PYTHONPATH has is found from every folder.
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | own
    began = time.monotonic()
    with (out / f"{program.name}.out.txt").open("wb") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
            )
            code, said = done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            code, said = -1, error.stderr or b""
    text = said.decode(errors="replace")
    (out / f"{program.name}.txt").write_text(text, encoding="utf-8")
    row = {"program": program.name, "code": code, "took_s": time.monotonic() - began}
    if not files["json"].exists():
        return row | {"error": (text.strip().splitlines() or ["no output"])[-1]}
    return row | judge(json.loads(files["json"].read_text(encoding="utf-8")), HERE / f"{program.name}.py")


def judge(report: dict[str, Any], script: Path) -> dict[str, Any]:
    """What a report says, in short."""
    leading = report["leading"]
    site = leading["site"] if leading else None
    return {
        "outcome": f"{report['severity']} {leading['cause'] if leading else ''}".strip(),
        "why_unreliable": report["why_unreliable"],
        "line": f"{Path(site['file']).name}:{site['line']}" if site else "",
        "is_own_line": site is not None and Path(site["file"]).name == script.name,
        "step_ms": report["usual_step_ns"] / 1e6,
        "num_steps": report["num_steps"],
        "idle": report["idle"],
        "unknown": report["unknown"],
        "located": report["located"],
        "looking_slowed": report["looking_slowed"],
        "always_on": report["always_on"],
    }


def to_markdown(rows: Sequence[dict[str, Any]], device: str) -> str:
    """A table of all."""
    told = [row for row in rows if "outcome" in row]
    known = sum(row["unknown"] <= MOST_UNKNOWN for row in told)
    own = sum(row["is_own_line"] for row in told)
    head = ("program", "outcome", "line", "step, ms", "idle", "unknown", "lines found", "window slower", "always on")
    lines = [
        "# Programs as people write them",
        "",
        f"`python -m benchmarks.idle.public` on {device}, torch {torch.__version__}, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}.",
        "",
        f"- At most {share(MOST_UNKNOWN)} of a step is unknown: {known} of {len(rows)}.",
        f"- The outcome names a line of the program's own: {own} of {len(rows)}.",
        "- *Window slower*: steps under the device's profiler against those after it. *Always on*: hooks and samples.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in rows:
        if "outcome" not in row:
            lines.append(f"| {row['program']} | no report: {row['error'][:200]} |" + " |" * (len(head) - 2))
            continue
        shares = (share(row[name], 1) for name in ("idle", "unknown", "located", "looking_slowed", "always_on"))
        cells = (row["program"], row["outcome"], row["line"], f"{row['step_ms']:.3g}", *shares)
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {row['program']}: {row['why_unreliable']}" for row in told if row["why_unreliable"]]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, and write the table after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle.public", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for reports; the table goes there too")
    parser.add_argument("--programs", default=",".join(program.name for program in PROGRAMS))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each")
    options = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for program in PROGRAMS:
        if program.name not in options.programs.split(","):
            continue
        rows.append(run(program, options.out, on_gpu=on_gpu, timeout_s=options.timeout))
        print(json.dumps(rows[-1]), flush=True)
        written = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
        (options.out / "idle_public.json").write_text(written + "\n", encoding="utf-8")
        (options.out / "idle_public.md").write_text(to_markdown(rows, device), encoding="utf-8")
    print(to_markdown(rows, device))
    return int(not all("outcome" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
