"""Programs whose sizes change from call to call, each run by one side in a process of its own, with an empty cache.

The clock of the first pass runs from the uncompiled model to the last result; later passes find everything compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import millstream as ms
from benchmarks.measuring.harness import prepare_torch, synchronize
from millstream.capture.step.step_program import StepProgram

#: A pass over all sizes: what it computes, to be compared.
Pass = Callable[[], list[torch.Tensor]]
#: Compiles a module or a function.
Form = Callable[[Any], Any]
#: Of a program that takes too long on a CPU.
GPU_ONLY = "generate 40 tokens by 1B Llama"
SETTLING, LATER = 4, 5  # later passes: some until every size has its graph, and some whose median counts


@dataclass(frozen=True)
class Sizes:
    """A program.

    Attributes:
        name: Of the case.
        make: Builds its model for a form, and returns a pass.
        calls: In a pass, for people.
        is_step: Whether our side captures the whole step rather than the model.
    """

    name: str
    make: Callable[[Form], Pass]
    calls: int
    is_step: bool = False


def small_gpt2() -> Any:
    """GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pyrefly: ignore[missing-import]

    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 1024}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=None))


def llama() -> Any:
    """As large as TinyLlama: 1.1 billion weights, in float32, as text that is generated is compared word by word."""
    from transformers import LlamaConfig, LlamaForCausalLM  # pyrefly: ignore[missing-import]

    size = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**size, intermediate_size=5632, bos_token_id=0, eos_token_id=None))


def generate(tokens: int, form: Form, *, make: Callable[[], Any] = small_gpt2, cache: str | None = None) -> Pass:
    """Generate text with a cache that grows by a token a call, or a ``static`` one."""
    model = make().eval()
    model.forward = form(model.forward)
    prompt = torch.randint(500, (2, 5))

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        mask = torch.ones_like(prompt)
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        options |= {"cache_implementation": cache, "disable_compile": True}  # transformers would compile it once more
        return [model.generate(prompt, attention_mask=mask, **options)]

    return run


