"""ResNet-50 on a folder of JPEG files, as torchvision's and PyTorch's ImageNet examples train it."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms


def make_images(folder, number, size):
    """Photographs are large; these are smooth noise, so that decoding takes as long."""
    for index in range(number):
        path = Path(folder, str(index % 8), f"{index}.jpg")
        path.parent.mkdir(exist_ok=True)
        noise = torch.randint(256, (3, size // 8, size // 8), dtype=torch.uint8)
        Image.fromarray(noise.permute(1, 2, 0).numpy()).resize((size, size)).save(path, quality=90)


def train(loader, model, criterion, optimizer, device, args):
    end, took, seen = time.time(), 0.0, 0
    for step, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            output = model(images)
            loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took, seen, end = took + time.time() - end, seen + 1, time.time()
        if step % args.print_freq == 0:
            correct = (output.argmax(1) == target).float().mean()
            print(f"step {step} loss {loss.item():.3f} acc {correct.item():.3f} {took / seen * 1e3:.1f} ms a step")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--file-size", type=int, default=640)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--print-freq", type=int, default=10)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    with tempfile.TemporaryDirectory() as folder:
        make_images(folder, 256, args.file_size)
        transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(args.image_size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
        dataset = torchvision.datasets.ImageFolder(folder, transform)
        sampler = torch.utils.data.RandomSampler(dataset, True, args.steps * args.batch_size)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=args.batch_size,
            sampler=sampler,
            num_workers=args.workers,
            pin_memory=device == "cuda",
        )
        model = getattr(torchvision.models, args.arch)(num_classes=8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        train(loader, model, nn.CrossEntropyLoss().to(device), optimizer, device, args)


if __name__ == "__main__":
    main()
