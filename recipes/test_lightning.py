"""Recipes for Lightning: automatic and manual optimization, and the idiom that compiles nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import millstream as ms
from millstream.api import executables

L = pytest.importorskip("lightning")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=16)


def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


# shown: lightning_auto
class LitModule(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = ms.compile(net)

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# end of shown


# shown: lightning_manual
class ManualModule(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @ms.step
    def train_step(self, x, y):
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def training_step(self, batch, batch_index):
        self.log("loss", self.train_step(*batch))


# end of shown


def test_automatic_optimization(loader, tmp_path):
    module = LitModule(make_net())
    before = [value.clone() for value in module.parameters()]
    trainer = L.Trainer(max_epochs=2, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, loader)
    assert trainer.global_step == 8
    assert len(executables(module.net)) == 2  # forward and backward
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert list(module.state_dict()) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


def test_manual_optimization_counts_steps_and_checkpoints(loader, tmp_path):
    module = ManualModule(make_net())
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    trainer = L.Trainer(max_steps=6, max_epochs=10, callbacks=[checkpoint], default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, loader)
    assert trainer.global_step == 6
    assert len(executables(module.train_step)) == 1
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


class PlainModule(ManualModule):
    train_step = ManualModule.train_step.__wrapped__


def test_manual_optimization_trains_as_without_a_step(loader, tmp_path):
    found = []
    for kind in (ManualModule, PlainModule):
        torch.manual_seed(0)
        module = kind(make_net())
        trainer = L.Trainer(max_steps=4, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, loader)
        assert trainer.global_step == 4
        found.append([each.detach() for each in module.parameters()])
    torch.testing.assert_close(*found)


def test_compiled_lightning_module_is_refused(loader, tmp_path):
    compiled = ms.compile(ManualModule(make_net()))
    with pytest.raises(ms.CaptureError, match=r"self.net = ms.compile\(net\)"):
        L.Trainer(max_steps=2, default_root_dir=tmp_path, **QUIET).fit(compiled, loader)
