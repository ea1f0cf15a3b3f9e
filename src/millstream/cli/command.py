"""Arguments of the command line, and which function each command calls, imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millstream import __version__
from millstream.cli.exits import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from millstream.errors import ArgumentError

SCRIPT_COMMANDS = ("profile", "syncs", "warm", "simulate")
"""Options, a script, and all that follows is the script's own."""

WITH_VALUE = ("--save", "--fail-if", "--devices", "--network", "--per-host", "--fit", "--mode", "--key")
MOST_DEVICES = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code: 0, 1 when the doctor found something broken, 2 for bad input, 130 when interrupted.
    """
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        return arguments.run(arguments)
    except ArgumentError as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("millstream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(argv: list[str]) -> argparse.Namespace:
    is_export = argv[:2] == ["cache", "export"]
    if is_export or (argv and argv[0] in SCRIPT_COMMANDS):
        end = _end_of_options(argv, _end_of_options(argv, 2) + 1) if is_export else _end_of_options(argv, 1)
        own = argparse.Namespace(target=argv[end] if end < len(argv) else "", arguments=argv[end + 1 :])
    else:  # a script's own arguments stand last; argparse would end their list at the first option before them
        end = argv.index("--") if "--" in argv else len(argv)
        own = argparse.Namespace(arguments=argv[end + 1 :])
    return make_parser().parse_args(argv[:end], own)


def _end_of_options(argv: list[str], position: int) -> int:
    """Position of the next argument that is neither one of our options nor an option's value: the script, or a file."""
    while position < len(argv):
        if argv[position] == "--":
            return position + 1
        if not argv[position].startswith("-"):
            break
        if argv[position] == "--merge":
            return len(argv)
        has_value = argv[position] in WITH_VALUE or (argv[position] == "--json" and argv[0] == "syncs")
        position += 2 if has_value else 3 if argv[position] == "--compare" else 1
    return min(position, len(argv))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; parsed arguments carry their function as ``run``."""
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Look whether everything works here, and show what the steps and models of a script became, what "
        "they wait for, and what more devices would give.",
    )
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_explain(commands)
    _add_profile(commands)
    _add_simulate(commands)
    _add_cache(commands)
    doctor = commands.add_parser(
        "doctor",
        help="say what works here and what would fall back",
        description="Say what works on this machine and what would fall back, and try it: a step and a model on each "
        "kind of device, compared with eager.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--quick", action="store_true", help="look only; compile nothing")
    return parser


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="show the graph of a training step or model: explain script.py:object",
        description="Run a script, to its end or until Ctrl-C, and show what ms.step or ms.compile made of a step or "
        "model in it.",
    )
    explain.usage = "%(prog)s [-h] [--json] [--save FILE] [--measure] SCRIPT.py:OBJECT [-- ARG ...]"
    explain.set_defaults(run=_explain)
    explain.add_argument(
        "target", metavar="SCRIPT.py:OBJECT", help="as script.py:train_step, or script.py:trainer.model"
    )
    explain.add_argument("--json", action="store_true", help="print it as JSON")
    explain.add_argument(
        "--save", type=Path, metavar="FILE", help="draw it into a .html, .svg or .json (Perfetto) file too"
    )
    explain.add_argument("--measure", action="store_true", help="run it some more times, and time each kernel")


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="say why the device idles in a script: each cause with its line, and what mending it would give",
        description="Run a script as it is, and say on the standard error output why the device idled: each cause with "
        "the line, its time, what to do, and what that would give. All that follows SCRIPT is the script's own.",
    )
    own = "[-h] [-m] [--save FILE] [--fail-if COND] SCRIPT.py [ARG ...]"
    profile.usage = f"%(prog)s {own} | [--fail-if COND] --compare BEFORE AFTER | --merge FILE FILE ..."
    profile.set_defaults(run=_profile)
    profile.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    profile.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="write the report into a .html, .svg, .json or .trace.json (Perfetto) file too; may be repeated",
    )
    profile.add_argument(
        "--fail-if",
        metavar="COND",
        action="append",
        default=[],
        help="exit with 3 where the report says so, as in 'idle>20%%', 'data>5%%' or 'step>120ms', and with --compare "
        "where AFTER does, or 'slower>5%%'; may be repeated",
    )
    profile.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help=".json reports of the ranks of one run; runs nothing"
    )
    profile.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two .json reports; runs nothing"
    )

    syncs = commands.add_parser(
        "syncs",
        help="list what makes the host wait for the device in a script: reads, copies, graph breaks, with lines",
        description="Run a script, slowly, and list on the standard error output what makes the host wait for the "
        "device: kind, count, line, and what to write instead. All that follows SCRIPT is the script's own.",
    )
    syncs.usage = "%(prog)s [-h] [-m] [--json FILE] SCRIPT.py [ARG ...]"
    syncs.set_defaults(run=_syncs)
    syncs.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    syncs.add_argument("--json", type=Path, metavar="FILE", help="write the list as data, too")


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "predict a step on other numbers of devices, from its kernel graph and a model of the network"
    simulate = commands.add_parser(
        "simulate",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. SCRIPT runs on this machine as the first of many processes that are "
        "made up, to its end or until Ctrl-C; all that follows it is its own. It has to call a data-parallel step at "
        "least three times: one with a DistributedDataParallel model, or made by @ms.step(data_parallel=True). "
        "FILE.json is what ms.explain(step).save('FILE.json') wrote. With --mode place SCRIPT runs as it is, and the "
        "kernels of what it has compiled are divided among the devices of one process.",
    )
    own = "[-h] [--mode place] [--devices N,N] [--network LINK[,LINK]] [--per-host N] [--fit FILE] [--json]"
    simulate.usage = f"%(prog)s {own} SCRIPT.py [ARG ...] | FILE.json"
    simulate.set_defaults(run=_simulate)
    simulate.add_argument(
        "--devices", type=_counts, default=(1, 2, 4, 8), metavar="N,N", help="numbers of devices (1,2,4,8)"
    )
    simulate.add_argument(
        "--network",
        default="nvlink",
        metavar="LINK[,LINK]",
        help="what connects the devices of a host, and hosts: nvlink, gloo, free, ib-GBITS, eth-GBITS (%(default)s)",
    )
    simulate.add_argument("--per-host", type=_count, default=8, metavar="N", help="devices of a host (%(default)s)")
    simulate.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="fit the first link to what python -m benchmarks.sweeps.collectives wrote",
    )
    simulate.add_argument(
        "--mode",
        choices=("data-parallel", "place"),
        default="data-parallel",
        help="a process for each device, or one process whose kernels go to all of them (%(default)s)",
    )
    simulate.add_argument("--json", action="store_true", help="print it as JSON")


def _count(text: str) -> int:
    """Parse a number of devices.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not (text.isdecimal() and 0 < int(text) <= MOST_DEVICES):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices.

    Raises:
        argparse.ArgumentTypeError: They are none.
    """
    try:
        return tuple(map(_count, text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of devices, as in 8,64,512") from error


def _add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    warm = commands.add_parser(
        "warm",
        help="run a script, so that later processes find on disk what it compiles",
        description="Run a script to its end or until Ctrl-C, and say what it has put into the cache, where later "
        "processes find it. All that follows SCRIPT is the script's own.",
    )
    warm.usage = "%(prog)s [-h] [-m] SCRIPT.py [ARG ...]"
    warm.set_defaults(run=_warm)
    warm.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")

    cache = commands.add_parser(
        "cache",
        help="show what lies in the cache, limit or clear it, take programs to other machines",
        description="Show what lies in the cache: programs, choices, measurements, native parts.",
    )
    cache.set_defaults(run=_cache)
    cache.add_argument("--limit", metavar="BYTES", help="so much may stay, as in 500M; what is unused for longest goes")
    cache.add_argument("--clear", action="store_true", help="remove all of it")
    files = cache.add_subparsers(metavar="export|import")
    export = files.add_parser(
        "export",
        help="run a script, and write what it compiles into a file",
        description="Run a script to its end or until Ctrl-C, and write the programs that it has compiled or found, "
        "with their machine code, into FILE. All that follows SCRIPT is the script's own.",
    )
    export.usage = "%(prog)s [-h] [-m] [--key KEYFILE] FILE SCRIPT.py [ARG ...]"
    export.set_defaults(run=_export)
    export.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    take = files.add_parser(
        "import",
        help="take in such a file, so that its programs are not compiled here",
        description="Put the programs of FILE into the cache. It holds code that is run: take in only what you would "
        "install a package from.",
    )
    take.set_defaults(run=_import)
    for parser in (export, take):
        parser.add_argument("--key", metavar="KEYFILE", type=Path, help="a file with a secret that signs FILE")
        parser.add_argument("file", metavar="FILE", type=Path, help="as run.msc")


def _explain(arguments: argparse.Namespace) -> int:
    from millstream.cli.explain import Showing, explain

    if not arguments.target.partition(":")[0].endswith(".py"):
        raise ArgumentError(
            f"{arguments.target!r} is nothing to explain: give SCRIPT.py:OBJECT, as in train.py:train_step."
        )
    return explain(arguments.target, arguments.arguments, Showing(arguments.json, arguments.save, arguments.measure))


def _simulate(arguments: argparse.Namespace) -> int:
    from millstream.cli.simulate import Asked, simulate

    if not arguments.target:
        raise ArgumentError("say what to simulate: millstream simulate script.py [ARG ...], or a .json file")
    fields = arguments.devices, arguments.network, arguments.per_host, arguments.fit, arguments.json, arguments.mode
    return simulate(arguments.target, arguments.arguments, Asked(*fields))


def _profile(arguments: argparse.Namespace) -> int:
    from millstream.cli.profile import compare_files, merge_files, profile

    if arguments.merge:
        return merge_files(arguments.merge)
    if arguments.compare:
        before, after = arguments.compare
        return compare_files(before, after, arguments.fail_if)
    if not arguments.target:
        raise ArgumentError("say which script to run: millstream profile script.py [ARG ...]")
    return profile(
        arguments.target,
        arguments.arguments,
        as_module=arguments.as_module,
        save=arguments.save,
        fail_if=arguments.fail_if,
    )


def _syncs(arguments: argparse.Namespace) -> int:
    from millstream.cli.profile import list_syncs

    if not arguments.target:
        raise ArgumentError("say which script to run: millstream syncs script.py [ARG ...]")
    return list_syncs(arguments.target, arguments.arguments, as_module=arguments.as_module, save=arguments.json)


def _warm(arguments: argparse.Namespace) -> int:
    from millstream.cli.cached import warm

    if not arguments.target:
        raise ArgumentError("say which script to run: millstream warm script.py [ARG ...]")
    return warm(arguments.target, arguments.arguments, as_module=arguments.as_module)


def _cache(arguments: argparse.Namespace) -> int:
    from millstream.cli.cached import show_cache

    return show_cache(limit=arguments.limit, clear=arguments.clear)


def _export(arguments: argparse.Namespace) -> int:
    from millstream.cli.cached import export

    if not arguments.target:
        raise ArgumentError("say which script to run: millstream cache export run.msc script.py [ARG ...]")
    return export(
        arguments.file, arguments.target, arguments.arguments, as_module=arguments.as_module, key=arguments.key
    )


def _import(arguments: argparse.Namespace) -> int:
    from millstream.cli.cached import take_in

    return take_in(arguments.file, arguments.key)


def _doctor(arguments: argparse.Namespace) -> int:
    from millstream.cli.doctor import examine

    return examine(tries=not arguments.quick)
