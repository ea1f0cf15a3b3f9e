"""What ``docs/streams.md`` shows: an Inception block from FX to a plan. ``python -m benchmarks.pages.inception_block``.

It writes the pictures, and the texts between the marks of the page. No device is needed, and nothing is measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan, find_races
from millstream.cost import Costs, Roofline
from millstream.graph import KernelGraph, Plan, Wait, derive_dependencies, format_graph, format_plan
from millstream.report import Explanation, ProgramReport
from millstream.schedule import peak_bytes, plan_graph
from millstream.testing import drop_step

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "streams.md"
FIGURES = ROOT / "docs" / "figures"
CORES = 4  # of the computer that the plans are made for; a kernel runs on one of them


# --- the block
class Block(nn.Module):
    """The block of Inception-v3 at 35 × 35, batch normalisation folded into the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(192, 64, 1)
        self.narrow, self.five = nn.Conv2d(192, 48, 1), nn.Conv2d(48, 64, 5, padding=2)
        self.entry, self.three = nn.Conv2d(192, 64, 1), nn.Conv2d(64, 96, 3, padding=1)
        self.again, self.pooled = nn.Conv2d(96, 96, 3, padding=1), nn.Conv2d(192, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = F.relu(self.one(x))
        five = F.relu(self.five(F.relu(self.narrow(x))))
        three = F.relu(self.again(F.relu(self.three(F.relu(self.entry(x))))))
        pooled = F.relu(self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1)))
        return torch.cat([one, five, three, pooled], 1)


# ---


def lower_block() -> tuple[str, KernelGraph]:
    """Return the operators of the block as text, and its kernels."""
    torch.manual_seed(0)
    block, x = Block().eval(), torch.randn(1, 192, 35, 35)
    compiled = ms.compile(block, engine="serial")
    with torch.no_grad():
        compiled(x)
    (executable,) = executables(compiled)
    kernels = executable.plan.graph.kernels
    here = [replace(kernel, source=kernel.source.replace(f"{ROOT}/", "")) for kernel in kernels]
    return operators_of(block, x), replace(executable.plan.graph, name="Inception block", kernels=tuple(here))


def operators_of(block: nn.Module, x: torch.Tensor) -> str:
    """The block as an FX graph of aten operators, one a line."""
    nodes = torch.export.export(block, (x,)).run_decompositions().graph.nodes
    calls = [node for node in nodes if node.op == "call_function"]
    return "\n".join(f"{node.name} = {node.target}({', '.join(map(str, node.all_input_nodes))})" for node in calls)


def costs_of(graph: KernelGraph) -> Costs:
    """Roofline times on one core; a kernel then takes its core's part of the computer."""
    alone = Roofline().estimate(graph)
    shares = (
        replace(cost, compute_share=cost.compute_share / CORES, memory_share=cost.memory_share / CORES)
        for cost in alone.kernels
    )
    return Costs(tuple(shares), alone.wait_ns)


def draw_dependencies(names: Sequence[str], needs: Sequence[Sequence[int]]) -> str:
    """Kernels and what each needs, as a drawing: a column for each depth, a row for each chain."""
    depths: list[int] = []
    rows: list[int] = []
    ends: list[int] = []  # of each row: its last kernel
    for kernel, needed in enumerate(needs):  # program order: what a kernel needs comes before it
        depths.append(1 + max((depths[each] for each in needed), default=-1))
        row = next((rows[each] for each in needed if ends[rows[each]] == each), len(ends))
        rows.append(row)
        ends[row : row + 1] = [kernel]
    left = [12 + 142 * depth for depth in depths]
    middle = [26 + 40 * row for row in rows]
    width, height = max(left) + 140, max(middle) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>text { font: 12px sans-serif; fill: #222222 } .box { fill: #eef1f4; stroke: #8a949e }",
        ".arrow { fill: none; stroke: #555f69 } .head { fill: #555f69 } .paper { fill: #ffffff }",
        "@media (prefers-color-scheme: dark) { text { fill: #dde3e8 } .box { fill: #20262c; stroke: #6b7680 }",
        ".arrow { stroke: #aab4be } .head { fill: #aab4be } .paper { fill: #14181c } }</style>",
        '<defs><marker id="head" orient="auto" markerWidth="6" markerHeight="6" refX="5" refY="3">'
        '<path class="head" d="M0 0L6 3L0 6z"/></marker></defs>',
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    for kernel, needed in enumerate(needs):
        for each in needed:
            start, end = left[each] + 122, left[kernel] - 1
            bend = f"H{end - 19}C{end - 5} {middle[each]} {end - 14} {middle[kernel]} {end} {middle[kernel]}"
            lines.append(f'<path class="arrow" marker-end="url(#head)" d="M{start} {middle[each]}{bend}"/>')
    for kernel, name in enumerate(names):
        lines.append(f'<rect class="box" x="{left[kernel]}" y="{middle[kernel] - 14}" width="122" height="28" rx="4"/>')
        lines.append(f'<text x="{left[kernel] + 8}" y="{middle[kernel] + 4}">{kernel} {name}</text>')
    return "\n".join([*lines, "</svg>\n"])


def section(text: str, head: str) -> str:
    """The lines indented below a heading of the text form."""
    found = re.search(rf"^{head}\n((?:  .*\n)*)", text, re.MULTILINE)
    assert found, f"{head!r} heads nothing"
    return found[1].rstrip()


def report_of(plan: Plan, costs: Costs) -> ProgramReport:
    """Describe a plan that nothing has run."""
    return ProgramReport(plan, "inference", "simulator", peak_bytes(plan), 0.0, costs=costs)


def fill(page: str, name: str, text: str) -> str:
    """Put a text into the block after its mark."""
    mark = rf"(<!-- {name} -->\n```\w*\n).*?^```$"
    page, replaced = re.subn(mark, lambda found: f"{found[1]}{text}\n```", page, flags=re.DOTALL | re.MULTILINE)
    assert replaced == 1, f"the page has {replaced} places for {name!r}"
    return page


def main() -> None:
    argparse.ArgumentParser("python -m benchmarks.pages.inception_block", description=__doc__).parse_args()
    operators, graph = lower_block()
    costs = costs_of(graph)
    plans = {streams: plan_graph(graph, costs, streams) for streams in (1, 4)}
    texts = {
        "block": Path(__file__).read_text(encoding="utf-8").split("# --- the block\n")[1].split("\n\n\n# ---")[0],
        "operators": operators,
        "kernels": section(format_graph(graph), "kernels"),
    }
    needs = [[each.kernel for each in found] for found in derive_dependencies(graph)]
    drawing = draw_dependencies([", ".join(kernel.ops) for kernel in graph.kernels], needs)
    (FIGURES / "inception_dependencies.svg").write_text(drawing, encoding="utf-8")
    for streams, plan in plans.items():
        check_plan(plan)
        report = report_of(plan, costs)
        Explanation("Inception block", (report,)).save(FIGURES / f"inception_{streams}.svg")
        texts[f"report of {streams}"] = "\n".join(report.text(limit=0)[1:-2])
    texts["plan"] = section(format_plan(plans[4]), "steps")
    last_wait = max(position for position, step in enumerate(plans[4].steps) if isinstance(step, Wait))
    texts["race"] = "\n".join(str(race) for race in find_races(drop_step(plans[4], last_wait)))
    page = PAGE.read_text(encoding="utf-8")
    for name, text in texts.items():
        page = fill(page, name, text)
    PAGE.write_text(page, encoding="utf-8")
    print(PAGE, *sorted(FIGURES.glob("inception_*.svg")), sep="\n")


if __name__ == "__main__":
    main()
