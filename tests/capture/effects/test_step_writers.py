# ruff: noqa: PTH123, SIM115
"""What a step writes through objects in C that were made outside of it is refused with its line: no row is lost."""

import bz2
import codecs
import csv
import gc
import gzip
import io
import lzma
import mmap
import os
import pickle
import socket
import sqlite3

import pytest
import torch

import millstream as ms
from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import interpret

callback = ms.callback  # imported now, and not within a step

TO_CLOSE = []


def closed_later(thing):
    TO_CLOSE.append(thing)
    return thing


@pytest.fixture(autouse=True)
def _closed():
    yield
    for thing in reversed(TO_CLOSE):
        thing.close()
    TO_CLOSE.clear()


def csv_of_a_file(path):
    file = closed_later(open(path, "w+", newline=""))
    return csv.writer(file).writerow, lambda: (file.flush(), path.read_text())[1]


def csv_of_text(_):
    text = io.StringIO()
    writer = csv.writer(text)
    return lambda row: writer.writerow(row), text.getvalue


def csv_of_dicts(_):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["a", "b"])
    return lambda row: writer.writerow(dict(zip("ab", row, strict=True))), text.getvalue


def a_method_of_a_buffer(_):
    file = io.BytesIO()
    write = file.write
    return lambda _: write(b"1"), file.getvalue


def a_buffered_file(path):
    file = closed_later(open(path, "wb"))
    return lambda _: file.write(b"1"), lambda: (file.flush(), path.read_bytes())[1]


def compressed(module):
    def make(path):
        file = closed_later(module.open(path, "wb"))
        return lambda _: file.write(b"1"), file.tell

    return make


def a_connection(_):
    base = closed_later(sqlite3.connect(":memory:"))
    base.execute("create table rows(a, b)")
    return lambda _: base.execute("insert into rows values (1, 2)"), lambda: base.execute(
        "select * from rows"
    ).fetchall()


def a_cursor(_):
    base = closed_later(sqlite3.connect(":memory:"))
    base.execute("create table rows(a, b)")
    cursor = base.cursor()
    add = "insert into rows values (1, 2)"
    return lambda _: cursor.execute(add), lambda: base.execute("select * from rows").fetchall()


def a_pickler(_):
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    return lambda _: pickler.dump(1), file.getvalue


def a_descriptor(path):
    number = closed_later(open(path, "wb", buffering=0)).fileno()
    return lambda _: os.write(number, b"1"), path.read_bytes


def mapped_memory(_):
    memory = mmap.mmap(-1, 64)
    return lambda _: memory.write(b"1"), lambda: bytes(memory)


def a_stream_writer(_):
    file = io.BytesIO()
    writer = codecs.getwriter("utf-8")(file)
    return lambda _: writer.write("1"), file.getvalue


def a_socket(_):
    ours, theirs = map(closed_later, socket.socketpair())
    got = []
    return lambda _: ours.send(b"1"), lambda: got.append(theirs.recv(1)) or len(got)


def torch_save(path):
    path.write_bytes(b"")
    return lambda _: torch.save([1], path), lambda: (path.stat().st_size > 0, path.write_bytes(b""))[0]


KINDS = [
    *(csv_of_a_file, csv_of_text, csv_of_dicts, a_method_of_a_buffer, a_buffered_file, a_connection, a_cursor),
    *(a_pickler, a_descriptor, mapped_memory, a_stream_writer, a_socket, torch_save),
    *map(compressed, (gzip, bz2, lzma)),
]


def trained(make, path, *, is_captured):
    write, read = make(path)

    def train(x):
        write([1, 2])
        return x * 2

    step = Step(train, build=interpret) if is_captured else train
    seen = []
    for _ in range(3):
        step(torch.ones(2))
        seen.append(read())
    return seen, step


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__qualname__)
def test_nothing_that_is_written_is_lost(make, is_frozen, tmp_path, recwarn):
    expected, _ = trained(make, tmp_path / "eager", is_captured=False)
    if is_frozen:
        gc.freeze()
    try:
        seen, step = trained(make, tmp_path / "captured", is_captured=True)
    finally:
        gc.unfreeze()
    assert seen == expected
    assert step.graphs or [
        each for each in recwarn if f"{__file__}:" in str(each.message) or "iterator" in str(each.message)
    ]


def test_what_a_step_has_made_itself_it_may_write_to():
    def train(x):
        text = io.StringIO()
        csv.writer(text).writerow([1, 2])
        text.write(f"{x.sum().item()}")
        return x * 2, text.getvalue()

    step = Step(train, build=interpret, strict=True)
    for value in (1.0, 2.0):
        assert step(torch.full((2,), value))[1] == f"1,2\r\n{2 * value}"
    assert step.graphs[0].num_runs == 2


def test_a_callback_writes_rows():
    text = io.StringIO()
    writer = csv.writer(text)

    def train(x):
        loss = (x * 2).sum()
        callback(writer.writerow, ["loss", loss.item()])
        return loss

    def refused(x):
        loss = (x * 2).sum()
        writer.writerow(["loss", loss.item()])
        return loss

    step = Step(train, build=interpret, strict=True)
    for value in (1.0, 2.0):
        step(torch.full((2,), value))
    assert text.getvalue() == "loss,4.0\r\nloss,8.0\r\n"
    assert step.graphs
    line = refused.__code__.co_firstlineno + 2
    with pytest.warns(FallbackWarning, match=rf"writes to csv.writer.*:{line}\. Let ms\.callback do it"):
        Step(refused, build=interpret)(torch.ones(2))


def test_the_largest_value_so_far_is_kept():
    best = [0.0]

    def largest(x):
        best[0] = max(best[0], x.sum().item())
        return x * 2

    step = Step(largest, build=interpret, strict=True)
    for value, wanted in ((1.0, 2.0), (0.5, 2.0), (3.0, 6.0), (2.0, 6.0)):
        step(torch.full((2,), value))
        assert best == [wanted]
    assert step.graphs
