"""The job ``char-rnn``: a character LSTM, written as a custom cell, learns text.

The classic of its kind (two layers of 128 units, 50 characters unrolled, 50 sequences in a batch, RMSprop, gradients
clipped to ±5): many small kernels in a row, which is what a GPU runs worst one launch at a time.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream.cli.training.job import Batch, Carry, Job, count_parameters
from millstream.errors import ArgumentError

MAX_DEFAULT_CHARACTERS = 1_000_000  # about as much as the usual corpora of this model; reading it takes a blink
UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # stands for every character that is too rare for the vocabulary
LEARNING_RATE = 2e-3
SMOOTHING = 0.95
MAX_GRADIENT = 5.0


@dataclass(frozen=True)
class Sizes:
    """How large the model and its batches are."""

    layers: int
    hidden: int
    sequence: int
    batch: int


@dataclass(frozen=True)
class Sample:
    """How much text to generate, and how boldly."""

    length: int
    temperature: float


@dataclass(frozen=True)
class Corpus:
    """A text as numbers.

    Attributes:
        codes: Position in ``vocabulary`` of each character, int64, shape (characters,).
        vocabulary: The characters told apart.
        digest: Tells one text from another.
    """

    codes: Tensor
    vocabulary: str
    digest: str


class LstmCell(nn.Module):
    """One step of one LSTM layer, its four gates side by side in two linear maps."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input_map = nn.Linear(inputs, 4 * hidden)
        self.hidden_map = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new hidden and cell state, each (batch, hidden), for inputs ``x`` of (batch, inputs)."""
        enter, forget, leave, value = (self.input_map(x) + self.hidden_map(h)).chunk(4, dim=1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(value)
        return torch.sigmoid(leave) * torch.tanh(c), c


class CharRnn(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.hidden = hidden
        self.layers = nn.ModuleList(LstmCell(vocabulary if i == 0 else hidden, hidden) for i in range(layers))
        self.decoder = nn.Linear(hidden, vocabulary)

    def first_state(self, batch: int) -> Carry:
        """Return the state before the first character: per layer ``h`` and ``c``, each (batch, hidden), of zeros."""
        return tuple(self.decoder.weight.new_zeros(batch, self.hidden) for _ in range(2 * len(self.layers)))

    def forward(self, codes: Tensor, state: Carry) -> tuple[Tensor, Carry]:
        """Read some characters.

        Args:
            codes: The characters, (batch, sequence).
            state: As from ``first_state``, or from the call before.

        Returns:
            Scores of the next characters, (batch, sequence, vocabulary), and the state after the last.
        """
        hidden, cell = list(state[0::2]), list(state[1::2])
        tops = []
        for value in F.one_hot(codes, self.vocabulary).to(self.decoder.weight.dtype).unbind(1):
            for i, layer in enumerate(self.layers):
                hidden[i], cell[i] = layer(hidden[i - 1] if i else value, hidden[i], cell[i])
            tops.append(hidden[-1])
        return self.decoder(torch.stack(tops, dim=1)), tuple(chain.from_iterable(zip(hidden, cell, strict=True)))


def make_job(corpus: Corpus, sizes: Sizes, sample: Sample, device: torch.device, seed: int) -> Job:
    """Make the job; the same arguments give the same weights and batches.

    Raises:
        ArgumentError: The text is too short for one batch.
    """
    needed = sizes.batch * sizes.sequence + 1
    if len(corpus.codes) < needed:
        raise ArgumentError(
            f"the text has {len(corpus.codes):,} characters, but one batch of {sizes.batch} sequences of "
            f"{sizes.sequence} needs {needed:,}: give a longer --text, or a smaller --batch or --sequence"
        )
    torch.manual_seed(seed)
    model = CharRnn(len(corpus.vocabulary), sizes.hidden, sizes.layers).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LEARNING_RATE, alpha=SMOOTHING)

    def train_step(codes: Tensor, targets: Tensor, state: Carry) -> tuple[Tensor, Carry]:
        scores, state = model(codes, state)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), MAX_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), tuple(value.detach() for value in state)

    return Job(
        name="char-rnn",
        title=f"LSTM {sizes.layers} x {sizes.hidden}, sequence {sizes.sequence}, batch {sizes.batch}, "
        f"{count_parameters(model):,} parameters; {len(corpus.codes):,} characters of text",
        identity=asdict(sizes) | {"vocabulary": corpus.vocabulary, "text": corpus.digest, "seed": seed},
        device=device,
        unit="characters",
        units_per_step=sizes.batch * sizes.sequence,
        steps=300,
        model=model,
        optimizer=optimizer,
        step=train_step,
        carry=model.first_state(sizes.batch),
        batches=lambda start: cut_batches(corpus.codes, sizes, start),
        show=lambda: write_text(model, corpus.vocabulary, sample, seed),
    )


def read_text(path: Path | None) -> str:
    """Read a text: a file, or by default the top modules of Python's standard library, in order of their names.

    Raises:
        ArgumentError: It cannot be read, or is no UTF-8.
    """
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"cannot read --text {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ArgumentError(f"--text {path} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    library = Path(sysconfig.get_path("stdlib"))
    text = ""
    for module in sorted(library.glob("*.py")):
        text += module.read_text(encoding="utf-8", errors="replace")
        if len(text) >= MAX_DEFAULT_CHARACTERS:
            break
    if not text:
        raise ArgumentError(f"this Python keeps no source of its standard library in {library}: give a --text")
    return text[:MAX_DEFAULT_CHARACTERS]


def make_corpus(text: str, max_vocabulary: int) -> Corpus:
    """Turn a text into numbers, with its most common characters as vocabulary.

    Ties go to the smaller code point. When the text has more characters than fit, ``UNKNOWN`` takes one place and
    stands for all the rare ones.
    """
    counts = Counter(text)
    if len(counts) > max_vocabulary:
        del counts[UNKNOWN]
        common = sorted(counts, key=lambda character: (-counts[character], character))[: max_vocabulary - 1]
        vocabulary = "".join(sorted(common)) + UNKNOWN
    else:
        vocabulary = "".join(sorted(counts))
    code_of = {character: code for code, character in enumerate(vocabulary)}
    rare = len(vocabulary) - 1
    codes = torch.tensor([code_of.get(character, rare) for character in text], dtype=torch.int64)
    return Corpus(codes, vocabulary, hashlib.sha256(text.encode()).hexdigest())


def cut_batches(codes: Tensor, sizes: Sizes, start: int) -> Iterator[Batch]:
    """Yield inputs and targets, each (batch, sequence), from step ``start`` on, without end.

    The text is cut into ``batch`` rows of equal length; each step continues in every row where the step before stopped,
    so the carried state fits. After the last column the rows begin again.
    """
    length = (len(codes) - 1) // sizes.batch
    inputs = codes[: sizes.batch * length].view(sizes.batch, length)
    targets = codes[1 : sizes.batch * length + 1].view(sizes.batch, length)
    step = start
    while True:
        begin = step % (length // sizes.sequence) * sizes.sequence
        window = slice(begin, begin + sizes.sequence)
        yield inputs[:, window].contiguous(), targets[:, window].contiguous()
        step += 1


@torch.no_grad()
def write_text(model: CharRnn, vocabulary: str, sample: Sample, seed: int) -> str:
    """Let the model write, each character drawn from what it expects; the same seed draws the same text."""
    generator = torch.Generator().manual_seed(seed)
    state = model.first_state(batch=1)
    code = torch.tensor([[max(vocabulary.find("\n"), 0)]], device=model.decoder.weight.device)
    written = []
    for _ in range(sample.length):
        scores, state = model(code, state)
        chances = torch.softmax(scores[0, 0].float().cpu() / sample.temperature, dim=0)
        drawn = int(torch.multinomial(chances, 1, generator=generator))
        written.append(vocabulary[drawn])
        code.fill_(drawn)
    return "".join(written)
