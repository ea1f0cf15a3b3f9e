"""A GPT-2 from transformers in a loop of one's own, as small trainers of language models are written."""

import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def get_batch(path, block, batch, device):
    data = numpy.memmap(path, dtype=numpy.uint16, mode="r")
    starts = torch.randint(len(data) - block, (batch,))
    x = torch.stack([torch.from_numpy(data[i : i + block].astype(numpy.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(numpy.int64)) for i in starts])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


def learning_rate(step, args):
    if step < 10:
        return args.lr * (step + 1) / 10
    return args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=6e-4)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1337)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.bin")
        numpy.random.default_rng(0).integers(5000, size=1_000_000, dtype=numpy.uint16).tofile(path)
        config = GPT2Config(vocab_size=5000, n_positions=args.block, n_embd=args.width, n_layer=args.layers, n_head=8)
        config.bos_token_id = config.eos_token_id = 0
        model = GPT2LMHeadModel(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        x, y = get_batch(path, args.block, args.batch, device)
        began = time.time()
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = model(x).logits
                loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            x, y = get_batch(path, args.block, args.batch, device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            took, began = time.time() - began, time.time()
            print(f"step {step}: loss {loss.item():.4f}, {took * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
