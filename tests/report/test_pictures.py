"""Timelines as SVG, HTML and traces: everything once, nothing on top of another, readable whatever names say."""

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from millstream.cost import Costs, KernelCost
from millstream.graph import Launch, Plan, Record, Span, Timeline, Wait
from millstream.report import Arrow, draw_timeline, sketch_streams, to_html, to_perfetto, to_svg
from millstream.schedule import plan_graph, plan_serial
from millstream.simulate import simulate
from millstream.testing import random_graph, towers_graph
from tests.report.samples import EMPTY, HOSTILE, costs_of, runs, with_hostile_names

SVG = "{http://www.w3.org/2000/svg}"


def svg_of(*pictures):
    return ElementTree.fromstring(to_svg(pictures))


def of_class(root, name):
    return [element for element in root.iter() if name in element.get("class", "").split()]


class Page(HTMLParser):
    """What a browser sees: the data, the tags, and text outside of scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.inside, self.data, self.title = Counter(), [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.inside = [tag, dict(attributes).get("id")]

    def handle_data(self, data):
        if self.inside == ["script", "data"]:
            self.data += data
        if self.inside == ["title", None]:
            self.title += data

    def handle_endtag(self, tag):
        self.inside = []


def trace_of(*pictures):
    events = json.loads(to_perfetto(pictures))["traceEvents"]
    return {phase: [event for event in events if event["ph"] == phase] for phase in "MXsf"}


@settings(max_examples=40, deadline=None)
@given(runs())
def test_everything_is_drawn_once_and_in_its_place(run):
    plan, _, timeline = run
    picture = draw_timeline(plan, timeline, critical=range(0, len(plan.graph.kernels), 2))
    bars = of_class(svg_of(picture), "bar")
    assert len(bars) == len(timeline.spans)
    on_stream = {}
    for bar in bars:
        x, width = float(bar.get("x")), float(bar.get("width"))
        assert width >= 0
        on_stream.setdefault(bar.get("y"), []).append((x, x + width))
    for places in on_stream.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(places))
    assert len(on_stream) == len({span.stream for span in timeline.spans})

    shown = json.loads(Page(to_html([picture])).data)["pictures"][0]
    assert [tuple(bar[:3]) for bar in shown["bars"]] == [(s.stream, s.start_ns, s.end_ns) for s in timeline.spans]
    trace = trace_of(picture)["X"]
    assert [(e["tid"] - 1000, e["ts"], e["dur"]) for e in trace] == [
        (s.stream, s.start_ns / 1000, (s.end_ns - s.start_ns) / 1000) for s in timeline.spans
    ]


@settings(max_examples=40, deadline=None)
@given(runs())
def test_waits_lead_from_what_is_over_to_what_has_not_begun(run):
    plan, costs, _ = run
    timeline = simulate(plan, costs)
    picture = draw_timeline(plan, timeline)
    for arrow in picture.arrows:
        source = picture.bars[arrow.source]
        if arrow.target is not None:
            target = picture.bars[arrow.target]
            assert source.stream != target.stream
            assert source.end_ns <= target.start_ns
        else:
            assert source.stream != 0
    assert len(picture.arrows) <= sum(isinstance(step, Wait) for step in plan.steps)
    assert len(of_class(svg_of(picture), "wait")) == len(picture.arrows)
    trace = trace_of(picture)
    slices = {}
    for event in trace["X"]:
        slices.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for event in [*trace["s"], *trace["f"]]:  # each end lies in a slice: the viewer drops it otherwise
        assert any(start <= event["ts"] <= end for start, end in slices[event["tid"]])
    assert [e["id"] for e in trace["s"]] == [e["id"] for e in trace["f"]]


def test_arrows_of_a_small_plan():
    graph = towers_graph(3, 1)
    steps = (
        *(Launch(0, 0), Record(0, 0), Record(1, 2), Wait(0, 1), Wait(0, 0), Wait(1, 1), Launch(1, 1), Wait(0, 2)),
        *(Launch(2, 2), Record(2, 1), Record(3, 2), Wait(2, 0), Wait(3, 0)),
    )
    plan = Plan(graph, steps, 3)
    # One's own stream needs no arrow, nor does an event before any work; the last waits are the end's.
    picture = draw_timeline(plan, simulate(plan, costs_of(5, 7, 9)))
    assert [bar.kernel.id for bar in picture.bars] == [0, 1, 2]
    assert picture.arrows == (Arrow(0, 1), Arrow(0, 2), Arrow(1, None), Arrow(2, None))
    # A kernel that the trace lacks passes its waits on to the next one.
    assert draw_timeline(plan, Timeline((Span("tower0_0", 0, 0, 5, 0),), 3, 9)).arrows == ()


@pytest.mark.parametrize("num_streams", [0, 1, 3])
def test_nothing_to_draw(num_streams):
    picture = draw_timeline(plan_serial(EMPTY), Timeline((), num_streams, 0), title="empty")
    assert of_class(svg_of(picture), "bar") == []
    assert len(of_class(svg_of(picture), "lane")) == num_streams
    assert json.loads(Page(to_html([picture])).data)["pictures"][0]["bars"] == []
    assert trace_of(picture)["X"] == []
    assert sketch_streams(Timeline((), num_streams, 0)) == []
    assert svg_of().tag == f"{SVG}svg"
    assert json.loads(Page(to_html([])).data)["pictures"] == []


def test_hostile_names_stay_text():
    graph = with_hostile_names(towers_graph(2, 2))
    plan = plan_graph(graph, costs_of(5, 6, 7, 8), 2)
    timeline = simulate(plan, costs_of(5, 6, 7, 8))
    tame = draw_timeline(plan_serial(towers_graph(2, 2)), timeline)
    picture = draw_timeline(plan, timeline, title=HOSTILE, caption=[HOSTILE])
    page = Page(to_html([picture], HOSTILE))
    assert page.tags == Page(to_html([tame])).tags
    shown = json.loads(page.data)["pictures"][0]
    assert shown["title"] == shown["caption"][0] == shown["bars"][0][5] == HOSTILE
    assert "</script><b>\"'&]]>{{DATA}}" in page.title
    to_html([picture], HOSTILE).encode("ascii" if page.title.isascii() else "utf-8")
    root = svg_of(picture)
    assert any("</script><b>\"'&]]>" in (text.text or "") for text in root.iter(f"{SVG}text"))
    assert {element.tag for element in root.iter()} == {element.tag for element in svg_of(tame).iter()}
    trace = trace_of(picture)
    assert trace["X"][0]["args"]["from"] == HOSTILE
    for text in (to_svg([picture]), to_html([picture]), to_perfetto([picture])):
        text.encode("utf-8")


def test_the_page_needs_no_network():
    plan = plan_serial(towers_graph(1, 1))
    page = to_html([draw_timeline(plan, simulate(plan, costs_of(1)))])
    assert not re.search(r"https?:|src=|@import|url\(|fetch\(|<link", page)


BROWSER = """
const calls = [], frames = [], elements = {};
const brush = new Proxy({}, {get: (kept, name) =>
  name === "measureText" ? () => ({width: 50}) : kept[name] ?? ((...values) => calls.push([name, ...values]))});
