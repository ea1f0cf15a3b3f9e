"""A program's file: found by what the program depends on, written once it is lowered, read by later processes.

A file holds JSON, compressed, after a digest of it: what another process left half-written, or a disk has spoiled, is
as good as no file. It holds the source of kernels too, which is run; so it is read only from a folder that belongs to
this user and that nobody else can write.

Of a graph with symbolic sizes there may be several: what was decided about sizes while it was lowered is written down,
and a file is of use where that holds. Then it is decided again, so that the caller's guards have it.

A second kind of file only names the first one: a whole step is found by the graph that tracing gives, before AOT
autograd has made another of it.

Where one turn of a loop was lowered for all of them, by itself, its kernels come along from the turn's own file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from millstream import progress
from millstream._torch.compiler.size_expressions import guards_of, hold_guards, symbols_of
from millstream._torch.modes.switches import SwitchSettings, present
from millstream.cache import cache_folder, file_lock, limit_bytes, read_private, trim, write_private
from millstream.graph import Kernel
from millstream.lower.inductor.generated_kernels import SOURCES, GeneratedKernel, Sources
from millstream.lower.kept import used
from millstream.lower.kept.encoding import Decoder, Encoder
from millstream.lower.kept.key import ProgramNotKept, describe_graph, describe_settings
from millstream.lower.kept.tuners import encode_tuners, offer_tuners
from millstream.lower.origins import module_path, source_line
from millstream.passes.rolling import TURNS, turns_of
from millstream.program import Program

LOGGER = logging.getLogger("millstream")

Line = tuple[str, str]  # the user's line, and the module
NO_LINE: Line = ("", "")
MOST_VARIANTS = 4
"""Of a graph with symbolic sizes, for which different things were decided."""
PATIENCE_S = 600.0
"""For another process that lowers the same program. One that dies lets others go on at once."""
Kernels = dict[str, Callable[..., Any]]
Strides = list[Any]  # of the results, as Inductor tells AOT autograd


def is_on() -> bool:
    """Return whether programs are kept: unless ``MILLSTREAM_WARM_START=0``."""
    return os.environ.get("MILLSTREAM_WARM_START") != "0"


@dataclass(frozen=True)
class FileContent:
    """The contents of a file.

    Attributes:
        program: Ready to run.
        strides: Of the results, as Inductor tells AOT autograd.
        kernels: What launches of generated kernels call, by the kernel's name.
        added: Tensors of the graph that it takes for its first inputs.
    """

    program: Program
    strides: Strides
    kernels: Kernels
    added: tuple[torch.Tensor, ...] = ()


def open_record(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], facts: Mapping[str, Any], options: Mapping[str, Any]
) -> ProgramFile | None:
    """The record of the program that a graph will be, before anything changes the graph.

    Args:
        gm: The graph.
        inputs: Its example inputs.
        facts: What else lowering is told of it.
        options: Inductor options that are not yet among the present ones.

    Returns:
        ``None`` where the program is not kept: it is switched off, or something has no text that says all about it.
    """
    if not is_on():
        return None
    before = present()
    try:
        settings = describe_settings({**options, **{f"{name}=": fact for name, fact in facts.items()}})
        text = "\n".join([*settings, *describe_graph(gm, inputs)])
    except ProgramNotKept as reason:
        LOGGER.debug("not kept on disk: %s", reason)
        return None
    return ProgramFile(hashlib.sha256(text.encode()).hexdigest(), gm, symbols_of(inputs), before)


class ProgramFile:
    """The file for one program, which may not exist.

    Attributes:
        digest: Of all that the program depends on.
        lines: The user's lines in the graph, each with its module, in order: kernels name theirs by its place.
        attributes: Tensors of the graph by name.
        symbols: What its sizes are made of, by name.
        used: Those that the program has for constants; ``None`` before it is known to be on disk.
        kernels: What launches of generated kernels call, and the kernel's name; ``None`` likewise.
        switches: Of PyTorch, under which it is lowered.
    """

    def __init__(
        self, digest: str, gm: torch.fx.GraphModule, symbols: Mapping[str, Any], switches: SwitchSettings
    ) -> None:
        self.digest, self.symbols, self.switches = digest, symbols, switches
        self.lines = list(dict.fromkeys((source_line(node), module_path(node)) for node in _nodes_of(gm)))
        names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        self.attributes = {name: value for name, value in _tensors(gm).items() if name in names}
        self.used: set[str] | None = None
        self.kernels: list[tuple[Callable[..., Any], str]] | None = None

    def load(self) -> FileContent | None:
        """Read the program; ``None`` where there is none that can be used."""
        found = _load(self.digest, self.lines, self.attributes, self.symbols)
        if found is not None:
            constants = {id(value) for value in found.program.constants.values()}
            self.used = {name for name, value in self.attributes.items() if id(value) in constants}
            self.kernels = [(function, name) for name, function in found.kernels.items()]
        return found

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Let one process lower the program while others wait for it: ranks of a job, and jobs started together.

        Yields:
            Whether this process has waited; then the program may be there.
        """
        path = _path(self.digest, 0).with_suffix(".lock")
        with file_lock(path, PATIENCE_S, partial(progress.phase, "waiting for another process")) as has_waited:
            try:
                yield has_waited
            finally:
                with suppress(OSError):
                    path.unlink()

    def save(
        self,
        program: Program,
        wrapper: torch.fx.GraphModule,
        strides: Strides,
        bodies: Sequence[ProgramFile | None] = (),
    ) -> None:
        """Write the program that the graph has become.

        Args:
            program: It.
            wrapper: What it was translated from.
            strides: Of the results, as Inductor told AOT autograd.
            bodies: Records of what was lowered apart, and is a part of the program.
        """
        kernels = [node.target for node in wrapper.graph.nodes if isinstance(node.target, GeneratedKernel)]
        own = [(kernel.function, kernel.__name__) for kernel in kernels]
        parts = [
            (function, _name_in(number, name))
            for number, body in enumerate(bodies)
            if body is not None
            for function, name in body.kernels or ()
        ]
        encoder = Encoder([*parts, *own], self.attributes, self.symbols)
        places = {line: (str(place), "") for place, line in enumerate(self.lines)}
        try:
            if present() is not self.switches:
                raise ProgramNotKept("a switch of PyTorch was changed while it was lowered")
            if any(body is None or body.kernels is None for body in bodies):
                raise ProgramNotKept("a part of it is not kept")
            if any(name in program.constants for kernel in program.graph.kernels for name in kernel.writes):
                raise ProgramNotKept("it writes a constant")
            sources: Sources = wrapper.meta[SOURCES]
            tuners = {kernel.tuner: kernel.definition for kernel in kernels if kernel.tuner is not None}
            used.note_tuners(tuners)
            content = {
                "program": encoder.encode(
                    _with_lines(program, lambda kernel: places.get((kernel.source, kernel.module), NO_LINE))
                ),
                "sources": [sources.prologue, sources.imported, sources.files, sources.cpp],
                "parts": [_kernels_in(_read(body.digest, 0)) for body in bodies if body is not None],
                "tuners": encode_tuners(tuners.items()),
                "strides": encoder.encode(strides),
                "symbols": list(self.symbols),
                "guards": guards_of(self.symbols) if self.symbols else "",
            }
        except (ProgramNotKept, ValueError) as reason:
            LOGGER.debug("not kept on disk: %s", reason)
            return
        self.used, self.kernels = encoder.used, own
        free = (variant for variant in range(MOST_VARIANTS) if not _path(self.digest, variant).exists())
        _write(self.digest, content, next(free, 0) if self.symbols else 0)

    def variant(self, choice: object) -> ProgramFile:
        """The record of another program of the same graph."""
        other = copy.copy(self)
        other.digest = hashlib.sha256(f"{self.digest}{choice}".encode()).hexdigest()
        other.used = other.kernels = None
        return other

    def note_choice(self, noted: Mapping[str, Any]) -> None:
        """Write down, as plain data, which of the graph's programs is to be taken."""
        _write(self.variant("choice").digest, noted)

    def noted_choice(self) -> Any:
        """Read it; ``None`` where there is none."""
        return _read(self.variant("choice").digest, 0)

    def point_to(self, other: ProgramFile, added: Sequence[torch.Tensor] = ()) -> None:
        """Let this one stand for the program of another record, of a graph that was made from this one's.

        Args:
            other: The other one.
            added: Tensors of this one's graph that are the first inputs of the other one's.
        """
        own = {id(tensor): name for name, tensor in self.attributes.items()}
        names = {name: own.get(id(other.attributes[name]), "") for name in other.used or ()}
        first = [own.get(id(tensor), "") for tensor in added]
        if other.used is not None and all(names.values()) and all(first):
            places = [self.lines.index(line) if line in self.lines else -1 for line in other.lines]
            _write(self.digest, {"record": other.digest, "lines": places, "attributes": names, "added": first})


