"""The command ``simulate``: what a step would take on other numbers of devices, data-parallel or placed on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.cost import Network, Roofline, TimedReduction, fit_link, parse_network
from millstream.errors import ArgumentError
from millstream.report.placement_report import PlacementReport
from millstream.report.saved import SavedStep, read_steps
from millstream.report.scaling_table import ScalingReport


@dataclass(frozen=True)
class Asked:
    """The simulation that is asked for.

    Attributes:
        counts: Numbers of devices.
        network: Links, from within a host outwards.
        per_host: Devices of a host.
        fit: A sweep of collectives, to which the first link is fitted.
        as_json: As data instead of words.
        mode: ``data-parallel``, a process for each device; or ``place``, one process whose kernels go to all of them.
    """

    counts: tuple[int, ...]
    network: str
    per_host: int
    fit: Path | None = None
    as_json: bool = False
    mode: str = "data-parallel"


def simulate(target: str, arguments: Sequence[str], asked: Asked) -> int:
    """Print what the steps of a script, or of a file, would take; return the exit code.

    Args:
        target: ``script.py``, run as the first of many processes that are made up, or to be placed as it is; or what
            ``save("step.json")`` wrote of a data-parallel step.
        arguments: The script's own.
        asked: On which devices.

    Raises:
        ArgumentError: There is no such file, or no data-parallel step in it.
    """
    name, network = _network(asked)
    network.time_ns("all_reduce", 1, max(asked.counts))  # refuses what the network has not, before a script runs
    path = Path(target)
    reports: Sequence[ScalingReport | PlacementReport]
    if asked.mode == "place":
        reports = _place(target, arguments, asked, network)
    else:
        reports = [ScalingReport(step, network, name, asked.counts) for step in _steps(path, arguments, asked)]
    if asked.as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        print("\n\n".join(report.text() for report in reports))
    return 0


def _steps(path: Path, arguments: Sequence[str], asked: Asked) -> list[SavedStep]:
    """The data-parallel steps of a file or script."""
    if path.suffix == ".json":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"cannot read {path}: {error}") from error
        try:
            return read_steps(text)
        except ArgumentError as error:
            raise ArgumentError(f"cannot simulate {path}: {error}") from error
    return _capture(str(path), arguments, asked)


def read_sweep(text: str) -> list[TimedReduction]:
    """Times of ``python -m benchmarks.sweeps.collectives``, those of captured all-reduces.

    Raises:
        ArgumentError: The text is no such sweep.
    """
    try:
        return [
            TimedReduction(int(each["devices"]), int(each["bytes"]), float(each["ns"]))
            for each in json.loads(text)["times"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"it is no sweep of collectives: {error!r}") from error


def _network(asked: Asked) -> tuple[str, Network]:
    if asked.fit is None:
        return asked.network, parse_network(asked.network, asked.per_host)
    try:
        times = read_sweep(asked.fit.read_text(encoding="utf-8"))
        fitted = fit_link(asked.network.split(",")[0].strip(), times, f"fitted to {asked.fit.name}")
    except (OSError, UnicodeDecodeError, ArgumentError) as error:
        raise ArgumentError(f"cannot fit a link to {asked.fit}: {error}") from error
    return asked.network, parse_network(asked.network, asked.per_host, fitted)


def _place(script: str, arguments: Sequence[str], asked: Asked, network: Network) -> list[PlacementReport]:
    """Run a script as it is, and place what it has compiled.

    Raises:
        ArgumentError: It has compiled nothing, or more devices are asked for than a host has.
    """
    from millstream.api import executables, is_compiled
    from millstream.cli.explain import run_script
    from millstream.engine import find_constraints

    if not script.endswith(".py"):
        raise ArgumentError(f"{script!r} cannot be placed: give a script.py, which says what must stay where it is")
    if max(asked.counts) > network.per_host:
        raise ArgumentError(
            f"{max(asked.counts)} devices of one process are more than a host of {network.per_host} has"
        )
    names = run_script(script, arguments)
    found = [each for value in names.values() if is_compiled(value) for each in executables(value)]
    if not found:
        raise ArgumentError(f"none of the globals of {script} is a compiled step or model that has been called")
    return [
        PlacementReport(
            each.lowered.program.graph,
            each.costs or Roofline().estimate(each.lowered.program.graph),
            each.costs is None,
            find_constraints(each.lowered.program),
            network.within,
            asked.counts,
        )
        for each in found
    ]


def _capture(script: str, arguments: Sequence[str], asked: Asked) -> list[SavedStep]:
    """Run a script among processes that are made up, and return its steps that exchange something."""
    import millstream as ms
    from millstream._torch.distributed.fake_group import among_fake_processes
    from millstream.api import is_compiled
    from millstream.cli.explain import run_script

    size = max(2, min(asked.per_host, max(asked.counts)))
    with among_fake_processes(size):
        names = run_script(script, arguments)
        compiled = [value for value in names.values() if is_compiled(value)]
        reports = [each for value in compiled for each in ms.explain(value).communication]
    if not reports:
        raise ArgumentError(
            f"none of the globals of {script} is a step that exchanges something: call, at least three times, a step "
            "with a DistributedDataParallel model, or one made by @ms.step(data_parallel=True)"
        )
    return [
        SavedStep(each.plan, each.costs, each.is_one_graph, each.is_calculated, each.num_processes) for each in reports
    ]
