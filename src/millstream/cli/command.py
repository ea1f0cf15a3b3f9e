"""Arguments of the command line: ``train``, ``explain`` and ``doctor``, and which function each command calls.

A job is imported only when it runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from millstream import __version__
from millstream.cli.exits import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from millstream.errors import ArgumentError

if TYPE_CHECKING:
    from millstream.cli.training.job import Job

SCRIPT_COMMANDS = (
    "profile",
    "syncs",
    "warm",
    "simulate",
)  # options, a script, and all that follows is the script's own
WITH_VALUE = ("--save", "--fail-if", "--devices", "--network", "--per-host", "--fit")
JOBS = {
    "char-rnn": "a character LSTM, written as a custom cell, on text",
    "digits": "a convolutional network with BatchNorm on scikit-learn's digits",
}
MAX_SEED = 2**32 - 1  # leaves room to mix an epoch into the 64 bits that PyTorch takes


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit code: 0, 1 when compiled and eager losses disagree or the doctor found something broken, 2 for bad
        input and sizes for which memory is too short, 130 when interrupted.
    """
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        return arguments.run(arguments)
    except ArgumentError as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("millstream: error: not enough memory for a model of this size", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("millstream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(argv: list[str]) -> argparse.Namespace:
    end = len(argv)
    if argv[:1] == ["explain"] and _names_script(argv[1:]):
        argv = ["explain", "script", *argv[1:]]
        # The script's own arguments stand last; argparse would end their list at the first option before them.
        end = argv.index("--") if "--" in argv else len(argv)
    if argv and argv[0] in SCRIPT_COMMANDS:
        end = _end_of_options(argv)
        own = argparse.Namespace(target=argv[end] if end < len(argv) else "", arguments=argv[end + 1 :])
        return make_parser().parse_args(argv[:end], own)
    return make_parser().parse_args(argv[:end], argparse.Namespace(arguments=argv[end + 1 :], argv=argv))


def _names_script(argv: list[str]) -> bool:
    """Whether arguments of ``explain`` are about a script: its own ones stand after ``--``.

    Raises:
        ArgumentError: They are neither about a script nor a job.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    if any(each.partition(":")[0].endswith(".py") for each in own):
        return own[0] != "script"
    if own and not own[0].startswith("-") and own[0] not in (*JOBS, "script"):
        raise ArgumentError(
            f"{own[0]!r} is nothing to explain: give SCRIPT.py:OBJECT, as in train.py:train_step, or one of "
            f"{', '.join(JOBS)}."
        )
    return False


def _end_of_options(argv: list[str]) -> int:
    """Position of the script: the first argument that is neither one of our options nor an option's value."""
    position = 1
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


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: PyTorch has an error of its own for devices only."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; parsed arguments carry their function as ``run``."""
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Look whether everything works here, show the graph of a script's step or model, or train a small "
        "model as one graph of fused kernels.",
    )
    parser.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    train = commands.add_parser("train", help="train a model, eager and then as one graph, and compare")
    explain = commands.add_parser(
        "explain",
        help="show the graph of a training step or model: explain script.py:object",
        description="Show a graph: of a step or model in a script of yours (script.py:object), or of a job's step.",
    )
    explain.usage = "%(prog)s [-h] SCRIPT.py:OBJECT [--json] [--save FILE] [--measure] [-- ARG ...] | JOB [option ...]"
    for command, run, add_options in ((train, _train, _add_train_options), (explain, _explain, _add_explain_options)):
        what = "SCRIPT.py:OBJECT or JOB" if command is explain else "JOB"
        jobs = command.add_subparsers(metavar=what, dest="job", required=True)
        for name, add_sizes in (("char-rnn", _add_char_rnn_sizes), ("digits", _add_digits_sizes)):
            job = jobs.add_parser(name, help=JOBS[name], description=f"{command.prog} {name}: {JOBS[name]}.")
            job.set_defaults(run=run)
            job.add_argument("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
            seed = _number(int, 0, MAX_SEED)
            job.add_argument("--seed", type=seed, default=0, help="of weights, batches and sample (%(default)s)")
            add_options(job)
            add_sizes(job)
            if command is train and name == "char-rnn":
                help_devices = "share each batch between so many, a process each (%(default)s)"
                job.add_argument("--devices", type=_number(int, 1), default=1, help=help_devices)
        if command is explain:
            _add_script(jobs)
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
    text = "predict a data-parallel step on other numbers of devices, from its kernel graph and a model of the network"
    simulate = commands.add_parser(
        "simulate",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. SCRIPT runs on this machine as the first of many processes that are "
        "made up, to its end or until Ctrl-C; all that follows it is its own. It has to call a data-parallel step at "
        "least three times: one with a DistributedDataParallel model, or made by @ms.step(data_parallel=True). "
        "FILE.json is what ms.explain(step).save('FILE.json') wrote.",
    )
    own = "[-h] [--devices N,N] [--network LINK[,LINK]] [--per-host N] [--fit FILE] [--json]"
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
    per_host = _number(int, 1, 1 << 20)
    simulate.add_argument("--per-host", type=per_host, default=8, metavar="N", help="devices of a host (%(default)s)")
    simulate.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="fit the first link to what python -m benchmarks.sweeps.collectives wrote",
    )
    simulate.add_argument("--json", action="store_true", help="print it as JSON")


def _counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices.

    Raises:
        argparse.ArgumentTypeError: They are none.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(0 < count <= 1 << 20 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of devices, as in 8,64,512")
    return counts


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
        help="show what lies in the cache, limit it, or clear it",
        description="Show what lies in the cache: programs, choices, measurements, native parts.",
    )
    cache.set_defaults(run=_cache)
    cache.add_argument("--limit", metavar="BYTES", help="so much may stay, as in 500M; what is unused for longest goes")
    cache.add_argument("--clear", action="store_true", help="remove all of it")


def _add_script(jobs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "what ms.step or ms.compile returned in a script, which is run to its end or until Ctrl-C"
    script = jobs.add_parser("script", help=text, description=f"Explain {text}.")
    script.set_defaults(run=_explain_script)
    script.add_argument(
        "target", metavar="SCRIPT.py:OBJECT", help="as script.py:train_step, or script.py:trainer.model"
    )
    script.usage = "%(prog)s [-h] [--json] [--save FILE] SCRIPT.py:OBJECT [-- ARG ...]"
    _add_explain_options(script)


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    count, seconds = _number(int, 1, sys.maxsize), _number(float, 0)
    parser.add_argument("--steps", type=count, help="steps of this run (the job's own number, if time allows)")
    parser.add_argument(
        "--seconds", type=seconds, help="end this run after so much time (150, or without limit where --steps is given)"
    )
    parser.add_argument(
        "--compare",
        type=_number(int, 0, sys.maxsize),
        default=20,
        help="steps to run eagerly too, and to compare (%(default)s)",
    )
    parser.add_argument("--checkpoint", type=Path, help="where to save (the file of --resume, or runs/JOB.pt)")
    parser.add_argument("--resume", type=Path, help="go on exactly where this checkpoint stopped")


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="draw it into a .html, .svg or .json (Perfetto) file too"
    )
    parser.add_argument("--measure", action="store_true", help="run it some more times, and time each kernel")


def _add_char_rnn_sizes(parser: argparse.ArgumentParser) -> None:
    size = _number(int, 1)
    parser.add_argument("--text", type=Path, help="a UTF-8 file (the source of Python's standard library)")
    parser.add_argument("--layers", type=size, default=2, help="LSTM layers (%(default)s)")
    parser.add_argument("--hidden", type=size, default=128, help="units of a layer (%(default)s)")
    parser.add_argument("--sequence", type=size, default=50, help="characters the step unrolls over (%(default)s)")
    parser.add_argument("--batch", type=size, default=50, help="sequences in a batch (%(default)s)")
    parser.add_argument("--vocabulary", type=_number(int, 2), default=65, help="characters told apart (%(default)s)")
    parser.add_argument("--sample", type=_number(int, 0), default=400, help="characters to generate (%(default)s)")
    parser.add_argument(
        "--temperature", type=_number(float, 0.01), default=0.8, help="of the sample, low is safe (%(default)s)"
    )


def _add_digits_sizes(parser: argparse.ArgumentParser) -> None:
    size = _number(int, 1)
    parser.add_argument("--batch", type=_number(int, 2), default=64, help="images in a batch (%(default)s)")
    parser.add_argument("--width", type=size, default=16, help="channels of the first convolution (%(default)s)")


def _number(kind: Callable[[str], float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type: a number of this kind from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            wanted = f"from {low} to {high}" if high < sys.maxsize or value > high else f"{low} or more"
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    parse.__name__ = getattr(kind, "__name__", "number")  # argparse names the type in its message
    return parse


def _train(arguments: argparse.Namespace) -> int:
    from millstream.cli.training.devices import Team, check_devices, is_launched, launch, own_device
    from millstream.cli.training.job import find_device

    devices = getattr(arguments, "devices", 1)
    if devices > 1 and not is_launched():
        check_devices(arguments.device, devices)
        return launch(arguments.argv, devices)

    from millstream.cli.training.train import train

    def run(team: Team | None = None) -> int:
        return train(
            _make_jobs(arguments),
            steps=arguments.steps,
            seconds=arguments.seconds,
            compare=arguments.compare,
            resume=arguments.resume,
            checkpoint=arguments.checkpoint or arguments.resume or Path("runs", f"{arguments.job}.pt"),
            team=team,
        )

    if devices == 1:
        return run()
    arguments.device = own_device(arguments.device)
    with Team.joined(find_device(arguments.device)) as team:
        return run(team)


def _explain(arguments: argparse.Namespace) -> int:
    from millstream.cli.explain import Showing, explain

    show = Showing(arguments.json, arguments.save, arguments.measure)
    return explain(_make_jobs(arguments), show)


def _explain_script(arguments: argparse.Namespace) -> int:
    from millstream.cli.explain import Showing, explain_script

    show = Showing(arguments.json, arguments.save, arguments.measure)
    return explain_script(arguments.target, arguments.arguments, show)


def _simulate(arguments: argparse.Namespace) -> int:
    from millstream.cli.simulate import Asked, simulate

    if not arguments.target:
        raise ArgumentError("say what to simulate: millstream simulate script.py [ARG ...], or a .json file")
    fields = arguments.devices, arguments.network, arguments.per_host, arguments.fit, arguments.json
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


def _doctor(arguments: argparse.Namespace) -> int:
    from millstream.cli.doctor import examine

    return examine(tries=not arguments.quick)


def _make_jobs(arguments: argparse.Namespace) -> Callable[[], Job]:
    """Read the data of the job that ``arguments`` name; what comes back makes the job, the same one every time."""
    from millstream.cli.training.job import find_device

    device = find_device(arguments.device)
    if arguments.job == "char-rnn":
        from millstream.cli.training import char_rnn

        sizes = char_rnn.Sizes(
            layers=arguments.layers,
            hidden=arguments.hidden,
            sequence=arguments.sequence,
            batch=arguments.batch,
        )
        text = char_rnn.read_text(arguments.text)
        corpus = char_rnn.make_corpus(text, arguments.vocabulary)
        sample = char_rnn.Sample(arguments.sample, arguments.temperature)
        return lambda: char_rnn.make_job(corpus, sizes, sample, device, arguments.seed)

    from millstream.cli.training import digits

    images = digits.load_images()
    sizes = digits.Sizes(batch=arguments.batch, width=arguments.width)
    return lambda: digits.make_job(images, sizes, device, arguments.seed)
