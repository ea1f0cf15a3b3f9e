import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from millstream.graph import (
    Buffer,
    DependencyKind,
    Kernel,
    KernelGraph,
    KernelKind,
    Role,
    derive_dependencies,
    format_graph,
    format_plan,
    parse_graph,
    parse_plan,
    validate_graph,
    validate_plan,
)
from millstream.testing import random_graph
from tests.properties.strategies import graphs, spread_plans


@given(graphs())
def test_random_graphs_are_valid_and_read_back(graph):
    validate_graph(graph)
    assert parse_graph(format_graph(graph)) == graph


@given(spread_plans())
def test_random_plans_are_valid_and_read_back(plan):
    validate_plan(plan)
    assert parse_plan(format_plan(plan)) == plan


names = st.text(max_size=8)
tuples = st.lists(names, max_size=3).map(tuple)
numbers = st.integers(-(2**70), 2**70)
kernels = st.builds(
    Kernel,
    numbers,
    names,
    st.sampled_from(KernelKind),
    names,
    tuples,
    tuples,
    tuples,
    numbers,
    numbers,
    tuples,
    names,
    tuples,
)
buffers = st.builds(Buffer, names, numbers, names, st.sampled_from(Role), st.none() | names)


@given(
    st.builds(
        KernelGraph,
        names,
        st.lists(kernels, max_size=3).map(tuple),
        st.lists(buffers, max_size=3).map(tuple),
        tuples,
        tuples,
    )
)
def test_any_graph_at_all_reads_back(graph):
    assert parse_graph(format_graph(graph)) == graph


@given(st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_graph(seed):
    assert random_graph(random.Random(seed), 30) == random_graph(random.Random(seed), 30)


@given(graphs(max_kernels=80))
def test_dependencies_order_every_conflict_and_nothing_else(graph):
    """Their transitive closure is that of all conflicting pairs, and each of them is such a pair, named once."""
    reads = [{graph.storage(name) for name in kernel.reads} for kernel in graph.kernels]
    writes = [{graph.storage(name) for name in kernel.writes} for kernel in graph.kernels]
    parts = [{graph.storage(name) for name in kernel.parts} for kernel in graph.kernels]
    found = derive_dependencies(graph)
    reached, conflicting = [], []
    for kernel in range(len(graph.kernels)):
        conflicts = {
            other
            for other in range(kernel)
            if writes[other] & reads[kernel]
            or reads[other] & writes[kernel]
            or (writes[other] & writes[kernel]) - (parts[other] & parts[kernel])
        }
        direct = [dependency.kernel for dependency in found[kernel]]
        assert len(direct) == len(set(direct))
        assert set(direct) <= conflicts
        reached.append(set(direct).union(*(reached[other] for other in direct)))
        conflicting.append(conflicts.union(*(conflicting[other] for other in conflicts)))
        assert reached[kernel] == conflicting[kernel]
        for dependency in found[kernel]:
            before, name = dependency.kernel, dependency.buffer
            reasons = {
                DependencyKind.RAW: name in writes[before] & reads[kernel],
                DependencyKind.WAR: name in reads[before] & writes[kernel],
                DependencyKind.WAW: name in writes[before] & writes[kernel],
            }
            assert reasons[dependency.kind]


@given(graphs(max_kernels=80, parts=False))
def test_dependencies_are_linear_in_the_accesses(graph):
    """Each access is met once as a read and once as a write: a read ends at the next write of its buffer."""
    uses = defaultdict(int)
    for kernel in graph.kernels:
        for name in (*kernel.reads, *kernel.writes):
            uses[graph.storage(name)] += 1
    assert sum(map(len, derive_dependencies(graph))) <= 2 * sum(uses.values())
