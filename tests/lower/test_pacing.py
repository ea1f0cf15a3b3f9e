"""When collectives that bring parameters begin: no earlier than what comes before their use, and in nobody's way."""

from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role, derive_dependencies
from millstream.lower.segmented.pacing import Travel, pace


def layers(number):
    """Copies and gathers first, as they stand in a graph; then layers, each of which adds to what was there."""
    kernels, travels = [], []

    def add(kind, reads, writes):
        kernels.append(Kernel(len(kernels), f"k{len(kernels)}", kind, "cuda:0", reads, writes))
        return kernels[-1].id

    for i in range(number):
        copy = add(KernelKind.COPY, (f"shard{i}",), (f"bucket{i}",))
        gather = add(KernelKind.COLLECTIVE, (f"bucket{i}", "order"), (f"bucket{i}", "order"))
        travels.append(Travel(gather, f"bucket{i}", copy, is_paced=True))
    for i in range(number):
        add(KernelKind.FUSED, ("x", f"bucket{i}"), ("x",))
    return kernels, travels


def test_gathers_begin_one_layer_ahead_and_no_layer_waits_for_the_next_ones():
    kernels, travels = layers(5)
    paced, order, marks = pace(kernels, travels, lambda name: name)
    names = {name for each in paced for name in (*each.reads, *each.writes)}
    graph = KernelGraph("paced", tuple(paced), tuple(Buffer(name, 8, "cuda:0", Role.STATE) for name in names))
    now = {before: after for after, before in enumerate(order)}
    waits_for = [{each.kernel for each in found} for found in derive_dependencies(graph)]
    gathers, computed = [now[each.kernel] for each in travels], [now[10 + i] for i in range(5)]
    for i in range(2, 5):
        assert computed[i - 2] in waits_for[gathers[i]]  # it begins beside the layer before its own
        assert gathers[i] not in waits_for[computed[i - 1]]
        assert gathers[i] in waits_for[computed[i]]
    assert len(marks) == 3


def test_without_pacing_they_begin_as_soon_as_they_can(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "pacing")
    kernels, travels = layers(3)
    assert pace(kernels, travels, lambda name: name) == (kernels, tuple(range(9)), ())
