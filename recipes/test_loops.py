"""Recipes for loops of your own: plain, timm, PEFT, torchmetrics, TensorBoard."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables


def test_loop():
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    batches = [(torch.randint(64, (4, 8)), torch.randint(64, (4, 8))) for _ in range(5)]
    max_steps, warmup, device = 5, 2, "cpu"
    # shown: loop
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    @ms.step
    def train_step(x, y):
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for step, (x, y) in enumerate(ms.feed(batches, device)):
        loss = train_step(x, y)
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")  # waits for the device: not at every step
        if step + 1 == max_steps:
            break
    # end of shown
    assert len(executables(train_step)) == 1


def test_timm():
    timm = pytest.importorskip("timm")
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    model = timm.create_model("test_resnet", num_classes=5)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler, ema = CosineLRScheduler(optimizer, t_initial=10), ModelEmaV3(model, decay=0.99)
    loss_function = LabelSmoothingCrossEntropy()

    @ms.step
    def train_step(x, y):
        loss = loss_function(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for update in range(4):
        loss = train_step(torch.randn(4, 3, 64, 64), torch.randint(5, (4,)))
        ema.update(model)
        scheduler.step_update(update)
    assert loss.isfinite()
    assert len(executables(train_step)) == 1


def test_peft_lora():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    base = transformers.GPT2LMHeadModel(config)
    batches = [torch.randint(60, (4, 12)) for _ in range(4)]
    # shown: peft_lora
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)

    @ms.step
    def train_step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # end of shown
    before = {name: value.clone() for name, value in model.named_parameters()}
    for batch in batches:
        loss = train_step(batch)
    assert loss.isfinite()
    assert len(executables(train_step)) == 1
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)


def test_metrics(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(5)]
    folder = tmp_path
    # shown: metrics
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)
    writer = tensorboard.SummaryWriter(folder)

    @ms.step
    def train_step(x, y):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, scores

    for step, (x, y) in enumerate(batches):
        loss, scores = train_step(x, y)
        accuracy.update(scores, y)
        ms.fetch(loss, callback=lambda value, step=step: writer.add_scalar("loss", value, step))
    # end of shown
    assert 0 <= accuracy.compute() <= 1
    assert len(executables(train_step)) == 1
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Scalars("loss")) == 5
