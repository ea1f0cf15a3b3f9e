"""When collectives begin that gather parameters: in graphs of a few kernels, without a device."""

import pytest

from millstream._torch.workarounds import without
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role, derive_dependencies
from millstream.lower.segmented.pacing import Travel, pace
from millstream.schedule import peak_bytes, plan_graph

LAYERS = 6


def layers(*, updates=None, scatters=False, in_place=False):
    """Kernels of a chain of layers: all gathers first, then each layer, which reads what was gathered for it.

    Args:
        updates: A layer whose parameter is written after the first layer has run.
        scatters: Whether another collective follows each layer.
        in_place: Whether each layer adds to what the one before has made.
    """
    kernels, travels = [], []

    def add(name, reads, writes, kind=KernelKind.FUSED):
        kernels.append(Kernel(len(kernels), name, kind, "cpu", tuple(reads), tuple(writes), num_bytes=64))
        return len(kernels) - 1

    def travel(memory, copy, *, is_paced):
        both = memory, "order"
        travels.append(Travel(add(f"exchange {memory}", both, both, KernelKind.COLLECTIVE), memory, copy, is_paced))

    for layer in range(LAYERS):
        copy = add("copy", [f"shard{layer}"], [f"whole{layer}"], KernelKind.COPY)
        travel(f"whole{layer}", copy, is_paced=True)
    for layer in range(LAYERS):
        given, made = ("x0", "x0") if in_place else (f"x{layer}", f"x{layer + 1}")
        add(f"layer{layer}", [given, f"whole{layer}"], [made])
        if layer == 0 and updates is not None:
            add("update", [f"x{layer + 1}"], [f"shard{updates}"])
        if scatters:
            add("gradient", [f"x{layer + 1}"], [f"gradient{layer}"])
            travel(f"gradient{layer}", None, is_paced=False)
    return kernels, travels


def paced(kernels, travels):
    result, order, marks = pace(kernels, travels, lambda name: name)
    assert sorted(order) == [*range(len(kernels))]
    assert [each.id for each in result] == [*range(len(kernels))]
    for each, before in zip(result, order, strict=True):
        assert (each.name, tuple(name for name in each.writes if name not in marks)) == (
            kernels[before].name,
            kernels[before].writes,
        )
        assert {*each.reads} >= {*kernels[before].reads}
    in_order = [before for before in order if before in {each.kernel for each in travels}]
    assert in_order == sorted(in_order)
    return result


def graph_of(kernels):
    names = dict.fromkeys(name for each in kernels for name in (*each.reads, *each.writes))
    state, marks = ("shard", "x0", "order", "mark"), ("order", "mark")
    buffers = tuple(
        Buffer(
            name,
            0 if name.startswith(marks) else 1024,
            "cpu",
            Role.STATE if name.startswith(state) else Role.TEMPORARY,
        )
        for name in names
    )
    inputs = tuple(each.id for each in buffers if each.role is Role.STATE)
    return KernelGraph("layers", tuple(kernels), buffers, inputs, ())


def test_each_gather_begins_one_layer_ahead():
    names = [each.name for each in paced(*layers()) if each.name != "copy"]
    expected = ["exchange whole0", "exchange whole1"]
    for layer in range(LAYERS):
        expected += [f"layer{layer}", *([f"exchange whole{layer + 2}"] if layer + 2 < LAYERS else [])]
    assert names == expected


@pytest.mark.parametrize("in_place", [False, True])
def test_no_layer_waits_for_what_the_next_ones_need(in_place):
    graph = graph_of(paced(*layers(in_place=in_place)))
    position = {each.name: each.id for each in graph.kernels}
    waits_for = [{each.kernel for each in found} for found in derive_dependencies(graph)]
    for layer in range(2, LAYERS):
        gather = position[f"exchange whole{layer}"]
        assert position[f"layer{layer - 2}"] in waits_for[gather]  # beside the layer before its own
        assert gather not in waits_for[position[f"layer{layer - 1}"]]
        assert gather in waits_for[position[f"layer{layer}"]]


@pytest.mark.parametrize(("num_streams", "policy"), [(1, "serial"), (3, "list")])
def test_no_schedule_holds_more_than_a_few_layers(num_streams, policy):
    kernels, travels = layers()
    peaks = []
    for each in (kernels, paced(kernels, travels)):
        graph = graph_of(each)
        plan = plan_graph(graph, Roofline().estimate(graph), num_streams, policy)
        check_plan(plan)
        peaks.append(peak_bytes(plan))
    assert peaks[1] <= peaks[0] - (LAYERS - 4) * 1024


def test_what_is_sent_is_read_before_it_is_written():
    names = [each.name for each in paced(*layers(updates=4))]
    assert names.index("exchange whole4") < names.index("update")
    assert names.index("exchange whole5") > names.index("layer1")


def test_other_collectives_are_not_overtaken():
    names = [each.name for each in paced(*layers(scatters=True)) if each.name.startswith("exchange")]
    assert names[:LAYERS] == [f"exchange whole{layer}" for layer in range(LAYERS)]


def test_switched_off_nothing_moves():
    kernels, travels = layers()
    with without(["pacing"]):
        assert pace(kernels, travels, lambda name: name) == (kernels, tuple(range(len(kernels))), ())
