"""Operators of lists lowered for CPUs as they are for GPUs: as kernels whose parts, one for each item, run at once."""

from contextlib import contextmanager
from unittest.mock import patch

from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler


@contextmanager
def lists_as_on_a_gpu(*, is_last_first=True):
    """Here the parts run one after another, in one order or the other: none may need what another one makes."""
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
        parts = [part for node in nodes for part in _parts(node, is_last_first=is_last_first)]
        self.nodes = parts  # where the wrapper looks for each
        codegen(self, parts)
        self.nodes = nodes

    with (
        patch.object(GraphLowering, "has_feature", has_or_is_of_lists),
        fuses("can_fuse_vertical"),
        fuses("can_fuse_horizontal"),
        patch.object(CppScheduling, "get_fusion_pair_priority", priority_or_none),
        patch.object(Scheduler, "_codegen", codegen_parts),
    ):
        yield


def _parts(node, *, is_last_first):
    if not node.is_foreach():
        return [node]
    parts = node.get_subkernel_nodes()
    parts = [*(reversed(parts) if is_last_first else parts)]
    for part in parts[:-1]:
        part.last_usage = type(node.last_usage)()
    parts[-1].last_usage = node.last_usage
    return parts