def _with_lines(program: Program, line_of: Callable[[Kernel], Line]) -> Program:
    """The same program with other lines and modules that its kernels come from."""
    lines = map(line_of, program.graph.kernels)
    kernels = tuple(
        replace(kernel, source=source, module=module)
        for kernel, (source, module) in zip(program.graph.kernels, lines, strict=True)
    )
    return replace(program, graph=replace(program.graph, kernels=kernels))


def _load(
    digest: str, lines: Sequence[Line], attributes: Mapping[str, torch.Tensor], symbols: Mapping[str, Any]
) -> FileContent | None:
    for variant in range(MOST_VARIANTS if symbols else 1):
        content = _read(digest, variant)
        if content is None:
            continue
        try:
            is_bare = content.get("tuners") == []
            if (found := _found_in(content, lines, attributes, symbols)) is not None:
                if is_bare and content["tuners"]:  # it came without them from another machine
                    _write(digest, content, variant)
                return found
        except Exception as error:  # noqa: BLE001  whatever is wrong with it: lowering again is always possible
            LOGGER.debug("a program on disk cannot be used: %s: %s", type(error).__name__, error)
            with suppress(OSError):
                _path(digest, variant).unlink()
    return None


def _found_in(
    content: Any, lines: Sequence[Line], attributes: Mapping[str, torch.Tensor], symbols: Mapping[str, Any]
) -> FileContent | None:
    """Return what a file says, for the graph that has these lines, tensors and symbols.

    ``None`` where its guards fail.
    """
    if "record" in content:
        own = {name: attributes[there] for name, there in content["attributes"].items()}
        there = [lines[place] if place >= 0 else NO_LINE for place in content["lines"]]
        found = _load(content["record"], there, own, symbols)
        return found and replace(found, added=tuple(attributes[name] for name in content["added"]))
    if not hold_guards(content["guards"], [symbols[name] for name in content["symbols"]]):
        return None
    own = _load_kernels(content)
    parts = {
        _name_in(number, name): function
        for number, part in enumerate(content["parts"])
        for name, function in _load_kernels(part).items()
    }
    decoder = Decoder(parts | own, attributes, symbols)
    program: Program = decoder.decode(content["program"])
    program = _with_lines(program, lambda kernel: lines[int(kernel.source)] if kernel.source else NO_LINE)
    return FileContent(program, decoder.decode(content["strides"]), own)


