"""What Inductor writes for a function, without compiling it: C++ for a CPU, and Triton for a GPU that is not there."""

import contextlib
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton
from torch.utils._pytree import tree_map_only

_PROPERTIES = {
    "type": "cuda",
    "index": 0,
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}


@contextlib.contextmanager
def pretended_gpu():
    """Let Inductor take it that there is a GPU, and Triton."""
    # Of the fields that this PyTorch has; those that are not named are of no account for text.
    needed = {name: None for name in DeviceProperties._fields if name not in DeviceProperties._field_defaults}
    properties = DeviceProperties(**{**needed, **_PROPERTIES})
    device = SimpleNamespace(**_PROPERTIES, minor=0, total_memory=2**37, shared_memory_per_block=49152, name="none")
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_properties", lambda *_: device),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.version, "cuda", "12.8"),
            (CudaInterface, "is_available", staticmethod(lambda *_: True)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: device)),
            (DeviceProperties, "create", staticmethod(lambda _: properties)),
            (scheduler, "has_triton", lambda: True),
            (_triton, "has_triton", lambda: True),
            (_triton, "triton_hash_with_backend", lambda: "pretended"),
            (fake_tensor, "init_gpu_context", lambda *_: None),
        ):
            stack.enter_context(patch.object(owner, name, value, create=name == "init_gpu_context"))
        yield


def text_of(function, inputs, device, context=contextlib.nullcontext):
    """The program that Inductor writes for a function of tensors and numbers, its kernels and all calls.

    Args:
        function: To write.
        inputs: Tensors of the processor.
        device: ``"cpu"`` or ``"cuda"``.
        context: In which it is written.
    """
    gm = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(device, 0 if device == "cuda" else None)}
        elif str(node.target).startswith("prims.inductor_seeds"):
            node.args = (node.args[0], torch.device(device, 0) if device == "cuda" else torch.device(device))
    with pretended_gpu() if device == "cuda" else contextlib.nullcontext():
        mode = FakeTensorMode()

        def moved(x):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

        with mode:  # nothing can be run on a device that is not there
            for node in gm.graph.nodes:
                if "val" in node.meta:
                    node.meta["val"] = tree_map_only(torch.Tensor, moved, node.meta["val"])
            fakes = [*map(moved, inputs)]
        with (
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
            config.patch({"compile_threads": 1, "graph_partition": False}),
            context(),
        ):
            graph = GraphLowering(gm, example_inputs=fakes, is_inference=True)
            with V.set_graph_handler(graph):
                graph.run(*fakes)
                code = graph.codegen()[0]
    return getattr(code, "value", code)
