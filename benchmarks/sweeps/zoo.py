"""One timm model of every family and transformers of many kinds, with random weights, compared with eager.

Every model runs its forward pass through ``ms.compile``; language models and others of transformers also take four
training steps through ``ms.step``. Results are right when they are not much farther from a run in double precision than
eager's are (``benchmarks.measuring.equality``). Where a random network is so chaotic that eager itself is far off, both
sides run in double precision instead, and are compared with each other.

Nothing is downloaded. Where torchvision's compiled operators do not fit PyTorch's build, which its transforms do not
need, only their names are declared.
"""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

# Before torch is imported: inputs are tiny, and threads would only wait for each other. Cases fork, and CUDA must not
# have begun in their parent, which asks only whether it is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from torch import Tensor, nn

import millstream as ms
from benchmarks.cases.networks import settle
from benchmarks.measuring.equality import HOPELESS, Comparison, Judge, check_dependence, hear_neighbours
from benchmarks.sweeps.sweep import Outcome, Result, Sweep, main

Batch = dict[str, Tensor]
Case = tuple[nn.Module, Batch, Batch]  # a model, and two batches for it

TIMM = """
    test_convnext test_efficientnet test_vit test_nfnet test_mambaout test_byobnet test_resnet starnet_s050
    test_coatnet test_vit_relpos dla46x_c mobilevit_xxs edgenext_xx_small mobilenetv3_small_050
    ese_vovnet19b_slim_dw repghostnet_050 efficientvit_m0 ghostnet_050 regnetx_002 cspnext_tiny iformer_t
    xcit_nano_12_p8_224 cs3darknet_focus_s efficientvit_b0 swiftformer_xs efficientformerv2_s0 pvt_v2_b0
    fasternet_t0 fastvit_t8 lcnetv2_small inception_next_atto rexnet_100 pit_ti_224 hardcorenas_b repvit_m1
    vit_tiny_patch16_dinov3_qkvb coat_tiny convit_tiny deit_tiny_patch16_224 gmlp_ti16_224 hgnetv2_b0 shvit_s1
    vit_tiny_r_s16_p8_224 cpubone_nano efficientvim_m1 crossvit_tiny_240 levit_128s densenet121 halonet_h1
    dpn48b visformer_tiny resnest14d csatv2 resnetv2_18 legacy_seresnet18 poolformerv2_s12 cait_xxs24_224
    skresnet18 gcvit_xxtiny tiny_vit_5m_224 efficientformer_l1 hrnet_w18_small lowformer_b0 nest_tiny
    convmixer_768_32 vitamin_small_224 legacy_xception tnt_s_legacy_patch16_224 inception_v3 rdnet_tiny
    twins_svt_small mvitv2_tiny res2next50 volo_d1_224 sam2_hiera_tiny xception41p sequencer2d_s hiera_tiny_224
    swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 davit_tiny focalnet_tiny_srf
    selecsls42 tresnet_m nextvit_small inception_v4 inception_resnet_v2 mobilenetv5_base pnasnet5large
    samvit_base_patch16_224 naflexvit_base_patch16_parfac_gap beit_base_patch16_224 qwen3_vit_88m nasnetalarge
    vgg11 gemma4_vit_167m deepseek_vit_412m
""".split()
"""The smallest model of each family of timm 1.0.31, by parameters, smallest first."""

IMAGE_SIZES = (32, 64, 96, 128, 160, 192, 224, 240, 256, 512)  # a model gets the first that it takes
NUDGE = 1e-15  # of parameters in double precision: what differs by more than it may then is chaotic
NUM_STEPS = 4  # the first runs eagerly, as the optimizer has no state; the second is captured
PRECISE_TOLERANCE = 1e-7  # relative, in double precision, of networks that amplify rounding

TRANSFORMERS = {
    "AutoModelForMaskedLM": """
        bert roberta albert distilbert electra deberta deberta-v2 mpnet squeezebert modernbert xlm-roberta fnet convbert
        longformer big_bird roformer nystromformer megatron-bert
        """.split(),
    "AutoModelForCausalLM": """
        gpt2 gpt_neox gptj llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 bloom opt mpt
        codegen stablelm starcoder2 olmo2 cohere granite mamba rwkv xglm smollm3 glm nemotron olmoe helium gpt_oss
        """.split(),
    "AutoModelForSeq2SeqLM": "bart mbart pegasus marian blenderbot m2m_100 mt5".split(),
    "AutoModelForImageClassification": "vit beit dinov2 mobilenet_v2 poolformer".split(),
}
"""Kinds of transformers by the class that makes them."""

