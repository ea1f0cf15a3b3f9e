"""Explanations: text, data, and pictures in files."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from millstream.cost import Costs
from millstream.errors import ArgumentError
from millstream.graph import CHOSEN, Candidate, Launch, Plan, Record, Span, Timeline, Wait
from millstream.report import Explanation, OneSize, details
from millstream.schedule import plan_serial
from millstream.testing import towers_graph
from tests.report.samples import EMPTY, costs_of, report_of

GRAPH = towers_graph(2, 2)
COSTS = costs_of(5000, 6000, 7000, 8000, wait_ns=300, shares=(0.25, 0.5))
PLAN = Plan(GRAPH, (Launch(0, 0), Launch(2, 1), Launch(1, 0), Launch(3, 1), Record(0, 1), Wait(0, 0)), 2, "list")
TRACE = Timeline((Span("tower0_0", 0, 0, 5500, 0), Span("memset", 1, 100, 200)), 2, 20_000)
CANDIDATES = (
    Candidate("serial", 1, 0, 3000, 26_000, 27_000, "slower"),
    Candidate("list", 2, 1, 4096, 15_300, 16_000, CHOSEN),
    Candidate("list", 4, 3, 9_000_000, 15_000, None, "over the memory budget"),
)


def test_text():
    text = Explanation("model", (report_of(PLAN, costs=COSTS, candidates=CANDIDATES),)).text(limit=1)
    assert (
        text
        == """\
2 towers of 2: 4 kernels on cuda:0, engine graph, 2 streams, 1 wait, policy list; compiled in 1.5 s
  bound: 26 % of the time all other streams wait for one chain of 2 kernels, each in need of the one before, which
    takes 15 µs (100 % fused); more streams gain nothing, a shorter chain would; its longest link takes 8 µs: kernel 3
    'tower1_1' (shape.py:4 in forward)
  time: measured 16 µs, predicted 15.3 µs; kernels one after another 26 µs, critical path 15 µs, roofline 13 µs
  stream 0 ▕█████████████████████████████████████████████████████████▄                      ▏ 72 %
  stream 1 ▕██████████████████████████████████████████████████████████████████████████████▃ ▏ 98 %
  plan    streams  waits  peak memory  predicted  measured  outcome
  serial        1      0         3 kB      26 µs     27 µs  slower
  list          2      1       4.1 kB    15.3 µs     16 µs  chosen
  not measured: 1 plan (over the memory budget)
  kind   kernels  memory moved  operations
  fused        4       8.19 kB           –
  memory: inputs 1.02 kB, state 0 B, constants 0 B; temporaries and outputs peak at 4.1 kB (4.1 kB without reuse)
  kernel  kind   memory moved  operations  made of   from
       0  fused       2.05 kB           –  tower0_0  shape.py:1 in forward
  … and 3 smaller kernels; .text(limit=None) shows them, .to_dict() has everything

