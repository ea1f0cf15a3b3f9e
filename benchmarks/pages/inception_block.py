"""What ``docs/streams.md`` shows: an Inception block from FX to a plan. ``python -m benchmarks.pages.inception_block``.

It writes the pictures, and the texts between the marks of the page. No device is needed, and nothing is measured.
"""

from __future__ import annotations

import argparse
import re
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


def draw_dependencies(graph: KernelGraph) -> str:
    """The kernels and what they need, as a Mermaid flow chart."""
    lines = ["flowchart LR"]
    lines += [f'  {kernel.id}["{kernel.id} {", ".join(kernel.ops)}"]' for kernel in graph.kernels]
    for kernel, found in enumerate(derive_dependencies(graph)):
        lines += [f"  {each.kernel} --> {kernel}" for each in found]
    return "\n".join(lines)


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
        "dependencies": draw_dependencies(graph),
    }
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
