"""Recordings of runs on a device as compact files: ``cut`` some steps of one, ``write`` and ``read`` it."""

import gzip
import json
from dataclasses import fields, replace
from itertools import count

from millstream.insight import (
    Activity,
    ActivityKind,
    Asleep,
    Cause,
    HostSpan,
    LaunchCall,
    Loader,
    ProfiledStep,
    Recording,
    Sample,
    Site,
)

LISTS = {
    "steps": ProfiledStep,
    "spans": HostSpan,
    "samples": Sample,
    "activities": Activity,
    "launches": LaunchCall,
    "loaders": Loader,
}
FACTS = (
    *("script", "device", "is_synchronous", "start_ns", "end_ns", "thread", "num_cores", "switch_ns"),
    "library_roots",
)
ENUMS = {"cause": Cause, "kind": ActivityKind, "asleep": lambda each: each and Asleep(each)}


def cut(recording, num_steps):
    """Its last steps, with what happened in them, from time 0 on; threads and calls are numbered again."""
    steps = recording.steps[-num_steps:]
    start, end = steps[0].start_ns, steps[-1].end_ns
    numbers = count()
    number_of = {each.number: next(numbers) for each in recording.launches if start <= each.start_ns < end}

    def moved(each):
        each = replace(each, start_ns=each.start_ns - start, end_ns=each.end_ns - start)
        if isinstance(each, LaunchCall):
            return replace(each, number=number_of[each.number])
        if isinstance(each, Activity):
            return replace(each, launch=number_of.get(each.launch))
        return replace(each, thread=1) if isinstance(each, HostSpan | Sample) else each

    def belongs(each):
        if isinstance(each, Activity) and each.launch in number_of:  # it may run after the last step
            return True
        return start <= each.start_ns < end and getattr(each, "thread", recording.thread) == recording.thread

    def within(name):
        return tuple(moved(each) for each in getattr(recording, name) if belongs(each))

    launches = tuple(moved(each) for each in recording.launches if each.number in number_of)
    lists = {name: within(name) for name in ("spans", "samples", "activities")}
    steps = tuple(map(moved, steps))
    return replace(
        recording, start_ns=0, end_ns=end - start, thread=1, steps=steps, launches=launches, notes=(), waits=(), **lists
    )


def write(recording, path):
    """Write it; sites and stacks stand once each."""
    tables = {"sites": {}, "stacks": {}}

    def index(table, value):
        return tables[table].setdefault(value, len(tables[table]))

    def encoded(name, value):
        if name == "stack":
            return index("stacks", tuple(index("sites", site) for site in value))
        if name == "others":
            return [[ran, encoded("stack", stack)] for ran, stack in value]
        return index("sites", value) if isinstance(value, Site) else value

    whole = {name: getattr(recording, name) for name in FACTS}
    for name, kind in LISTS.items():
        names = [field.name for field in fields(kind)]
        whole[name] = [[encoded(each, getattr(row, each)) for each in names] for row in getattr(recording, name)]
    sites = [(site.file, site.line, site.function) for site in tables["sites"]]
    whole |= {"sites": sites, "stacks": list(tables["stacks"])}
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(whole, separators=(",", ":")).encode())


def read(path):
    """The recording that was written."""
    whole = json.loads(gzip.decompress(path.read_bytes()))
    sites = [Site(*each) for each in whole["sites"]]
    stacks = [tuple(sites[number] for number in each) for each in whole["stacks"]]

    def decoded(name, value):
        if name == "stack":
            return stacks[value]
        if name == "others":
            return tuple((ran, stacks[number]) for ran, number in value)
        if name == "held_ns":
            return tuple(value)
        if name == "site":
            return None if value is None else sites[value]
        return ENUMS[name](value) if name in ENUMS else value

    lists = {}
    for name, kind in LISTS.items():
        names = [field.name for field in fields(kind)]
        lists[name] = tuple(  # files of before have no columns for what was added since
            kind(**{each: decoded(each, value) for each, value in zip(names, row, strict=False)}) for row in whole[name]
        )
    facts = {name: whole[name] for name in FACTS} | {"library_roots": tuple(whole["library_roots"])}
    return Recording(**facts, **lists)
