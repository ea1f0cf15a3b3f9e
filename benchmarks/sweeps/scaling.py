"""What the steps of suite ``parallel`` should take on 2, 4 and 8 GPUs: a prediction to be written down before a run.

``python -m benchmarks.sweeps.scaling`` needs no GPU. The kernel graph of a step is made from its modules: of each call
the forward kernel, the gradient of its input and that of its parameters, as large as bytes and operations on a device
of H100's limits make them, all scaled so that the step takes what it was measured to take on one GPU; buckets are those
that ``millstream.data_parallel`` makes; the optimizer is one kernel a bucket, or comes after the norm of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.models import TrainingCase
from benchmarks.parallel import CASES
from millstream.cost import NVLINK, Costs, DeviceLimits, KernelCost, Link, Network, Rate, Roofline, parse_network
from millstream.data_parallel.buckets import Member, plan_buckets
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.report import CommunicationReport, Explanation
from millstream.report.words import size
from millstream.simulate import Prediction, costs_on, plan_beside, predict
from millstream.testing import data_parallel_graph

H100 = DeviceLimits(3.0e12, 790e12, 67e12, launch_ns=840, wait_ns=400)
BESIDE = 0.15  # of a kernel's time is lost beside a collective, which holds up to 24 of 132 multiprocessors: estimated
ONE_GPU_MS = {
    "resnet50 b32": (6.31, "H200, suite training"),
    "resnet50 b8": (2.70, "H200, suite training"),
    "vit small b16": (3.05, "H200, measured before suite parallel"),
    "gpt2 small b8 T1024": (17.5, "H200, suite large"),
    "char-rnn lstm 2x128 b50": (1.16, "H200, suite training"),
}
"""Our step on one GPU. What matters is the ratio: an H100's is longer, and its efficiency a little better."""

COUNTS = (2, 4, 8)
ITEM = 2  # bytes of an activation under autocast
OPTIMIZER_TENSORS = {"SGD": 5, "AdamW": 7, "RMSprop": 5}  # read and written for each parameter


@dataclass(frozen=True)
class Call:
    """A module with parameters was called."""

    name: str
    parameters: tuple[int, ...]  # ids
    num_bytes: int
    flops: int


def calls_of(model: nn.Module, inputs: Tensor) -> list[Call]:
    """The calls of modules that have parameters of their own, in order, on a device that computes nothing."""
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, arguments: Any, result: Any) -> None:
        own = list(module.parameters(recurse=False))
        if not own or not isinstance(result, Tensor):
            return
        moved = sum(each.numel() for each in (*arguments, result) if isinstance(each, Tensor)) * ITEM
        matrix = next((each for each in own if each.dim() > 1), None)
        flops = 0
        if matrix is not None and not isinstance(module, nn.Embedding):
            places = result[:, 0].numel() if isinstance(module, nn.Conv2d) else result.numel() // result.shape[-1]
            flops = 2 * places * matrix.numel()
        calls.append(Call(names[module], tuple(map(id, own)), moved + sum(e.numel() for e in own) * ITEM, flops))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    model(inputs)
    for handle in handles:
        handle.remove()
    return calls


