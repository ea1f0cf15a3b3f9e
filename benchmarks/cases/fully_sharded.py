"""Steps whose model is under ``fully_shard``, as each side of suite ``parallel`` has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.cases.models import ADAMW, LARGE, Training, TrainingCase, labelled, language, loss_of, shape
from benchmarks.cases.networks import VisionTransformer
from benchmarks.cases.placed import Llama
from benchmarks.measuring.baselines import Trainee

FULLY_SHARDED = "fully sharded"  # the last words of such a case's name
FSDP_COMPILE = "fsdp compile"


def vit_small(small: bool) -> nn.Module:
    return VisionTransformer(2, 32, 2, image=32) if small else VisionTransformer()


CASES = (
    TrainingCase(
        f"llama 1B b1 T2048 {FULLY_SHARDED}",
        lambda small: Llama(2, 64, 2, 64, 32) if small else Llama(18, 2048, 16, 32768, 2048),
        lambda small: language(64 if small else 32768, 1, 2048, tiny=(2, 32))(small),
        torch.optim.AdamW,
        ADAMW,
        autocast=None,
        estimate_s=300,
    ),
    *(
        replace(case, name=f"{case.name} {FULLY_SHARDED}", autocast=None)
        for case in LARGE
        if case.name == "gpt2 small b8 T1024"
    ),
    TrainingCase(
        f"vit small b16 {FULLY_SHARDED}",
        vit_small,
        labelled(shape(16, 3, 224, 224, tiny=(4, 3, 32, 32)), 1000),
        torch.optim.AdamW,
        ADAMW,
        autocast=None,
        estimate_s=200,
    ),
)


def sharded(model: Any, device: torch.device, *, compiles: bool = False) -> Any:
    """A model of blocks, each a group of its own: parameters in bfloat16 where they are gathered, sums in float32."""
    for parameter in model.parameters():  # FSDP takes no others
        parameter.data = parameter.data.contiguous()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for block in model.blocks:
        if compiles:
            block.compile(fullgraph=True)
        fully_shard(block, **how)
    return fully_shard(model, **how)


class CompiledLoss(Training):
    """The same, with its loss under torch.compile."""

    loss_of = staticmethod(torch.compile(loss_of))


def build_fully_sharded(problem: Training, side: str) -> tuple[Callable[..., Tensor], Trainee]:
    """Build a side: its step, and what it trains.

    Args:
        problem: Whose model stays as it is.
        side: ``ours``; ``fsdp``, PyTorch's own without a compiler; or ``fsdp compile``, which compiles each block and
            the loss and has the fused optimizer.
    """
    import millstream as ms

    compiles = side == FSDP_COMPILE
    model = sharded(copy.deepcopy(problem.model), problem.device, compiles=compiles)
    optimizer = problem.make_optimizer(model, fused=compiles)
    kind = CompiledLoss if compiles else Training
    step = kind(problem.case, problem.model, problem.batches, problem.device).make_step(model, optimizer)
    return (ms.step(step, strict=True) if side == "ours" else step), Trainee(model, optimizer)