nothing fell back: every operator is captured"""
    )


def test_text_without_times():
    text = Explanation(
        "model", (report_of(plan_serial(GRAPH), notes=("so it is",)), report_of(plan_serial(EMPTY)))
    ).text()
    assert "bound" not in text
    assert "time" not in text
    assert "note: so it is" in text
    assert "nothing: 0 kernels on no device" in text
    assert "inputs are read" not in text


def test_graphs_that_read_inputs_in_place_are_counted():
    explanation = Explanation("model", (report_of(PLAN, num_in_place=2),))
    assert "inputs are read where they lie, by 2 more graphs" in explanation.text()
    assert explanation.to_dict()["programs"][0]["graphs_in_place"] == 2


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ((), ""),
        (("float32 [4, 8]",), "  for float32 [4, 8]\n"),
        (("float32 [4]", "int64 []", "float32 [4]"), "  for 2 x float32 [4], int64 []\n"),
        (tuple(f"int64 [{i}]" for i in range(7)), f"  for {', '.join(f'int64 [{i}]' for i in range(7))}\n"),
        (
            tuple(f"int64 [{i}]" for i in range(9)),
            f"  for {', '.join(f'int64 [{i}]' for i in range(6))}, 3 more kinds\n",
        ),
    ],
)
def test_programs_of_other_inputs_are_told_apart(inputs, told):
    report = report_of(PLAN, inputs=inputs)
    text = Explanation("model", (report,)).text()
    assert ("  for" in text) == bool(told)
    assert told in text
    assert report.to_dict()["inputs"] == list(inputs)


def test_measured_time_comes_from_the_choice_or_else_from_the_trace():
    assert report_of(PLAN).measured_ns is None
    assert report_of(PLAN, timeline=TRACE).measured_ns == 20_000
    assert report_of(PLAN, timeline=TRACE, candidates=CANDIDATES).measured_ns == 16_000
    unmeasured = (Candidate("list", 2, 1, 4096, 15_300, None, CHOSEN),)
    assert report_of(PLAN, timeline=TRACE, candidates=unmeasured).measured_ns == 20_000
    assert "measured 16 µs" in "\n".join(report_of(PLAN, candidates=CANDIDATES).text(0))


def test_streams_that_were_tried_are_not_promised():
    assert report_of(plan_serial(GRAPH), costs=COSTS).bound().endswith("times as quick")
    candidates = (
        Candidate("serial", 1, 0, 1, None, 20_000, CHOSEN),
        Candidate("list", 2, 3, 1, None, 21_000, "slower"),
    )
    bound = report_of(plan_serial(GRAPH), costs=COSTS, candidates=candidates).bound()
    assert bound == (
        "one stream runs one kernel after another; of 1 plan with more streams, none was quicker when measured"
    )


def test_data():
    explanation = Explanation("model", (report_of(PLAN, costs=COSTS, timeline=TRACE, candidates=CANDIDATES),))
    data = json.loads(json.dumps(explanation.to_dict()))["programs"][0]
    assert data["policy"] == "list"
    assert data["times_ns"] == {
        "measured": 16_000,
        "predicted": 15_300,
        "serial": 26_000,
        "critical_path": 15_000,
        "roofline": 13_000,
        "idle": 14_500,
        "busy": [5500, 100],
    }
    assert data["critical_path"] == [2, 3]
    assert data["candidates"][1] == {
        "policy": "list",
        "streams": 2,
        "waits": 1,
        "peak_bytes": 4096,
        "predicted_ns": 15_300,
        "measured_ns": 16_000,
        "outcome": "chosen",
        "spread": "packed",
    }
    assert data["timelines"]["measured"]["spans"][1] == {
        "name": "memset",
        "stream": 1,
        "start_ns": 100,
        "end_ns": 200,
        "kernel": None,
    }
    assert data["timelines"]["predicted"]["end_ns"] == 15_300
    bare = report_of(PLAN).to_dict()
    assert (bare["times_ns"], bare["timelines"], bare["bound"]) == (None, {}, "")


def test_save(tmp_path):
    explanation = Explanation("model", (report_of(PLAN, costs=COSTS, timeline=TRACE), report_of(PLAN, costs=COSTS)))
    explanation.save(tmp_path / "run.svg")
    ElementTree.parse(tmp_path / "run.svg")
    explanation.save(str(tmp_path / "run.HTML"))
    page = (tmp_path / "run.HTML").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    explanation.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "2 towers of 2: policy list on 2 streams, measured 20 µs",
        "2 towers of 2: policy list on 2 streams, predicted 15.3 µs",
        "2 towers of 2: policy list on 2 streams, predicted 15.3 µs",
    ]


@pytest.mark.parametrize(
    ("programs", "name", "message"),
    [
        (
            (report_of(PLAN, costs=COSTS),),
            "run.png",
            r"'run.png': choose a name that ends with one of .html, .svg, .json",
        ),
        ((report_of(PLAN, costs=COSTS),), "run", "choose a name"),
        ((report_of(PLAN),), "run.svg", "no timeline of model to draw: its kernels' times are not known"),
        ((), "run.svg", "no timeline of model to draw: nothing of it is compiled"),
    ],
)
def test_what_cannot_be_saved(programs, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        Explanation("model", programs).save(name)
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_programs_are_told_apart_by_their_inputs():
    reports = [report_of(PLAN, costs=COSTS, inputs=(f"float32 [{size}]",)) for size in (3, 5)]
    titles = [picture.title for report in reports for picture in report.pictures()]
    assert [f" for float32 [{size}]: policy" in title for size, title in zip((3, 5), titles, strict=True)] == [True] * 2


@pytest.mark.parametrize(("times", "is_told"), [(1.2, False), (4.0, True)])
def test_a_bound_by_prediction_says_so_where_it_takes_longer(times, is_told):
    report = report_of(PLAN, costs=COSTS)
    chosen = Candidate("list", 2, 0, 0, 0, round(times * report.predicted_ns), CHOSEN)
    told = report_of(PLAN, costs=COSTS, candidates=(chosen,)).bound()
    assert ("measured it takes 4.0 times as long" in told) == is_told


@pytest.mark.parametrize("is_measured", [False, True])
def test_kernels_measured_on_a_busy_machine_are_no_advice(is_measured):
    slow = Costs(tuple(replace(cost, duration_ns=3000 * cost.duration_ns) for cost in COSTS.kernels))
    run = Candidate("list", 2, 0, 0, 0, report_of(PLAN, costs=COSTS).predicted_ns, CHOSEN)
    kernels = tuple(replace(kernel, device="cpu") for kernel in GRAPH.kernels)
    plan = replace(PLAN, graph=replace(GRAPH, kernels=kernels))
    report = report_of(plan, costs=slow, candidates=(run,) if is_measured else ())
    assert report.is_implausible
    assert not report_of(plan, costs=COSTS).is_implausible
    assert report.bound() == ""
    text = "\n".join(report.text(9))
    assert "nothing is concluded" in text
    assert "would" not in text
    assert "Not to be relied on" in report.pictures()[0].caption[0]
    traced = replace(measured_report(), costs=slow, is_calculated=False)  # what is traced is described by itself
    assert traced.is_implausible
    assert traced.bound() == measured_report().bound()
    assert "roofline" not in "\n".join(traced.text(9))


def test_what_nobody_measured_is_called_calculated_and_has_no_bound(tmp_path):
    report = report_of(PLAN, costs=COSTS, is_calculated=True)
    explanation = Explanation("model", (report,))
    text = explanation.text()
    assert "calculated 15.3 µs" in text
    assert "bound:" not in text
    assert "predicted" not in text
    assert explanation.to_dict()["programs"][0]["bound"] == ""
    assert list(explanation.to_dict()["programs"][0]["timelines"]) == ["calculated"]
    for name in ("run.html", "run.svg"):
        explanation.save(tmp_path / name)
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        assert "calculated 15.3 µs" in drawn.replace("\\u00b5", "µ")
        assert "no kernel was measured" in drawn
        assert "predicted" not in drawn


def measured_report():
    plan = plan_serial(GRAPH)
    spans = (
        Span("tower0_0", 0, 1000, 6000, 0),
        Span("tower0_1", 0, 6000, 12_000, 1),
        Span("tower1_0", 0, 14_000, 20_000, 2),
        Span("memset", 0, 20_000, 20_500),
        Span("tower1_1", 0, 20_500, 29_500, 3),
    )
    return report_of(plan, costs=COSTS, is_calculated=True, timeline=Timeline(spans, 1, 30_000))


def test_measured_kernels_stand_beside_what_was_calculated_and_gaps_are_told():
    report = measured_report()
    text = "\n".join(report.text(2))
    assert "measured 30 µs, calculated 26 µs" in text
    assert "roofline" not in text
    assert "nothing ran 12 % of the time: next kernel 3 µs, end 500 ns" in text
    rows = [line.split() for line in text.splitlines() if " fused " in line][1:]
    assert [row[0] for row in rows] == ["3", "1"]  # the longest first
    assert rows[0][2:6] == ["9", "µs", "8", "µs"]
    data = report.to_dict()
    assert [kernel["measured_ns"] for kernel in data["kernels"]] == [5000, 6000, 6000, 9000]
    assert [kernel["calculated_ns"] for kernel in data["kernels"]] == [5000, 6000, 7000, 8000]
    assert sum(data["idle_ns_by_cause"].values()) == data["times_ns"]["idle"]


def test_trace_that_cannot_be_told_to_kernels_says_how_long_it_took_and_not_what_bounds_it():
    spans = (Span("gemm", 0, 0, 9000), Span("tower0_0", 0, 9000, 20_000, 0))
    report = report_of(plan_serial(GRAPH), costs=COSTS, is_calculated=True, timeline=Timeline(spans, 1, 20_000))
    assert report.bound() == ""
    text = "\n".join(report.text(1))
    assert "time: measured 20 µs, calculated 26 µs; 45 % of it cannot be attributed to a kernel" in text
    assert "bound" not in text
    assert report.pictures()[0].caption[0] == "What bounds it is not known."


def test_page_has_kernels_memory_plans_and_what_fell_back(tmp_path):
    report = report_of(PLAN, costs=COSTS, candidates=CANDIDATES, notes=("<b>so it is</b>",))
    Explanation("model", (report, measured_report()), ("a <hook> at a.py:3",)).save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    body = page[page.index("<section>") : page.index('<div id="tip">')]
    for told in (
        "compiled in 1.5 s", "a &lt;hook&gt; at a.py:3", "&lt;b&gt;so it is&lt;/b&gt;", "over the memory budget",
    ):  # fmt: skip
        assert told in body
    assert body.count('<th class="n">calculated</th>') == 1
    assert body.count("tower0_0") == 2  # a row in each of the two tables
    assert "<b>" not in body
    links = re.findall(
        r'data-picture="(\d)" data-kernel="(\d)">\2</a></td><td class="n" data-head="share">(\d+) %', body
    )
    assert links[4:] == [("1", "3", "30"), ("1", "1", "20"), ("1", "2", "20"), ("1", "0", "17")]  # the second picture


def test_page_sums_modules_as_deep_as_few_rows_allow(monkeypatch):
    def told(modules):
        kernels = tuple(replace(k, module=name) for k, name in zip(GRAPH.kernels, modules, strict=True))
        report = measured_report()
        report = replace(report, plan=plan_serial(replace(GRAPH, kernels=kernels)))
        return next((table.rows for table in details.section_of(report, 0).tables if table.title == "By module"), None)

    assert told(["a.x", "a.y", "", "a.x"]) == [
        ("a.x", "47 %", "14 µs", "2"),
        ("a.y", "20 %", "6 µs", "1"),
        ("outside of modules", "20 %", "6 µs", "1"),
    ]
    assert told(["", "", "", ""]) is None
    monkeypatch.setattr(details, "MAX_MODULES", 2)
    assert [row[0] for row in told(["a.x", "a.y", "", "a.x"])] == ["a", "outside of modules"]


def test_page_tells_paths_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = (f"{tmp_path}/train.py:1", "/venv/lib/site-packages/net.py:2", "/other/a.py:3", "")
    kernels = tuple(replace(k, source=source) for k, source in zip(GRAPH.kernels, sources, strict=True))
    plan = plan_serial(replace(GRAPH, kernels=kernels))
    Explanation("model", (replace(measured_report(), plan=plan),)).save("run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    assert ">train.py:1<" in page
    assert ">net.py:2<" in page
    assert ">/other/a.py:3<" in page


def test_sizes_of_one_program_have_a_line_each_and_the_most_called_is_told_of_whole():
    plan = plan_serial(replace(EMPTY, name="train"))

    def at(length, calls, **held):
        one_size = OneSize(3, (length,), calls, shared_bytes=5_000_000, **held)
        return report_of(plan, inputs=(f"int64 [4, {length}]",), one_size=one_size)

    alone = report_of(plan, inputs=("int64 [4, 1]",))
    many = [at(30, 2), at(70, 9, own_bytes=1000, object_bytes=2_000_000), at(50, 3)]
    text = Explanation("train", (alone, *many)).text()
    assert "train: one program for 3 sizes" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("  int64")]
    assert [line[2] for line in lines] == ["70]", "50]", "30]"]
    assert "5 MB that they have in turn, 1 kB that they hold for themselves, CUDA graphs about 2 MB" in text
    wholes = [line for line in text.splitlines() if line.startswith("  for int64")]
    assert wholes == ["  for int64 [4, 1]", "  for int64 [4, 70]"]
    assert Explanation("train", (alone, many[0])).text().count("one program for") == 0
    assert many[1].to_dict()["one_size"]["calls"] == 9


def test_sizes_that_have_no_line_are_counted():
    def text_of(number, num_untold):
        sizes = [OneSize(0, (length,), 2, is_planned=False, num_untold=num_untold) for length in range(number)]
        return Explanation("train", tuple(report_of(PLAN, one_size=each) for each in sizes)).text()

    assert "one program for 1500 sizes" in text_of(20, 1480)
    assert "… and 1480 sizes called more rarely\n" in text_of(20, 1480)
    assert "… and 2 sizes called more rarely; .to_dict() has everything" in text_of(22, 0)
    assert "more rarely" not in text_of(20, 0)