SEQUENCE, VOCABULARY, CLASSES = 16, 99, 5
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_heads", "n_head")
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "n_layers")
_WIDTHS = ("hidden_size", "d_model", "embedding_size", "word_embed_proj_dim", "dim", "n_embd", "attention_hidden_size")
_INNER = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "hidden_dim", "n_inner")
_POSITIONS = ("max_position_embeddings", "max_source_positions", "max_target_positions", "n_positions")
TINY: dict[str, int] = {
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys((*_LAYERS, "n_layer"), 2),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(_POSITIONS, 64),
    "vocab_size": VOCABULARY,
    "num_labels": CLASSES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "state_size": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Settings of a small network, under the names that the kinds have for them."""


def list_cases() -> list[str]:
    """Names of all cases: forward passes of transformers, then training steps and timm's models in turn."""
    kinds = [kind for kinds in TRANSFORMERS.values() for kind in kinds]
    steps, models = [f"transformers {kind} step" for kind in kinds], [f"timm {name}" for name in TIMM]
    mixed = [case for pair in itertools.zip_longest(models, steps) for case in pair if case]
    return [*(f"transformers {kind}" for kind in kinds), *mixed]


def load() -> None:
    """Load the libraries."""
    declare_torchvision()
    import_module("timm")
    import_module("transformers").logging.set_verbosity_error()


def run_case(name: str, device: str) -> Result:
    """Compare one model with eager."""
    library, kind, *step = name.split()
    torch.manual_seed(0)
    try:
        model, *batches = make_timm(kind) if library == "timm" else make_transformer(kind)
    except Exception as error:  # noqa: BLE001  whatever another library raises
        return Result(name, Outcome.NOT_COMPARABLE, f"eager fails: {describe(error)}")
    torch.backends.cudnn.allow_tf32 = False  # eager's own error is the measure of ours
    model = model.to(device)
    batch, other = ({name: value.to(device) for name, value in each.items()} for each in batches)
    try:
        with torch.no_grad():
            model(**batch)
    except RuntimeError as error:
        return Result(name, Outcome.NOT_COMPARABLE, f"eager fails on {device}: {describe(error)}")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                precise = tensors_of(copy.deepcopy(model).double()(**widen(batch)))
        except RuntimeError as error:  # operators that take no doubles: there is nothing to judge by
            return Result(name, Outcome.NOT_COMPARABLE, f"eager fails in double precision: {describe(error)}")
        if not all(bool(value.isfinite().all()) for value in precise.values()):
            return Result(name, Outcome.NOT_COMPARABLE, "eager's result in double precision is not finite")
        try:
            outcome, detail = (compare_steps if step else compare_forward)(model, batch, other)
        except Exception as error:  # noqa: BLE001  an error is a result
            outcome, detail = Outcome.WRONG, f"raises {describe(error)}"
    reasons = dict.fromkeys(str(each.message) for each in warned if issubclass(each.category, ms.FallbackWarning))
    if outcome is Outcome.EQUAL and reasons:
        return Result(name, Outcome.FELL_BACK, "; ".join(" ".join(reason.split())[:400] for reason in reasons))
    return Result(name, outcome, detail)


# --- models ----------------------------------------------------------------------------------------------------------


def make_timm(name: str) -> Case:
    """Make a model of timm's, and images of the smallest size that it takes."""
    import timm

    errors = []
    for size in IMAGE_SIZES:
        for options in ({"img_size": size}, {}):
            try:
                model = timm.create_model(name, num_classes=CLASSES, **options).eval()
                batches = [{"x": torch.randn(2, 3, size, size)} for _ in range(2)]
                stir(model)
                settle(model, batches[0]["x"])
                with torch.no_grad():
                    model(**batches[0])
            except Exception as error:  # noqa: BLE001  it takes no such size
                errors.append(error)
            else:
                return model, batches[0], batches[1]
    raise errors[-1]


def make_transformer(kind: str) -> Case:
    """Make a tiny model of transformers', and two batches with labels."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = next(auto for auto, kinds in TRANSFORMERS.items() if kind in kinds)
    known = CONFIG_MAPPING[kind]()
    config = CONFIG_MAPPING[kind](**{name: value for name, value in TINY.items() if hasattr(known, name)})
    config.use_cache = False
    config._experts_implementation = "batched_mm"  # the usual one, grouped_mm, takes no doubles
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model = getattr(transformers, auto).from_config(config).float().eval()
    stir(model)
    batches: list[Batch] = []
    for _ in range(2):
        if auto == "AutoModelForImageClassification":
            size = getattr(config, "image_size", 32)
            batches.append({"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2,))})
        else:
            ids = torch.randint(3, VOCABULARY, (2, SEQUENCE))
            batches.append({"input_ids": ids, "labels": ids.roll(1, 1)})
    with torch.no_grad():
        model(**batches[0])
    return model, batches[0], batches[1]


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Give every parameter that is the same all over some spread: layers scaled by 1e-6, or by 0, would hide errors."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() > 1 and parameter.std() < 1e-3:
            parameter += 0.1 * torch.randn_like(parameter)


_declared: list[torch.library.Library] = []


def declare_torchvision() -> None:
    """Declare torchvision's operators where its own binary does not load, as from an index for another build."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


# --- comparisons -----------------------------------------------------------------------------------------------------


def compare_forward(model: nn.Module, batch: Batch, other: Batch) -> tuple[Outcome, str]:
    """Compare a forward pass with eager's; not the loss, which with random weights hardly depends on the input."""

    def run(call: Callable[..., Any], inputs: Batch) -> dict[str, dict[str, Tensor]]:
        with torch.no_grad():
            return {"outputs": tensors_of(call(**inputs))}

    precise_model = copy.deepcopy(model).double()
    precise = run(precise_model, widen(batch))
    judge = Judge(precise, run(model, batch), torch.float32)
    hear_neighbours(
        lambda move: judge.hear(run(model, {name: move(value) for name, value in batch.items()})),
        batch.values(),
        torch.float32,
        next(iter(batch.values())).device,
    )
    compiled = ms.compile(model, engine="serial")
    if is_hopeless(judge):
        compiled = ms.compile(precise_model, engine="serial")
        return outcome_of(compare_closely(run(compiled, widen(batch)), precise), "in double precision")
    try:
        check_dependence(precise["outputs"], run(precise_model, widen(other))["outputs"], judge.allowed)
    except RuntimeError as error:
        return Outcome.NOT_COMPARABLE, str(error)
    comparisons = [judge.judge(run(compiled, batch)) for _ in range(2)]
    size = f"{tuple(next(iter(batch.values())).shape)}"
    return outcome_of(next((each for each in comparisons if not each.equal), comparisons[0]), size)


def compare_steps(model: nn.Module, batch: Batch, other: Batch) -> tuple[Outcome, str]:
    """Compare some training steps with eager's."""
    start = {name: value.detach().clone() for name, value in model.named_parameters()}

    def run(dtype: torch.dtype, wrap: Callable[..., Any], nudge: float = 0.0) -> dict[str, dict[str, Tensor]]:
        net = copy.deepcopy(model).to(dtype).train()
        with torch.no_grad():
            for parameter in net.parameters() if nudge else ():
                parameter.mul_(1 + nudge)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

        def step(**inputs: Tensor) -> Tensor:
            loss = net(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = wrap(step)
        batches = [batch, other] * NUM_STEPS
        losses = [call(**(widen(each) if dtype == torch.float64 else each)) for each in batches[:NUM_STEPS]]
        parameters = {name: value.detach().clone() for name, value in net.named_parameters() if value.numel()}
        return {"losses": {"losses": torch.stack(losses)}, "parameters": parameters}

    ours = partial(ms.step, engine="serial")
    precise = run(torch.float64, lambda step: step)
    if not precise["losses"]["losses"].isfinite().all():
        return Outcome.NOT_COMPARABLE, "eager's loss is not finite"
    judge = Judge(precise, run(torch.float32, lambda step: step), torch.float32, {"parameters": start})
    if is_hopeless(judge):
        found = compare_closely(run(torch.float64, ours), precise)
        nudged = found if found.equal else compare_closely(run(torch.float64, lambda step: step, NUDGE), precise)
        if not nudged.equal:
            return Outcome.NOT_COMPARABLE, f"eager's own change by {nudged.error:.2g} where parameters do by {NUDGE:g}"
        return outcome_of(found, "in double precision")
    return outcome_of(judge.judge(run(torch.float32, ours)), f"{NUM_STEPS} steps")


def is_hopeless(judge: Judge) -> bool:
    """Whether eager's own error is so large that nothing can be shown in single precision."""
    return any(not group.eager_error <= HOPELESS / 5 for group in judge._groups.values())


def compare_closely(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> Comparison:
    """Compare results in double precision, each by its own size."""
    worst = 0.0
    for group, tensors in expected.items():
        for name, value in tensors.items():
            error = float((found[group][name] - value).norm() / value.norm().clamp(min=1e-300))
            if not error <= PRECISE_TOLERANCE:
                return Comparison(False, error, f"{name} differs from eager in double precision: error {error:.2g}")
            worst = max(worst, error)
    return Comparison(True, worst)


def outcome_of(comparison: Comparison, detail: str) -> tuple[Outcome, str]:
    """A comparison as an outcome."""
    if comparison.equal:
        return Outcome.EQUAL, f"{detail}, error {comparison.error:.1g}"
    return Outcome.WRONG, comparison.reason


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """The tensors of a result, by name."""
    named = {k: v for k, v in outputs.items() if k != "loss"} if isinstance(outputs, dict) else outputs
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(named)
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}


def widen(batch: Batch) -> Batch:
    """The same batch in double precision."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


SWEEP = Sweep(
    "benchmarks.sweeps.zoo",
    "Zoo: timm and transformers through `ms.compile` and `ms.step`",
    list_cases,
    run_case,
    load,
    devices=("cpu", "cuda"),
    limit_s=600,
)

if __name__ == "__main__":
    main(SWEEP)
