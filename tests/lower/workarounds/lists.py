"""Operators of lists lowered for CPUs as they are for GPUs: as kernels whose parts, one for each item, run at once."""

from contextlib import contextmanager
from unittest.mock import patch

from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler


@contextmanager
def lists_as_on_a_gpu():
    """Here the parts run one after another, the last one first: none may need what another one makes."""
    has, codegen, priority = GraphLowering.has_feature, Scheduler._codegen, CppScheduling.get_fusion_pair_priority

    def fuses(which):
        fuse = getattr(CppScheduling, which)

        def can_fuse(self, node, other):
            if node.is_foreach() or other.is_foreach():
                return ForeachKernelSchedulerNode.can_fuse(node, other)
            return fuse(self, node, other)

        return patch.object(CppScheduling, which, can_fuse)

    def has_or_is_of_lists(self, device, feature):
        return feature is BackendFeature.FOREACH or has(self, device, feature)

    def priority_or_none(self, node, other):
        return 0 if node.is_foreach() or other.is_foreach() else priority(self, node, other)

    def codegen_parts(self, nodes):
        self.nodes = [part for node in nodes for part in _parts(node)]  # where the wrapper looks for each
        codegen(self, self.nodes)
        self.nodes = nodes

    with (
        patch.object(GraphLowering, "has_feature", has_or_is_of_lists),
        fuses("can_fuse_vertical"),
        fuses("can_fuse_horizontal"),
        patch.object(CppScheduling, "get_fusion_pair_priority", priority_or_none),
        patch.object(Scheduler, "_codegen", codegen_parts),
    ):
        yield


def _parts(node):
    if not node.is_foreach():
        return [node]
    parts = [*reversed(node.get_subkernel_nodes())]
    for part in parts[:-1]:
        part.last_usage = type(node.last_usage)()
    parts[-1].last_usage = node.last_usage
    return parts