class Text(nn.Module):
    """Layers of a transformer over an embedding."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.layers(self.embed(tokens))).logsumexp(-1).mean()


def train(lengths: list[int], form: Form) -> Pass:
    """Forward, backward and SGD with batches padded to their longest text."""
    model = Text(4, 64)
    compiled, optimizer = form(model), torch.optim.SGD(model.parameters(), 1e-3)
    batches = [torch.randint(100, (4, length)) for length in lengths]

    def run() -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = compiled(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return run


def whole_step(lengths: list[int], form: Form, optimizer: Any = torch.optim.Adam) -> Pass:
    """The same with the optimizer captured as well; a side that compiles models compiles the model alone."""
    model = Text(4, 64)
    optimizer = optimizer(model.parameters(), 1e-4)
    called = model if form is ms.step else form(model)

    def update(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = called(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = ms.step(update) if form is ms.step else update
    batches = [torch.randint(100, (4, length)) for length in lengths]
    return lambda: [step(batch) for batch in batches]


def classify(sizes: list[tuple[int, int]], form: Form) -> Pass:
    """A small convolutional network at some resolutions and batch sizes, without gradients."""
    blocks: list[nn.Module] = []
    for before, width, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2)):
        blocks += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    compiled = form(model)
    images = [torch.randn(rows, 3, size, size) for size, rows in sizes]

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        return [compiled(image) for image in images]

    return run


def hugging_face(lengths: list[int], form: Form) -> Pass:
    """Hugging Face's Trainer on a small BERT, each batch padded to its longest text."""
    import transformers  # pyrefly: ignore[missing-import]

    kind = {"num_labels": 2, "problem_type": "single_label_classification", "hidden_dropout_prob": 0.0}
    size = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**size, **kind, intermediate_size=256, attention_probs_dropout_prob=0.0)
    model = form(transformers.BertForSequenceClassification(config))
    device = next(model.parameters()).device
    texts = [{"tokens": torch.randint(200, (n,), device="cpu"), "label": n % 2} for n in lengths for _ in range(4)]

    def pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = nn.utils.rnn.pad_sequence([each["tokens"] for each in examples], batch_first=True)
        labels = torch.tensor([each["label"] for each in examples])
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}

    def run() -> list[torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            told = {"report_to": [], "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
            arguments = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=4,
                max_steps=len(lengths),
                remove_unused_columns=False,
                use_cpu=device.type == "cpu",
                **told,
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=texts, data_collator=pad)
            trainer.pop_callback(transformers.PrinterCallback)
            trainer.train()
        return [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    return run


_random = random.Random(0)
_LENGTHS = [_random.randint(2, 128) for _ in range(100)]
_LONG = [_random.randint(1, 512) for _ in range(500)]
_PADDED = [max(int(_random.lognormvariate(3.5, 0.6)) + 1 for _ in range(8)) for _ in range(40)]
_IMAGES = list(product((32, 48, 64), (2, 3, 4, 5, 6)))


def programs() -> Iterator[Sizes]:
    """All of them."""
    for tokens in (40, 400):
        yield Sizes(f"generate {tokens} tokens", lambda form, tokens=tokens: generate(tokens, form), tokens)
        static = f"generate {tokens} tokens in a static cache"
        yield Sizes(static, lambda form, tokens=tokens: generate(tokens, form, cache="static"), tokens)
    yield Sizes(GPU_ONLY, lambda form: generate(40, form, make=llama), 40)
    yield Sizes("train lengths 2 to 128", lambda form: train(_LENGTHS, form), len(_LENGTHS))
    yield Sizes("train with a short last batch", lambda form: train([32] * 9 + [20], form), 10)
    yield Sizes("step lengths 1 to 512", lambda form: whole_step(_LONG, form), len(_LONG), is_step=True)
    yield Sizes("step with a short last batch", lambda form: whole_step([32] * 9 + [20], form), 10, is_step=True)
    yield Sizes("step padded to the longest of 8", lambda form: whole_step(_PADDED, form), len(_PADDED), is_step=True)
    yield Sizes("trainer padded to the longest of 4", lambda form: hugging_face(_PADDED, form), len(_PADDED))
    yield Sizes("classify 3 resolutions and 5 batches", lambda form: classify(_IMAGES, form), len(_IMAGES))


@contextlib.contextmanager
def _counting_steps() -> Iterator[list[int]]:
    """Count the graphs that steps are compiled to."""
    made = [0]
    build = StepProgram.__init__

    def count(*args: Any, **kwargs: Any) -> None:
        made[0] += 1
        build(*args, **kwargs)

    StepProgram.__init__ = count  # type: ignore[method-assign]
    try:
        yield made
    finally:
        StepProgram.__init__ = build  # type: ignore[method-assign]


FORMS: dict[str, Form] = {"ours": ms.compile, "compile": torch.compile}


def measure(name: str, side: str, device: torch.device) -> dict[str, Any]:
    """Run a program by a side; say what it took, how many graphs, and whether it computed what eager does."""
    program = next(each for each in programs() if each.name == name)

    def made(form: Form) -> Pass:
        torch.manual_seed(0)
        with device:
            return program.make(form)

    expected = made(lambda model: model)()
    synchronize(device)
    start = time.perf_counter()
    run = made(ms.step if program.is_step and side == "ours" else FORMS[side])
    with _counting_steps() as steps:
        results = run()
    synchronize(device)
    first_s = time.perf_counter() - start
    graphs = steps[0] or counters["stats"]["unique_graphs"]
    equal = all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(results, expected, strict=True))
    later = []
    for _ in range(SETTLING + LATER):
        start = time.perf_counter()
        run()
        synchronize(device)
        later.append(time.perf_counter() - start)
    found = {"first_s": first_s, "settling_s": later[:SETTLING], "later_s": median(later[SETTLING:])}
    return {**found, "graphs": graphs, "equal": equal}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("side", choices=FORMS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    prepare_torch()
    torch.set_float32_matmul_precision("highest")  # text that is generated is compared word by word
    torch.backends.cudnn.allow_tf32 = False
    print(json.dumps(measure(options.program, options.side, options.device)))