def step_of(case: TrainingCase) -> tuple[KernelGraph, set[int]]:  # noqa: PLR0915  one list of kernels, in order
    """The kernel graph of a case's step, and the kernels whose times do not depend on the batch."""
    with torch.device("meta"):
        model = case.model(False)
    inputs = case.batch(False)[0].to("meta")
    parameters = dict(model.named_parameters())
    calls = calls_of(model.train(), inputs)
    members = [Member("fp32", each.numel(), 4) for each in parameters.values()]
    buckets = plan_buckets(members)
    position = {id(each): number for number, each in enumerate(parameters.values())}
    bucket_of = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
    sizes = [bucket.num_elements * 4 for bucket in buckets]
    free = [each.numel() * 4 for name, each in model.named_buffers() if "num_batches" not in name]
    device = "cuda:0"
    buffers = [Buffer("x", 0, device, Role.INPUT), Buffer("communicator", 0, device, Role.STATE)]
    buffers += [Buffer(f"bucket{number}", each, device, Role.STATE) for number, each in enumerate(sizes)]
    buffers += [Buffer("statistics", sum(free), device, Role.STATE), Buffer("norm", 4, device, Role.TEMPORARY)]
    buffers += [Buffer(f"parameters{number}", each, device, Role.STATE) for number, each in enumerate(sizes)]
    buffers += [Buffer(f"a{number}", 0, device, Role.TEMPORARY) for number in range(len(calls))]
    buffers += [Buffer(f"d{number}", 0, device, Role.TEMPORARY) for number in range(len(calls) + 1)]
    kernels: list[Kernel] = []

    def add(name: str, kind: KernelKind, reads: list[str], writes: list[str], **more: Any) -> int:
        kernels.append(Kernel(len(kernels), name, kind, device, tuple(reads), tuple(writes), **more))
        return len(kernels) - 1

    if free:
        both = ["statistics", "communicator"]
        name, moved = f"exchange buffers of {type(model).__name__}", 2 * sum(free)
        add(name, KernelKind.COLLECTIVE, both, both, num_bytes=moved, ops=("broadcast",))
    for number, call in enumerate(calls):
        more = {"num_bytes": call.num_bytes, "flops": call.flops, "module": call.name, "ops": ("forward",)}
        add(f"forward {call.name}", KernelKind.GEMM, [f"a{number - 1}" if number else "x"], [f"a{number}"], **more)
    add("loss", KernelKind.FUSED, [f"a{len(calls) - 1}"], [f"d{len(calls)}"])
    for number in reversed(range(len(calls))):
        call = calls[number]
        more = {"num_bytes": call.num_bytes, "flops": call.flops, "module": call.name}
        before = f"a{number - 1}" if number else "x"
        filled = sorted({f"bucket{bucket_of[position[each]]}" for each in call.parameters})
        reads = [f"d{number + 1}", before]
        add(f"gradient {call.name}", KernelKind.GEMM, reads, filled, parts=tuple(filled), ops=("gradient",), **more)
        add(f"backward {call.name}", KernelKind.GEMM, reads, [f"d{number}"], ops=("backward",), **more)
    told = {each for call in calls for each in call.parameters}
    for name, parameter in parameters.items():
        if id(parameter) not in told:  # used by a module that has others
            filled = [f"bucket{bucket_of[position[id(parameter)]]}"]
            moved = 2 * 4 * parameter.numel()
            add(f"gradient {name}", KernelKind.FUSED, ["d0"], filled, parts=tuple(filled), num_bytes=moved)
    for number, bucket in enumerate(buckets):
        both = [f"bucket{number}", "communicator"]
        name = f"exchange bucket {number} of {type(model).__name__} ({len(bucket.members)} gradients)"
        add(name, KernelKind.COLLECTIVE, both, both, num_bytes=2 * sizes[number], ops=("all_reduce",))
    fixed = set()
    if case.clip is not None:
        reads = [f"bucket{number}" for number in range(len(buckets))]
        fixed.add(add("norm", KernelKind.FUSED, reads, ["norm"], num_bytes=sum(sizes)))
    for number, each in enumerate(sizes):
        reads = [f"bucket{number}", f"parameters{number}", *(["norm"] if case.clip is not None else [])]
        moved = OPTIMIZER_TENSORS[case.optimizer.__name__] * each
        ops = ("optimizer",)
        fixed.add(add(f"update {number}", KernelKind.FUSED, reads, [f"parameters{number}"], num_bytes=moved, ops=ops))
    used = {name for kernel in kernels for name in (*kernel.reads, *kernel.writes)}
    kept = tuple(buffer for buffer in buffers if buffer.id in used)
    given = tuple(buffer.id for buffer in kept if buffer.role in (Role.INPUT, Role.STATE))
    return KernelGraph(case.name, tuple(kernels), kept, given), fixed