def _load_kernels(content: Any) -> Kernels:
    """The kernels whose sources are in a file, which is told how they are launched if it does not say so."""
    offer_tuners(content["tuners"])
    prologue, imported, files, cpp = content["sources"]
    sources = Sources(prologue, tuple(map(tuple, imported)), tuple(map(tuple, files)), tuple(map(tuple, cpp)))
    loaded = [GeneratedKernel(name, compiled, body, ()) for name, (compiled, body) in sources.load().items()]
    tuners = {kernel.tuner: kernel.definition for kernel in loaded if kernel.tuner is not None}
    used.note_tuners(tuners)
    content["tuners"] = content["tuners"] or encode_tuners(tuners.items())
    return {kernel.__name__: kernel.function for kernel in loaded}


def _kernels_in(content: Any) -> Any:
    """What a file says of its kernels.

    Raises:
        ProgramNotKept: There is none.
    """
    if content is None:
        raise ProgramNotKept("a part of it is no longer there")
    return {"sources": content["sources"], "tuners": content["tuners"]}


def _name_in(part: int, name: str) -> str:
    """Name a kernel of what was lowered apart, so that it differs from the program's own."""
    return f"{part} {name}"


def _path(digest: str, variant: int) -> Path:
    return cache_folder() / "programs" / f"{digest[:40]}{f'-{variant}' if variant else ''}.program"


def _write(digest: str, content: Any, variant: int = 0) -> None:
    path = _path(digest, variant)
    write_private(path, write_content(content))
    used.note_program(path)
    trim(limit_bytes())


def _read(digest: str, variant: int) -> Any:
    path = _path(digest, variant)
    content = read_content(path)
    if content is not None:
        used.note_program(path)
    return content


def write_content(content: Any) -> bytes:
    """Return what a file of a program holds."""
    data = zlib.compress(json.dumps(content).encode(), 1)
    return hashlib.sha256(data).digest() + data


def read_content(path: Path) -> Any:
    """Read a program's file; ``None`` where it is not there, is damaged, or others can write it."""
    found = read_private(path)
    if found is None or hashlib.sha256(found[32:]).digest() != found[:32]:
        return None
    with suppress(ValueError, zlib.error):
        return json.loads(zlib.decompress(found[32:]))
    return None


def _nodes_of(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes of a graph, and of one turn of each of its loops."""
    for node in gm.graph.nodes:
        yield node
        if node.target is TURNS:
            yield from turns_of(node.args[1]).body.graph.graph.nodes


def _tensors(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    return {
        **dict(gm.named_parameters(remove_duplicate=False)),
        **dict(gm.named_buffers(remove_duplicate=False)),
        **{name: value for name, value in vars(gm).items() if isinstance(value, torch.Tensor)},
    }
