"""The page of a profile: what matters is large, a cause is told once, and names stay text."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from millstream.insight import Cause, Loader, Recording, Site, analyse
from millstream.report.idle import to_page, to_picture
from tests.insight.virtual import LIBRARY, line, serial_recording

US, MS = 1_000, 1_000_000
HOSTILE = "</script></svg><b onclick='x'>\"&]]>{{ 7 * 7 }}\x00→"


def tags_of(page):
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append((tag, sorted(name for name, _ in attributes)))
    parser.feed(page)
    return found


def page_of(host, **more):
    recording = serial_recording(host, [MS] * 4, steps=30)
    return to_page(analyse(replace(recording, **more)))


CALLS = [(None, 10 * US, 5)] * 4


def test_page_opens_with_what_idles_what_can_be_gained_and_the_line():
    page = page_of([(Cause.DATA_WAIT, 16 * MS, 41), *CALLS])
    values = re.findall(r'<div class="(idle|gain)"><b>([^<]+)</b>([^<]+)</div>', page)
    assert [(kind, value) for kind, value, _ in values] == [("idle", "75 %"), ("gain", "4.01×")]
    assert "12 ms of 16 ms" in values[0][2]
    assert "16 ms → about 4 ms a step" in values[1][2]
    assert page.index("train.py:41") < page.index("Steps, measured")
    assert "<title>step 29: 16 ms\nbusy" in page  # in the run, of which the first are no part of the window
    assert "<title>step 0:" not in page
    assert not re.search(r"src=|<link|@import|url\(", page)


def test_rows_of_one_cause_have_their_remedy_once_and_one_sum():
    page = page_of([(Cause.DATA_WAIT, 16 * MS, 41), *CALLS, (Cause.IO, 6 * MS, 51), (Cause.IO, 2 * MS, 52)])
    table = page[page.index("<h2>Causes") : page.index("step, measured")]
    assert table.count("Writing or reading files") == table.count("async_save") == 1
    lines = re.findall(r"<code>(train.py:5\d)", table)
    assert lines == ["train.py:51", "train.py:52"]
    assert page.count("num_workers") == 1  # the remedy of the leading cause stands above


@pytest.mark.parametrize("number", [0, 2])
def test_page_without_a_diagnosis_promises_nothing(number):
    page = page_of([(Cause.DATA_WAIT, 16 * MS, 41), *CALLS], is_complete=False, caveats=("half of it is lost",))
    if not number:
        page = to_page(analyse(Recording()))
    assert re.search(r'<div class="gain"><b>\?</b>', page)
    assert "No diagnosis: " in page


def test_names_of_kernels_files_and_modules_stay_text():
    recording = serial_recording([(Cause.PYTHON, 16 * MS, 41), *CALLS], [MS] * 4, steps=30)
    file = HOSTILE.replace("\x00", "")
    site = Site(f"/home/{file}.py", 3, HOSTILE)

    def named(text, stack):
        return replace(
            recording,
            script=text,
            caveats=(text,),
            activities=tuple(replace(each, name=text) for each in recording.activities),
            launches=tuple(replace(each, module=text, stack=stack) for each in recording.launches),
            spans=tuple(replace(each, stack=stack, detail=text) for each in recording.spans),
            loaders=(Loader(1, 20 * MS, 30, site=stack[0]),),
        )

    tame, wild = (analyse(named(*each)) for each in (("name", line(3)), (HOSTILE, (site,))))
    assert tags_of(to_page(wild)) == tags_of(to_page(tame))
    assert "{{ 7 * 7 }}" in to_page(wild)
    assert "\x00" not in to_page(wild)
    assert tags_of(to_picture(wild)) == tags_of(to_picture(tame))


def test_library_lines_are_told_from_the_packages_folder():
    file = "/venv/lib/python3.11/site-packages/loop.py"
    recording = serial_recording([(Cause.DATA_WAIT, 16 * MS, 41), *CALLS], [MS] * 4, steps=30)
    spans = tuple(replace(each, stack=(Site(file, 7, "run"),)) for each in recording.spans)
    page = to_page(analyse(replace(recording, spans=spans, caveats=(f"not seen: {file}",), library_roots=(LIBRARY,))))
    assert "loop.py:7" in page
    assert "not seen: loop.py" in page
    assert "/venv" not in page