def costs_of(graph: KernelGraph, fixed: set[int], one_gpu_ns: float) -> Costs:
    """Costs by roofline, scaled so that one GPU takes as long as was measured; ``fixed`` ones are not scaled."""
    calculated = Roofline(H100).estimate(graph)
    computing = [kernel.id for kernel in graph.kernels if kernel.kind is not KernelKind.COLLECTIVE]
    rest_ns = sum(calculated.kernels[each].duration_ns for each in computing if each in fixed)
    scaled_ns = sum(calculated.kernels[each].duration_ns for each in computing if each not in fixed)
    factor = (one_gpu_ns - rest_ns) / scaled_ns

    def scale(number: int, cost: KernelCost) -> KernelCost:
        if number in fixed:
            return cost
        shares = (min(1.0, share / factor) for share in (cost.compute_share, cost.memory_share))
        return KernelCost(max(1, round(cost.duration_ns * factor)), *shares)

    kernels = tuple(scale(number, cost) for number, cost in enumerate(calculated.kernels))
    return Costs(kernels, H100.wait_ns, 0, BESIDE)


@dataclass(frozen=True)
class Predicted:
    """A case: as one graph, and in segments."""

    case: str
    graph: KernelGraph
    costs: Costs
    whole: list[Prediction]
    segments: list[Prediction]


def predictions(network: Network) -> Iterator[Predicted]:
    """Of the cases of suite ``parallel`` whose step was measured on one GPU."""
    for case in (each for each in CASES if each.name in ONE_GPU_MS):
        graph, fixed = step_of(case)
        costs = costs_of(graph, fixed, ONE_GPU_MS[case.name][0] * 1e6)
        whole = predict(plan_beside(graph), costs, network, COUNTS)
        segments = predict(plan_beside(graph, eager=True), costs, network, COUNTS)
        yield Predicted(case.name, graph, costs, whole, segments)


def table(found: list[Predicted]) -> list[str]:
    """Lines of Markdown."""
    head = (
        "| case | one GPU ms | GPUs | step ms | efficiency | communication ms | exposed µs, by bucket | in segments |"
    )
    lines = [head, "|---|--:|--:|--:|--:|--:|---|--:|"]
    for each in found:
        for whole, segments in zip(each.whole, each.segments, strict=True):
            parts = ", ".join(
                f"{size(transfer.num_bytes)} {transfer.exposed_ns / 1e3:.0f}"
                for transfer in whole.transfers
                if transfer.operation == "all_reduce"
            )
            lines.append(
                f"| {each.case} | {whole.one_ns / 1e6:.2f} | {whole.num_devices} | {whole.step_ns / 1e6:.3f} "
                f"| {whole.efficiency:.3f} | {whole.communication_ns / 1e6:.3f} "
                f"| {whole.exposed_ns / 1e3:.0f} ({parts}) | {segments.efficiency:.3f} |"
            )
    return lines


