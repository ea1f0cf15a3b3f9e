"""Cases of suite ``control`` with steps of their own: a world model with three optimizers, an update that is skipped.

All sides are to give the same numbers, whatever they draw. So what is drawn is multiplied by a buffer that is zero
here: no compiler knows that, and it costs what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from benchmarks.cases.models import Training, TrainingCase


def dense(*widths: int) -> nn.Sequential:
    """Linear layers with ELU between them."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*chain(*((layer, nn.ELU()) for layer in layers[:-1])), layers[-1])


class WorldModel(nn.Module):
    """A recurrent state-space model, an actor and a critic, as of Dreamer.

    Called with observations and actions, it follows them; called with states alone, it imagines what comes after them.
    """

    def __init__(self, seen: int, acts: int, width: int, latent: int, horizon: int) -> None:
        super().__init__()
        self.width, self.latent, self.horizon = width, latent, horizon
        self.encoder, self.decoder = dense(seen, width, width), dense(width + latent, width, seen)
        self.cell, self.reward = nn.GRUCell(width, width), dense(width + latent, width, 1)
        self.mixed = nn.Linear(latent + acts, width)
        self.prior, self.posterior = dense(width, width, 2 * latent), dense(2 * width, width, 2 * latent)
        self.actor, self.critic = dense(width + latent, width, 2 * acts), dense(width + latent, width, 1)
        self.register_buffer("noise", torch.zeros(()))

    def forward(self, first: Tensor, actions: Tensor | None = None) -> tuple[Tensor, ...]:
        """The loss of the world model and its states; or imagined states and their rewards."""
        return self._imagine(first) if actions is None else self._observe(first, actions)

    def parts(self) -> tuple[Iterator[nn.Parameter], ...]:
        """Parameters of the world model, of the actor and of the critic."""
        world = (self.encoder, self.decoder, self.cell, self.reward, self.mixed, self.prior, self.posterior)
        return chain(*(part.parameters() for part in world)), self.actor.parameters(), self.critic.parameters()

    def _drawn(self, mean: Tensor, spread: Tensor) -> Tensor:
        return mean + spread * self.noise * torch.randn_like(mean)

    def _next(self, hidden: Tensor, sample: Tensor, action: Tensor) -> Tensor:
        return self.cell(F.elu(self.mixed(torch.cat([sample, action], 1))), hidden)

    def _observe(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        hidden = observations.new_zeros(observations.shape[1], self.width)
        sample = observations.new_zeros(observations.shape[1], self.latent)
        states, priors, posteriors = [], [], []
        for seen, action in zip(self.encoder(observations).unbind(), actions.unbind(), strict=True):
            hidden = self._next(hidden, sample, action)
            prior, posterior = self.prior(hidden), self.posterior(torch.cat([hidden, seen], 1))
            mean, spread = posterior.chunk(2, 1)
            sample = self._drawn(mean, F.softplus(spread) + 0.1)
            states.append(torch.cat([hidden, sample], 1))
            priors.append(prior)
            posteriors.append(posterior)
        state = torch.stack(states)
        (mean, spread), (wanted, width) = (torch.stack(each).chunk(2, 2) for each in (priors, posteriors))
        spread, width = F.softplus(spread) + 0.1, F.softplus(width) + 0.1
        apart = (spread / width).log() + (width.square() + (wanted - mean).square()) / (2 * spread.square()) - 0.5
        loss = F.mse_loss(self.decoder(state), observations) + apart.sum(-1).mean().clamp_min(1.0)
        return loss + F.mse_loss(self.reward(state).squeeze(-1), observations.mean(-1)), state.detach().flatten(0, 1)

    def _imagine(self, state: Tensor) -> tuple[Tensor, ...]:
        hidden, sample = state.split([self.width, self.latent], 1)
        states = [state]
        for _ in range(self.horizon):
            mean, spread = self.actor(states[-1]).chunk(2, 1)
            hidden = self._next(hidden, sample, self._drawn(mean, F.softplus(spread) + 0.1).tanh())
            mean, spread = self.prior(hidden).chunk(2, 1)
            sample = self._drawn(mean, F.softplus(spread) + 0.1)
            states.append(torch.cat([hidden, sample], 1))
        stacked = torch.stack(states)
        return stacked, self.reward(stacked).squeeze(-1)


class Optimizers:
    """Several, whose state is looked at as that of one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of all of them."""
        return {key: kept for each in self.parts for key, kept in each.state.items()}


class Learning(Training):
    """A world model at its start, and batches of observations and actions."""

    def make_optimizer(self, model: Any, *, fused: bool = False, capturable: bool = False) -> Any:
        """Make three."""
        extra = {"fused": fused or None, "capturable": capturable and self.device.type == "cuda"}
        return Optimizers([Adam(list(part), **self.case.arguments, **extra) for part in model.parts()])

    def make_step(self, model: Any, optimizer: Any, *, precise: bool = False) -> Callable[..., Tensor]:
        """The step of all three: the world from what was seen, the actor and the critic from what is imagined."""
        del precise
        world, actor, critic = optimizer.parts
        own = getattr(model, "_orig_mod", model)
        behaviour, judged = [*own.actor.parameters()], [*own.critic.parameters()]

        def step(observations: Tensor, actions: Tensor) -> Tensor:
            loss, state = model(observations, actions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 100.0)
            world.step()
            world.zero_grad()

            states, rewards = model(state)
            values = own.critic(states).squeeze(-1)
            returns = [values[-1]]
            for reward, value in zip(rewards[:-1].flip(0).unbind(), values[1:].flip(0).unbind(), strict=True):
                returns.append(reward + 0.99 * (0.05 * value + 0.95 * returns[-1]))
            wanted = torch.stack(returns[:0:-1])
            acted = -wanted.mean()
            for parameter, gradient in zip(behaviour, torch.autograd.grad(acted, behaviour), strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(behaviour, 100.0)
            actor.step()
            actor.zero_grad()

            valued = F.mse_loss(own.critic(states[:-1].detach()).squeeze(-1), wanted.detach())
            valued.backward()
            torch.nn.utils.clip_grad_norm_(judged, 100.0)
            critic.step()
            critic.zero_grad()
            return loss.detach() + acted.detach() + valued.detach()

        return step


@dataclass(frozen=True)
class LearnerCase(TrainingCase):
    """A world model that is trained."""

    def make(self, device: torch.device, *, tiny: bool = False) -> Training:
        """Make it, and three batches."""
        torch.manual_seed(0)
        model = self.model(tiny).to(device).train()
        return Learning(self, model, [tuple(x.to(device) for x in self.batch(tiny)) for _ in range(3)], device)


class Guarded(Training):
    """A model at its start, whose update is left out where the norm of its gradients is not finite."""

    def make_step(
        self, model: Any, optimizer: torch.optim.Optimizer, *, precise: bool = False
    ) -> Callable[..., Tensor]:
        """The step of ``Training`` with that condition."""
        kind, clip, loss_of = self.device.type, self.case.clip, self.loss_of
        assert clip is not None
        autocast = self.case.autocast is not None and not precise

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(kind, torch.bfloat16, enabled=autocast):
                out = model(x)
            loss = loss_of(out, y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            return loss

        return step


@dataclass(frozen=True)
class GuardedCase(TrainingCase):
    """A step with such a condition; without it, it is the step of its ``TrainingCase``."""

    def make(self, device: torch.device, *, tiny: bool = False) -> Training:
        """Make the model and three batches."""
        plain = self.without(device, tiny=tiny)
        return Guarded(self, plain.model, plain.batches, device)

    def without(self, device: torch.device, *, tiny: bool = False) -> Training:
        """The same, updated in any case."""
        return super().make(device, tiny=tiny)
