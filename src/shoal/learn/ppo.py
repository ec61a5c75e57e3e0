"""PPO, from top to bottom: hyperparameters, the policy's network, experience, advantages, updates.

Three ways to make experience (`host`, `compiled`, `cuda`) use this one algorithm. They bring observations, actions,
rewards and flags. Values and probabilities of the whole rollout are computed here, in one pass. Nothing here waits for
a GPU or depends on the data in its shapes, up to `Learner.learn`, so all of it can be captured as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from shoal.learn.encoders import LIMIT, Encoder, Layers, RunningMoments, as_one_vector, layer
from shoal.ranks import Ranks
from shoal.spaces.emulation import ActionEmulation
from shoal.support.checks import number, whole_number

EPSILON = 1e-8


@dataclass(frozen=True)
class Hyperparameters:
    """The settings of PPO. The defaults are those of CleanRL's ppo.py; `continuous` has those of its continuous form.

    Attributes:
        total_steps: of all lanes together; the learning rate falls to 0 until then.
        steps: of each lane in a rollout.
        learning_rate, anneal: of Adam, and whether it falls.
        gamma, trace: discount, and lambda of the generalized advantage estimate.
        epochs, minibatches: passes over a rollout, and parts that it is cut into for each of them.
        clip, clip_values: how far a ratio of probabilities may move, and whether values are clipped alike.
        entropy, value_weight: weights of these losses.
        max_gradient: the largest norm of a gradient.
        normalize_advantages: in each minibatch.
        normalize_obs, normalize_reward: by running statistics, which change between rollouts.
        hidden: sizes of the layers.
        shared: whether actor and critic share all layers but their last; None for images and memory only.
        memory: "lstm" or "gru" for a policy that remembers; None for one that does not.
        half: whether hidden layers compute in 16 bits on a GPU.
    """

    total_steps: int = 500_000
    steps: int = 128
    learning_rate: float = 2.5e-4
    anneal: bool = True
    gamma: float = 0.99
    trace: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    clip: float = 0.2
    clip_values: bool = True
    entropy: float = 0.01
    value_weight: float = 0.5
    max_gradient: float = 0.5
    normalize_advantages: bool = True
    normalize_obs: bool = False
    normalize_reward: bool = False
    hidden: tuple[int, ...] = (64, 64)
    shared: bool | None = None
    memory: str | None = None
    half: bool = False

    def __post_init__(self) -> None:
        for name in ("total_steps", "steps", "epochs", "minibatches"):
            whole_number(name, getattr(self, name), 1, 2**62)
        for name in ("learning_rate", "gamma", "trace", "clip", "entropy", "value_weight", "max_gradient"):
            number(name, getattr(self, name), 0.0, 1.0 if name in ("gamma", "trace") else 1e6)
        if self.memory not in (None, "lstm", "gru"):
            raise ValueError(f'memory: expected "lstm", "gru" or None, found {self.memory!r}')
        object.__setattr__(self, "hidden", tuple(whole_number("hidden", size, 1, 2**20) for size in self.hidden))
        if not self.hidden:
            raise ValueError("hidden: expected the size of at least one layer, found none")

    @classmethod
    def continuous(cls, **changes: Any) -> Hyperparameters:
        """Return the defaults for continuous actions, as in CleanRL's ppo_continuous_action.py."""
        own = {"learning_rate": 3e-4, "epochs": 10, "minibatches": 32, "entropy": 0.0, "total_steps": 1_000_000}
        return cls(**{**own, "normalize_obs": True, "normalize_reward": True, **changes})