const make = () => ({style: {}, value: "", checked: true, clientWidth: 1126, listeners: {}, getContext: () => brush,
  replaceChildren() {}, prepend() {}, setPointerCapture() {}, scrollIntoView() {},
  addEventListener(name, act) { this.listeners[name] = act; }});
const window = {devicePixelRatio: 1, addEventListener() {}}, innerWidth = 1000, innerHeight = 1000;
const get = name => elements[name] ??= make();
const document = {title: "", documentElement: {}, getElementById: get, querySelector: get, createElement: make,
  addEventListener(name, act) { this[name] = act; }};
const matchMedia = make, getComputedStyle = () => ({getPropertyValue: () => ""}), Path2D = class {
  moveTo() {} lineTo() {} bezierCurveTo() { calls.push(["curve"]); }
};
const requestAnimationFrame = draw => frames.push(draw);
function drawn() {  // what the next frame draws: bars (24 pixels high, lanes too), and curves
  calls.length = 0;
  frames.splice(0).forEach(draw => draw());
  const count = is => calls.filter(is).length;
  return [count(call => call[0] === "fillRect" && call[4] === 24), count(call => call[0] === "curve")];
}
const act = (name, event) => elements.canvas.listeners[name]({preventDefault() {}, ...event});
"""
USER = """
const shown = [drawn()];
act("wheel", {deltaX: 0, deltaY: -1000, offsetX: 111});
for (let i = 0; i < 20; i++) act("wheel", {deltaX: 0, deltaY: -100, offsetX: 111});
shown.push(drawn(), [from, to]);
act("pointermove", {offsetX: 120, offsetY: 10, clientX: 0, clientY: 0});
shown.push(elements.tip.textContent);
act("dblclick", {});
shown.push(drawn(), [from, to]);
elements.choice.selectedIndex = 0;
document.click({preventDefault() {}, target: {dataset: {picture: "0", kernel: "3"}}});
shown.push(picture.bars[pointed][KERNEL], [from, to]);
act("keydown", {key: "+"});
elements.choice.selectedIndex = 1;
elements.choice.listeners.change();
shown.push(drawn());
console.log(JSON.stringify(shown));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the viewer is JavaScript, and node is not installed")
def test_viewer_in_a_pretended_browser():
    graph = towers_graph(2, 10)
    costs = costs_of(*[1000] * 20)
    plan = plan_graph(graph, costs, 2)
    pictures = [draw_timeline(plan, simulate(plan, costs)), draw_timeline(plan_serial(EMPTY), Timeline((), 1, 0))]
    page = to_html(pictures)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    data = f"document.getElementById('data').textContent = {json.dumps(Page(page).data)};"
    done = subprocess.run(["node", "-e", BROWSER + data + script + USER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    everything, near, (start, end), tip, again, (first, last), kernel, (left, right), nothing = json.loads(done.stdout)
    assert everything == again == [2 + 20, len(pictures[0].arrows)]
    assert near == [2 + 2, 0], "only what is in view is drawn"
    assert 0 <= start < end < 200
    assert tip.startswith("0  tower0_0")
    assert (first, last) == (0, 10_000)
    assert kernel == 3, "a row of the table leads to its bar"
    bar = next(bar for bar in pictures[0].bars if bar.kernel.id == 3)
    assert 0 <= left <= bar.start_ns < bar.end_ns <= right < 10_000
    assert nothing == [1, 0]


def test_several_pictures():
    plan = plan_serial(towers_graph(1, 3))
    pictures = [draw_timeline(plan, simulate(plan, costs_of(5, 6, 7)), title=title) for title in ("one", "two")]
    assert len(of_class(svg_of(*pictures), "bar")) == 6
    assert [each["title"] for each in json.loads(Page(to_html(pictures)).data)["pictures"]] == ["one", "two"]
    names = [e["args"]["name"] for e in trace_of(*pictures)["M"] if e["name"] == "process_name"]
    assert names == ["one", "two"]
    assert {(e["pid"], e["tid"]) for e in trace_of(*pictures)["X"]} == {(1, 1000), (2, 2000)}


def test_details_can_be_read_off():
    graph = towers_graph(1, 1)
    plan = plan_serial(graph)
    picture = draw_timeline(plan, simulate(plan, costs_of(5000)), critical=[0])
    (bar,) = of_class(svg_of(picture), "bar")
    title = bar.find(f"{SVG}title").text
    for part in ("0  tower0_0  (fused)", "5 µs", "2.05 kB moved", "critical path", "shape.py:1 in forward"):
        assert part in title
    (event,) = trace_of(picture)["X"]
    assert (event["args"]["kernel"], event["args"]["bytes"], event["cat"]) == (0, 2048, "fused")


def test_sketch():
    spans = (Span("a", 0, 0, 50), Span("b", 1, 25, 30), Span("c", 1, 75, 100))
    assert sketch_streams(Timeline(spans, 3, 100), width=8) == [
        "stream 0 ▕████    ▏ 50 %",
        "stream 1 ▕  ▃   ██▏ 30 %",
        "stream 2 ▕        ▏ 0 %",
    ]


def test_three_thousand_kernels_on_eight_streams():
    rng = random.Random(0)
    graph = random_graph(rng, 3000, locality=0.3)
    costs = Costs(tuple(KernelCost(rng.randint(1000, 20000), 0.1, 0.1) for _ in graph.kernels), 1500)
    plan = plan_graph(graph, costs, 8)
    timeline = simulate(plan, costs)
    picture = draw_timeline(plan, timeline)
    sizes = [len(write([picture])) for write in (to_svg, to_html, to_perfetto)]
    assert max(sizes) < 3_000_000
