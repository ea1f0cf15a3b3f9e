"""Recipes for Hugging Face: Trainer, Accelerate, and what their lists of backends refuse."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import millstream as ms
from millstream.api import executables

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(50, (12,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones(12, dtype=torch.int64), "labels": index % 2}


def make_bert():
    # Left out, the problem's type is found and written down by the first call, and the second is compiled again.
    kind = {"num_labels": 2, "problem_type": "single_label_classification"}
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, **kind
    )
    return transformers.BertForSequenceClassification(config)


def arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=16, max_steps=6, save_steps=3, report_to=[], use_cpu=True, **more
    )


def test_trainer(tmp_path):
    model, args, dataset = make_bert(), arguments(tmp_path), Sentences()
    # shown: trainer
    compiled = ms.compile(model)
    trainer = transformers.Trainer(compiled, args, train_dataset=dataset)
    trainer.train()
    # end of shown
    assert trainer.state.global_step == 6
    assert len(executables(compiled)) >= 2  # forward and backward, of each form of inputs
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6")
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in model.state_dict().items())


def test_accelerate_loop():
    model, batches = make_bert(), DataLoader(Sentences(), batch_size=16)
    # shown: accelerate_loop
    accelerator = accelerate.Accelerator(cpu=True)
    model = ms.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    # end of shown
    assert len(executables(model)) == 2
    assert executables(accelerator.unwrap_model(model)) == executables(model)


def test_step_around_what_accelerate_prepared():
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Sentences(), batch_size=16))

    @ms.step
    def train_step(batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in batches:
        assert train_step(batch).isfinite()
    assert len(executables(train_step)) == 1


def test_lists_of_backends_are_closed(tmp_path):
    with pytest.raises(ValueError, match="MILLSTREAM"):
        accelerate.Accelerator(cpu=True, dynamo_backend="millstream")
    with pytest.raises(ValueError, match="MILLSTREAM"):
        transformers.Trainer(
            make_bert(), arguments(tmp_path, torch_compile_backend="millstream"), train_dataset=Sentences()
        ).train()


def test_generate_says_that_it_is_not_compiled():
    config = transformers.GPT2Config(vocab_size=60, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    compiled = ms.compile(transformers.GPT2LMHeadModel(config).eval())
    with pytest.raises(ms.FallbackWarning, match=r"generate\(\) is not compiled"):
        compiled.generate(torch.randint(60, (1, 4)), max_new_tokens=2, do_sample=False, pad_token_id=0)
