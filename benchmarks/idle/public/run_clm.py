"""A causal language model with Hugging Face's Trainer and a tokenizer that is trained on the spot."""

import argparse
import random
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


def make_texts(number):
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(2000)]
    return [" ".join(dice.choices(words, k=dice.randint(60, 300))) for _ in range(number)]


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4000, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


class Lines(torch.utils.data.Dataset):
    def __init__(self, texts, tokenizer, block):
        self.texts, self.tokenizer, self.block = texts, tokenizer, block

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.tokenizer(self.texts[index], truncation=True, max_length=self.block)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    texts = make_texts(600)
    tokenizer = make_tokenizer(texts)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=args.block, n_embd=args.width, n_layer=args.layers, n_head=8
    )
    config.bos_token_id = config.eos_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            learning_rate=5e-4,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Lines(texts, tokenizer, args.block),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train()


if __name__ == "__main__":
    main()