# --- what others have published ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A figure of others, and a step and a network such as theirs.

    Attributes:
        what: Whose, and of what.
        devices: How many.
        network: Of theirs.
        num_bytes: Of all gradients.
        step_ms: On one device.
        efficiency: That they got.
        source: Where it is from, and what is assumed.
    """

    what: str
    devices: int
    network: Network
    num_bytes: int
    step_ms: float
    efficiency: float
    source: str

    def predicted(self) -> tuple[float, float]:
        """Efficiency with all gradients sent at the end, and with buckets beside the backward pass."""
        depth = 40
        graph = data_parallel_graph([self.num_bytes // depth] * depth, max(1, self.num_bytes // (25 << 20)))
        computing = [kernel for kernel in graph.kernels if kernel.kind is not KernelKind.COLLECTIVE]
        each_ns = round(self.step_ms * 1e6 / len(computing))
        costs = Costs(tuple(KernelCost(each_ns, 0.0, 0.0) for _ in graph.kernels), crowding=BESIDE)
        (end,) = predict(plan_beside(graph, eager=True), costs, self.network, [self.devices])
        (beside,) = predict(plan_beside(graph), costs, self.network, [self.devices])
        return end.efficiency, beside.efficiency


A100 = Link("NVLink 3", (Rate(15_000, 1_500, 230e9),), "bus bandwidth of A100 hosts")
DDP_BENCH = "willgpaik/pytorch-ddp-bench; step assumed"
PUBLISHED = (
    Published("ResNet-152 b512, DDP", 8, Network(A100), 241_000_000, 450, 0.974, DDP_BENCH),
    Published("ViT-B b1024, DDP", 8, Network(A100), 346_000_000, 900, 0.980, DDP_BENCH),
    Published(
        "nanoGPT 124M, 8 hosts of H100",
        64,
        parse_network("nvlink,ib-400"),
        498_000_000,
        27,
        0.9,
        "modal: 3 ms of all-reduce in a step of 30 ms",
    ),
    Published(
        "Inception V3 b64, Horovod",
        512,
        parse_network("pcie,eth-6.25", per_host=4, fitted=Link("pcie", (Rate(15_000, 3_000, 10e9),))),
        95_000_000,
        450,
        0.90,
        "Horovod; 4 P100 share 25 Gbit/s; step assumed",
    ),
)


def published_table() -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| published | devices | efficiency | predicted, all at the end | predicted, buckets beside | source |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for each in PUBLISHED:
        end, beside = each.predicted()
        lines.append(
            f"| {each.what} | {each.devices} | {each.efficiency:.3f} | {end:.3f} | {beside:.3f} | {each.source} |"
        )
    return lines


def draw(each: Predicted, network: Network, devices: int, path: Path) -> None:
    """The picture of a case: backward pass, buckets and optimizer side by side."""
    plan = plan_beside(each.graph)
    costs = costs_on(plan, each.costs, network, devices)
    report = CommunicationReport(plan, costs, devices)
    Explanation(each.case, (), (), (report,)).save(path)


def page(found: list[Predicted], network: Network) -> str:
    """All of it in Markdown."""
    lines = [
        "# Weak scaling on 2, 4 and 8 H100: a prediction",
        "",
        "Written down before any run on more than two GPUs; `python -m benchmarks.sweeps.scaling` makes it again.",
        "A run of suite `parallel` says how right it is: its ratio to `one gpu` is the efficiency, and a step should",
        "take the measured step of one GPU over the efficiency below, within 12 %.",
        "",
        *table(found),
        "",
        "- **Step on one GPU**: " + "; ".join(f"{name} {ms} ms ({how})" for name, (ms, how) in ONE_GPU_MS.items()),
        "  An H100's step is longer where memory bounds it, and its efficiency then a little better.",
        *(f"- **Link**: {line}" for line in network.describe()),
        "- **Unverified**: more than two devices. An all-reduce of 1 GiB ran at bus bandwidths of 329, 355 and",
        "  361 GB/s on 2, 4 and 8 H100: the link's 298 GB/s is on the safe side.",
        f"- **Beside a collective** a kernel takes {100 * BESIDE:.0f} % longer, as does the collective: estimated.",
        "- **As one graph**, buckets of `millstream.data_parallel` travel beside the backward pass, and each one's",
        "  optimizer runs when it is there; with clipping (GPT-2) only after all. *In segments*, all collectives come",
        "  after the backward pass and before the optimizer.",
        "- Nothing is in it of hosts that are late, of the question before a step, and of what launching costs.",
        "",
        "What it says: ResNet-50 hides all; GPT-2 does not hide its tied embedding, 155 MB that are complete last, for",
        "clipping needs the norm of all before any parameter is updated; char-rnn has one bucket and hides nothing.",
        "",
        "## Published figures",
        "",
        "All unverified: their steps on one device are assumed, and so are their links.",
        "",
        *published_table(),
        "",
        "Others lie between the two predictions or up to 3 points below: late devices, the host's part and the data's",
        "are not in the model.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a .md file")
    parser.add_argument("--draw", type=Path, help="an .svg of ResNet-50, batch 32, on eight GPUs")
    options = parser.parse_args()
    network = Network(NVLINK)
    found = list(predictions(network))
    print(page(found, network))
    if options.out:
        options.out.write_text(page(found, network), encoding="utf-8")
    if options.draw:
        draw(found[0], network, 8, options.draw)


if __name__ == "__main__":
    main()
