"""A GAN: two networks, two optimizers, both of their updates in one graph.

python examples/gan.py [STEPS]
"""

import sys
from itertools import chain, islice, repeat

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import millstream as ms

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
NOISE = 16
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # pixels are 0 to 16
loader = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)

generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()).to(device)
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))


@ms.step
def train_step(real: Tensor) -> tuple[Tensor, Tensor]:
    fake = generator(torch.randn(len(real), NOISE, device=real.device))  # new numbers in every replay
    critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    critic_loss.backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()

    generator_loss = F.softplus(-critic(fake)).mean()
    generator_loss.backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    critic_optimizer.zero_grad()  # the generator's backward pass went through the critic
    return critic_loss, generator_loss


batches = islice(chain.from_iterable(repeat(loader)), STEPS)
for step, real in enumerate(ms.feed(batches, device)):
    critic_loss, generator_loss = train_step(real)
    if step % 100 == 0:
        print(f"step {step:4}  critic {critic_loss.item():.3f}  generator {generator_loss.item():.3f}")
