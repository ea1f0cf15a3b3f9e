"""How long all-reduces take on the GPUs of one host, captured and not, for ``millstream simulate --fit``.

``torchrun --standalone --nproc-per-node=N -m benchmarks.sweeps.collectives --out sweep.json`` times them on the first
2, 4, ... N processes in turn, adds to what is in the file, and says what link fits all captured ones. On a CPU, where
there is nothing to capture, it tries the script with Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from millstream.cost import Network, TimedReduction, fit_link

SIZES = (*(1 << power for power in range(12, 28)), 96 << 20, 256 << 20)
IN_A_ROW, SAMPLES = 10, 7


def counts(size: int) -> list[int]:
    """Numbers of processes that are timed: powers of two, and all."""
    return sorted({size, *(1 << power for power in range(1, size.bit_length()) if 1 << power <= size)})


def replayed(memory: torch.Tensor, group: Any) -> Callable[[], Any]:
    """Some all-reduces in a row, in one graph where there is a GPU."""

    def run() -> None:
        for _ in range(IN_A_ROW):
            dist.all_reduce(memory, group=group)

    run()  # connects; a size may have an algorithm of its own
    if memory.device.type != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def time_ns(run: Callable[[], Any], device: torch.device, group: Any) -> float:
    """Of one all-reduce: the median of some samples, of each the slowest process's."""
    samples = []
    for _ in range(SAMPLES + 1):
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) * 1e6
        else:
            begin = time.perf_counter_ns()
            run()
            taken = float(time.perf_counter_ns() - begin)
        slowest = torch.tensor([taken], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        samples.append(slowest.item() / IN_A_ROW)
    return statistics.median(samples[1:])


def measure(device: torch.device, largest: int) -> list[dict[str, Any]]:
    """Times for each number of processes and each size; all processes call it."""
    times = []
    for count in counts(dist.get_world_size()):
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            for size in (size for size in SIZES if size <= largest):
                memory = torch.zeros(size // 4, device=device)
                run = replayed(memory, group)
                times.append({"devices": count, "bytes": size, "ns": round(time_ns(run, device, group))})
                del run, memory  # the graph before its group
        dist.barrier()
    return times


def write(path: Path, times: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Add times to a file; of what was measured before, the new one counts."""
    known = json.loads(path.read_text())["times"] if path.exists() else []
    merged = {(each["devices"], each["bytes"]): each for each in (*known, *times)}
    content = {
        "device": device,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "how": f"fp32 all-reduce, {IN_A_ROW} in a row in one CUDA graph; NCCL_NVLS_ENABLE="
        f"{os.environ.get('NCCL_NVLS_ENABLE', '(not set)')}",
        "times": [merged[key] for key in sorted(merged)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def report(content: dict[str, Any]) -> str:
    """The link that fits, and how well."""
    times = [TimedReduction(each["devices"], each["bytes"], each["ns"]) for each in content["times"]]
    link = fit_link("link", times)
    network = Network(link, per_host=max(each.num_devices for each in times))
    lines = [link.describe(), "devices      bytes  measured µs  fitted µs  off by"]
    for each in times:
        fitted = network.time_ns("all_reduce", each.num_bytes, each.num_devices)
        lines.append(
            f"{each.num_devices:7} {each.num_bytes:10} {each.time_ns / 1e3:12.1f} {fitted / 1e3:10.1f} "
            f"{fitted / each.time_ns - 1:7.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes")
    options = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    times = measure(device, options.largest)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name(device) if use_cuda else "cpu"
        print(report(write(options.out, times, name)), flush=True)
    dist.barrier()
    os._exit(0)  # what is left of captured collectives would have destroy_process_group wait for ever


if __name__ == "__main__":
    main()
