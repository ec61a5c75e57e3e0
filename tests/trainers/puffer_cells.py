"""The trainings of PufferLib's trainer, for both of its distributions: pufferlib 3.0.0 and pufferlib-core."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections import defaultdict
from typing import Any

import gymnasium
import pufferlib.emulation
import pufferlib.models
import pufferlib.vector
import torch
from ladder import OURS, Cell, Clock, Training
from pufferlib.pufferl import PuffeRL
from pufferlib.pufferlib import EpisodeStats

from shoal.dialects import puffer

NUM_ENVS, HORIZON = 16, 64
CONFIG = {
    "torch_deterministic": True, "cpu_offload": False, "device": "cpu", "optimizer": "adam", "anneal_lr": True,
    "precision": "float32", "learning_rate": 0.003, "gamma": 0.99, "gae_lambda": 0.95, "update_epochs": 2,
    "clip_coef": 0.2, "vf_coef": 2.0, "vf_clip_coef": 0.2, "max_grad_norm": 1.5, "ent_coef": 0.001,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "checkpoint_interval": 10**9, "batch_size": "auto",
    "minibatch_size": 512, "max_minibatch_size": 512, "bptt_horizon": HORIZON, "compile": False,
    "compile_mode": "default", "compile_fullgraph": False, "vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0,
    "prio_alpha": 0.8, "prio_beta0": 0.2, "use_rnn": False, "env": "env", "name": "ladder", "project": "ladder",
}  # fmt: skip


class Quiet(PuffeRL):  # type: ignore[misc]
    """PuffeRL without its dashboard, which is a screen of text four times a second."""

    def print_dashboard(self, *_: Any, **__: Any) -> None:
        """Print nothing."""


def make_env(env_id: str, buf: Any = None, seed: int = 0) -> Any:
    """PufferLib's standard creator, with the return of each episode in its last info."""
    env = EpisodeStats(gymnasium.make(env_id))
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def train(env_id: str, vec: dict[str, Any], rollouts: int, who: str, seed: int, use_rnn: bool = False) -> Training:
    """Train for some rollouts."""
    make = puffer.make if who == OURS else pufferlib.vector.make
    vecenv: Any = make(functools.partial(make_env, env_id), num_envs=NUM_ENVS, **vec)
    torch.manual_seed(seed)
    policy = pufferlib.models.Default(vecenv.driver_env, hidden_size=64)
    if use_rnn:
        policy = pufferlib.models.LSTMWrapper(vecenv.driver_env, policy, input_size=64, hidden_size=64)
    steps = NUM_ENVS * HORIZON
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "seed": seed, "data_dir": folder, "total_timesteps": (rollouts + 1) * steps}
        config["use_rnn"] = use_rnn
        trainer = Quiet(config, vecenv, policy)
        returns: list[float] = []
        try:
            _turn(trainer, returns)
            with Clock() as clock:
                for _ in range(rollouts):
                    _turn(trainer, returns)
        finally:
            trainer.close()
    return Training(returns, rollouts * steps, clock.seconds)


def _turn(trainer: Any, returns: list[float]) -> None:
    trainer.stats = defaultdict(list)  # PuffeRL empties it by the clock
    trainer.evaluate()
    returns += [float(found) for found in trainer.stats["episode_return"]]
    trainer.train()


def cells() -> list[Cell]:
    """The cells of the ladder."""
    warnings.simplefilter("ignore")
    # With two workers theirs waits by reading flags, which takes a core each; the trainer computes meanwhile.
    serial = {"backend": "Serial"}
    workers = {"backend": "Multiprocessing", "num_workers": 2, "overwork": True}
    return [
        _cell("CartPole-v1", serial, 20),
        _cell("HalfCheetah-v5", serial, 17),  # an episode is longer than 15 rollouts
        _cell("HalfCheetah-v5", workers, 17),
    ]


def _cell(env_id: str, vec: dict[str, Any], rollouts: int) -> Cell:
    kind = vec["backend"]
    names = {"theirs": f"vector.{kind}", "ours": f"shoal.dialects.puffer.{kind}"}
    return Cell("PuffeRL", env_id, **names, train=functools.partial(train, env_id, vec, rollouts))
