"""A vision transformer of timm's as a LightningModule, with a progress bar and metrics in it."""

import argparse
import tempfile

import lightning
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bright squares on noise, made when they are asked for."""

    def __init__(self, length, size):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        dice = torch.Generator().manual_seed(index)
        label = index % 4
        image = torch.randn(3, self.size, self.size, generator=dice)
        half = self.size // 2
        image[:, label // 2 * half :, label % 2 * half :] += 1
        return image, label


class Classifier(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = timm.create_model(args.model, num_classes=4, img_size=args.image_size)

    def training_step(self, batch, _):
        images, labels = batch
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    data = Shapes(args.steps * args.batch_size, args.image_size)
    loader = DataLoader(data, args.batch_size, num_workers=args.workers, pin_memory=torch.cuda.is_available())
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(Classifier(args), loader)


if __name__ == "__main__":
    main()