# ---- the policy -----------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """An actor and a critic for any spaces of arrays.

    Actions are rows, as ActionEmulation lays them out. Each discrete column is one of several choices, each continuous
    one is drawn from a normal distribution, and clipped only on its way to the envs.
    """

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], settings: Hyperparameters):
        super().__init__()
        self.settings, self.spaces = settings, (observation_space, action_space)
        self.encoder = Encoder(observation_space, settings.normalize_obs)
        self.actions = ActionEmulation(action_space)
        parts = self.actions.parts
        self.choices = [n for part in parts for n in part.choices]
        self.columns = [c for part in parts if part.choices for c in range(part.columns.start, part.columns.stop)]
        self.floats = [c for part in parts if not part.choices for c in range(part.columns.start, part.columns.stop)]
        self.row_type = torch.float32 if self.floats else torch.int64
        self.outputs = sum(self.choices) + len(self.floats)
        if self.floats:
            self.log_std = nn.Parameter(torch.zeros(len(self.floats)))
        pictures, width, hidden = bool(self.encoder.pictures), self.encoder.width, settings.hidden
        self.shared = bool(settings.memory) or (pictures if settings.shared is None else settings.shared)
        only_pictures = pictures and not self.encoder.numbers and not settings.memory
        self.body: nn.Module = nn.Identity()
        if self.shared and not only_pictures:
            self.body, width = Layers(width, hidden), hidden[-1]
        self.cell: nn.Module | None = None
        if settings.memory:
            self.cell = (nn.LSTMCell if settings.memory == "lstm" else nn.GRUCell)(width, width)
        self.width = width
        if self.shared:  # one layer for both
            self.head = layer(width, self.outputs + 1, 0.01)
            with torch.no_grad():
                self.head.weight[-1:] = layer(width, 1, 1.0).weight
        else:
            self.actor = nn.Sequential(Layers(width, hidden), layer(hidden[-1], self.outputs, 0.01))
            self.critic = nn.Sequential(Layers(width, hidden), layer(hidden[-1], 1, 1.0))

    # ---- one step ---------------------------------------------------------------------------------------------

    def first_memory(self, lanes: int, device: Any = None) -> Tensor:
        """Return what a policy remembers before its first step, [2, lanes, width]; [0, lanes, 0] without memory."""
        shape = (2, lanes, self.width) if self.cell is not None else (0, lanes, 0)
        return torch.zeros(shape, device=device)

    def remember(self, features: Tensor, memory: Tensor, began: Tensor) -> tuple[Tensor, Tensor]:
        """Return features with memory in them, and the memory; lanes where an episode has begun remember nothing."""
        if self.cell is None:
            return features, memory
        memory = memory * (~began).to(memory.dtype)[None, :, None]
        if isinstance(self.cell, nn.LSTMCell):
            hidden, cell = self.cell(features, (memory[0], memory[1]))
            return hidden, torch.stack([hidden, cell])
        hidden = self.cell(features, memory[0])
        return hidden, torch.stack([hidden, memory[1]])

    def _precision(self, rows: Tensor) -> Any:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.settings.half and rows.is_cuda)

    def _answer(self, features: Tensor) -> tuple[Tensor, Tensor]:
        if not self.shared:
            return self.actor(features).float(), self.critic(features).squeeze(-1).float()
        both = self.head(features).float()
        return both[..., :-1], both[..., -1]

    def look(self, rows: Tensor, memory: Tensor, began: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the actor's outputs, the values if they cost nothing more, and the memory, for one step of lanes."""
        with self._precision(rows):
            features, memory = self.remember(self.body(self.encoder(rows)), memory, began)
            if self.shared:
                return *self._answer(features), memory
            return self.actor(features).float(), None, memory

    def act(self, rows: Tensor, memory: Tensor, began: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Choose actions for lanes by noise that was drawn before: (rows of actions, memory)."""
        outputs, _, memory = self.look(rows, memory, began)
        return self.choose(outputs, noise), memory

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None, device: Any = None) -> Tensor:
        """Draw noise [*shape, outputs] for `choose`: Gumbel's for choices, normal for numbers."""
        count = sum(self.choices)
        options: Any = {"generator": generator, "device": device}
        gumbel = torch.rand(*shape, count, **options).clamp_(1e-9, 1 - 1e-7).log_().neg_().log_().neg_()
        if not self.floats:
            return gumbel
        normal = torch.randn(*shape, len(self.floats), **options)
        return torch.cat([gumbel, normal], -1) if count else normal

    def choose(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Return rows of actions. The largest sum of a logit and Gumbel noise is a draw by the logits' softmax."""
        if len(self.choices) == 1 and not self.floats:
            return (outputs + noise).argmax(-1, keepdim=True)
        rows = torch.zeros(
            *outputs.shape[:-1], len(self.columns) + len(self.floats), dtype=self.row_type, device=outputs.device
        )
        noisy = outputs + noise
        at = 0
        for column, count in zip(self.columns, self.choices, strict=True):
            rows[..., column] = noisy[..., at : at + count].argmax(-1).to(self.row_type)
            at += count
        if self.floats:
            rows[..., self.floats] = outputs[..., at:] + self.log_std.exp() * noise[..., at:]
        return rows

    def judge(self, outputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the probabilities of actions, and the entropies."""
        log_prob: Any = 0.0
        entropy: Any = 0.0
        at = 0
        for column, count in zip(self.columns, self.choices, strict=True):
            logs = torch.log_softmax(outputs[..., at : at + count], -1)
            log_prob = log_prob + logs.gather(-1, rows[..., column : column + 1].long()).squeeze(-1)
            entropy = entropy - (logs.exp() * logs).sum(-1)
            at += count
        if self.floats:
            distance = (rows[..., self.floats] - outputs[..., at:]) * (-self.log_std).exp()
            constant = 0.5 * math.log(2 * math.pi)
            log_prob = log_prob + (-0.5 * distance * distance - self.log_std - constant).sum(-1)
            entropy = entropy + (self.log_std + 0.5 + constant).sum().expand(outputs.shape[:-1])
        return log_prob, entropy

    # ---- many steps -------------------------------------------------------------------------------------------

    def evaluate(self, rows: Tensor, memory: Tensor, began: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's outputs and the values of observations [steps, lanes, ...], or [n, ...] without memory."""
        lead = rows.shape[:-1]
        with self._precision(rows):
            features = self.body(self.encoder(rows.reshape(-1, rows.shape[-1])))
            if self.cell is not None:
                seen, found = features.reshape(*lead, -1), []
                for t in range(lead[0]):
                    step, memory = self.remember(seen[t], memory, began[t])
                    found.append(step)
                features = torch.cat(found)
            outputs, values = self._answer(features)
        return outputs.reshape(*lead, -1), values.reshape(lead)


# ---- experience and advantages -----------------------------------------------------------------------------------


@dataclass
class Experience:
    """A rollout of `steps` steps of all lanes, as every way brings it.

    Attributes:
        obs: rows [steps + 1, lanes, row]; `obs[t]` is what the policy saw at step t.
        actions: rows [steps, lanes, columns].
        reward: float32 [steps, lanes].
        terminated, truncated: bool [steps, lanes].
        began: bool [steps + 1, lanes], where `obs[t]` is the first of an episode.
        valid: bool [steps, lanes], where step t is one to learn from. Steps that only begin an episode are not, nor are
            those of absent agents, nor the report that a lane was restarted.
        memory: what the policy remembered before the first step.
        outputs, values: what actor [steps, lanes, ...] and critic [steps + 1, lanes] said to `obs`; None if that is
            still to be computed.
        final_at, final_obs: under same_step autoreset, indices into [steps * lanes] of steps whose next observation
            belongs to another episode already, and their last observations.
    """

    obs: Tensor
    actions: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    began: Tensor
    valid: Tensor
    memory: Tensor
    outputs: Tensor | None = None
    values: Tensor | None = None
    final_at: list[int] = field(default_factory=list)
    final_obs: list[Any] = field(default_factory=list)

    @classmethod
    def empty(cls, policy: Policy, steps: int, lanes: int, device: Any = None, pin: bool = False) -> Experience:
        """Make the memory of a rollout."""
        space: Any = policy.encoder.emulation.flat_space
        row_type = torch.from_numpy(np.zeros(1, space.dtype)).dtype
        options: dict[str, Any] = {"device": device, "pin_memory": pin}
        columns = len(policy.columns) + len(policy.floats)

        def flags(rows: int) -> Tensor:
            return torch.zeros(rows, lanes, dtype=torch.bool, **options)

        return cls(
            obs=torch.zeros(steps + 1, lanes, *space.shape, dtype=row_type, **options),
            actions=torch.zeros(steps, lanes, columns, dtype=policy.row_type, **options),
            reward=torch.zeros(steps, lanes, **options),
            terminated=flags(steps),
            truncated=flags(steps),
            began=flags(steps + 1),
            valid=flags(steps),
            memory=policy.first_memory(lanes, device),
        )

    def to(self, device: Any) -> Experience:
        """Return the same on another device; from pinned memory the copies overlap with other work."""
        moved = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return Experience(**{**vars(self), **moved})


def estimate_advantages(
    reward: Tensor, terminated: Tensor, done: Tensor, valid: Tensor, values: Tensor, next_values: Tensor,
    gamma: float, trace: float,
) -> Tensor:  # fmt: skip
    """Return generalized advantage estimates [steps, lanes].

    An episode that terminates has no value after its end; one that is truncated has that of its last observation. No
    estimate reaches beyond the end of its episode. Where a step is not valid the estimate is 0, and so is what earlier
    steps get from there.
    """
    use = valid.to(reward.dtype)
    delta = (reward + gamma * next_values * (~terminated).to(reward.dtype) - values) * use
    keep = gamma * trace * (~done).to(reward.dtype) * use
    found = torch.empty_like(delta)
    later = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        later = torch.addcmul(delta[t], keep[t], later, out=found[t])
    return found


# ---- updates -----------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """What a rollout says to learn: rows of observations and actions, and five numbers for each."""

    obs: Tensor
    actions: Tensor
    numbers: Tensor  # [5, ...]: logarithm of the probability, value, advantage, return, weight
    memory: Tensor
    began: Tensor


LOSSES = ("policy_loss", "value_loss", "entropy", "kl", "clipped")


class Learner:
    """Changes a policy by experience.

    All weights lie in one vector, and so do their gradients: Adam, the gradient's norm and sums over ranks are one
    operation each.

    Args:
        ranks: of several processes that learn the same policy together, each from its own lanes.
        reduce: sums a tensor over all ranks, in place.
    """

    def __init__(
        self, policy: Policy, lanes: int, seed: int = 0, ranks: Ranks | None = None,
        reduce: Callable[[Tensor], Any] | None = None,
    ):  # fmt: skip
        self.policy, self.settings = policy, policy.settings
        self.device = next(policy.parameters()).device
        self.ranks, self.reduce = ranks or Ranks(), reduce
        self.generator = torch.Generator().manual_seed(seed)
        self.weights, self.gradient = as_one_vector(policy)
        rate: Any = self.settings.learning_rate
        if self.device.type == "cuda":  # as a tensor, which captured graphs read each time
            rate = torch.tensor(rate, device=self.device)
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam([self.weights], lr=rate, eps=1e-5, fused=True, capturable=cuda)
        self.return_stats = RunningMoments(1).to(self.device)
        self.running = torch.zeros(lanes, device=self.device)  # discounted returns, to scale rewards by
        self.sums = torch.zeros(len(LOSSES) + 1, device=self.device)

    # ---- what there is to learn -------------------------------------------------------------------------------

    @torch.no_grad()
    def targets(self, seen: Experience) -> Targets:
        """Compute values, probabilities, advantages and returns of a rollout."""
        settings, policy = self.settings, self.policy
        outputs, values = seen.outputs, seen.values
        if outputs is None or values is None:
            outputs, values = policy.evaluate(seen.obs, seen.memory, seen.began)
        log_prob, _ = policy.judge(outputs[: len(seen.actions)], seen.actions)
        next_values = values[1:]
        if seen.final_at:
            next_values = next_values.clone()
            rows = torch.as_tensor(np.stack(seen.final_obs), device=self.device)
            alone = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
            memory = policy.first_memory(len(rows), self.device)
            _, last = policy.evaluate(rows[None], memory, alone[None])
            next_values.view(-1)[torch.as_tensor(seen.final_at, device=self.device)] = last[0]
        reward = seen.reward
        if settings.normalize_reward:
            reward = (reward * self.return_stats.scale()).clamp(-LIMIT, LIMIT)
        done = seen.terminated | seen.truncated
        advantages = estimate_advantages(
            reward, seen.terminated, done, seen.valid, values[:-1], next_values, settings.gamma, settings.trace
        )
        numbers = [log_prob, values[:-1], advantages, advantages + values[:-1], seen.valid.to(reward.dtype)]
        return Targets(seen.obs[:-1], seen.actions, torch.stack(numbers), seen.memory, seen.began[:-1])

    def minibatches(self, targets: Targets, lanes: Tensor | None = None) -> Iterator[Targets]:
        """Cut into minibatches: of any steps, or of whole lanes where the policy remembers, or lanes are given."""
        obs, actions, numbers, memory, began = targets
        if lanes is None and self.policy.cell is None:
            order = torch.randperm(numbers[0].numel(), generator=self.generator).to(obs.device)
            flat_obs, flat_actions = (x.reshape(-1, x.shape[-1]) for x in (obs, actions))
            flat = numbers.reshape(len(numbers), -1)
            for rows in order.chunk(self.settings.minibatches):
                picked = flat_obs.index_select(0, rows), flat_actions.index_select(0, rows)
                yield Targets(*picked, flat.index_select(1, rows), memory, began)
            return
        if lanes is None:
            lanes = torch.randperm(numbers.shape[2], generator=self.generator).to(obs.device)
        for rows in lanes.chunk(min(self.settings.minibatches, len(lanes))):
            seen = [x.index_select(1, rows) for x in (obs, actions, memory, began)]
            yield Targets(seen[0], seen[1], numbers.index_select(2, rows), seen[2], seen[3])

    # ---- one update -------------------------------------------------------------------------------------------

    def loss(self, batch: Targets) -> Tensor:
        """Return PPO's loss of a minibatch, and add its parts to `sums`."""
        settings = self.settings
        outputs, values = self.policy.evaluate(batch.obs, batch.memory, batch.began)
        log_prob, entropy = self.policy.judge(outputs, batch.actions)
        old_log_prob, old_value, advantage, target, weight = batch.numbers.unbind()
        # All sums of a minibatch are taken together: on a GPU each one alone takes as long as all of them.
        moments = self._total(
            torch.stack([weight, advantage * weight, advantage * advantage * weight]).flatten(1).sum(1)
        )
        count = moments[0].clamp(min=2.0)
        if settings.normalize_advantages:
            mean = moments[1] / count
            spread = (moments[2] - mean * moments[1]).clamp(min=0.0) / (count - 1)
            advantage = (advantage - mean) / (spread.sqrt() + EPSILON)
        change = log_prob - old_log_prob
        ratio = change.exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        policy_loss = -torch.min(advantage * ratio, advantage * clipped)
        error = (values - target) ** 2
        if settings.clip_values:
            near = old_value + (values - old_value).clamp(-settings.clip, settings.clip)
            error = torch.max(error, (near - target) ** 2)
        with torch.no_grad():
            kl, outside = ratio - 1 - change, ((ratio - 1).abs() > settings.clip).to(ratio.dtype)
        parts = torch.stack([policy_loss, 0.5 * error, entropy, kl, outside]) * weight
        sums = parts.flatten(1).sum(1) * (self.ranks.size / count)  # means over the minibatches of all ranks
        with torch.no_grad():
            self.sums[:-1] += sums
            self.sums[-1] += 1.0
        return sums[0] + settings.value_weight * sums[1] - settings.entropy * sums[2]

    def _total(self, value: Tensor) -> Tensor:
        """Sum over all ranks."""
        if self.reduce is not None:
            value = value.detach().clone()
            self.reduce(value)
        return value

    def step(self, batch: Targets) -> None:
        """Change the weights by one minibatch."""
        self.gradient.zero_()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if self.reduce is not None:
                self.reduce(self.gradient)
                self.gradient /= self.ranks.size
            norm = self.gradient.norm()
            self.gradient.mul_((self.settings.max_gradient / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()

    def set_progress(self, share: float) -> None:
        """Set the learning rate for this share of the training."""
        if self.settings.anneal:
            rate: Any = self.settings.learning_rate * max(0.0, 1.0 - share)
            group = self.optimizer.param_groups[0]
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # ---- a whole rollout --------------------------------------------------------------------------------------

    def learn(self, seen: Experience, between: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Learn from a rollout; returns the losses. `between` is called between minibatches."""
        self.scale_rewards(seen)
        targets = self.targets(seen)
        self.sums.zero_()
        for _ in range(self.settings.epochs):
            for batch in self.minibatches(targets):
                self.step(batch)
                between()
        self.observe(seen)
        sums = self.sums.tolist()
        return {name: total / max(sums[-1], 1.0) for name, total in zip(LOSSES, sums, strict=False)}

    @torch.no_grad()
    def scale_rewards(self, seen: Experience) -> None:
        """Take a rollout's discounted returns into the statistics that scale rewards."""
        if not self.settings.normalize_reward:
            return
        goes_on = self.settings.gamma * (~(seen.terminated | seen.truncated)).to(seen.reward.dtype)
        found = torch.empty_like(seen.reward)
        torch.add(seen.reward[0], self.running, out=found[0])
        for t in range(1, len(found)):
            torch.addcmul(seen.reward[t], goes_on[t - 1], found[t - 1], out=found[t])
        self.running.copy_(goes_on[-1] * found[-1])
        self.return_stats.add(found[..., None], seen.valid, self.reduce)

    @torch.no_grad()
    def observe(self, seen: Experience) -> None:
        """Take a rollout's observations into the statistics; the next rollout is normalized by them."""
        encoder = self.policy.encoder
        if encoder.normalize and encoder.numbers:
            encoder.stats.add(encoder.vector(seen.obs[:-1]), seen.valid, self.reduce)
