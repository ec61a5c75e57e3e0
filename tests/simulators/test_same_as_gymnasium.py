"""Gymnasium's MuJoCo envs as batches: the same trajectories, bit for bit, with every constructor argument."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from simulators.alike import STEPS, assert_alike

mujoco = pytest.importorskip("mujoco", reason="the extra `mujoco` is not installed")
pytestmark = pytest.mark.skipif(shoal.native.KIND == "twin", reason="without the core, ids are stepped one by one")

# For each env, other values than the default ones of all constructor arguments of Gymnasium's class.
RUNNER = {"forward_reward_weight": 2.5, "ctrl_cost_weight": 0.3, "frame_skip": 3,
          "exclude_current_positions_from_observation": False}  # fmt: skip
HEALTH = {"healthy_reward": 3, "terminate_when_unhealthy": False}
HUMANOID = {f"include_{name}_in_observation": False for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Ant-v5": {**RUNNER, **HEALTH, "contact_cost_weight": 0.1, "main_body": "front_left_leg", "reset_noise_scale": 0.3,
               "healthy_z_range": (0.4, 0.8), "contact_force_range": (-0.3, 0.4),
               "include_cfrc_ext_in_observation": False},
    "HalfCheetah-v5": {**RUNNER, "reset_noise_scale": 0.4},
    "Hopper-v5": {**RUNNER, **HEALTH, "healthy_state_range": (-2.0, 1.5), "healthy_z_range": (1.1, 1.3),
                  "healthy_angle_range": (-0.05, 0.05), "reset_noise_scale": 0.02},
    "Humanoid-v5": {**RUNNER, **HEALTH, **HUMANOID, "contact_cost_weight": 1e-3, "contact_cost_range": (0.001, 0.1),
                    "healthy_z_range": (1.2, 1.5), "reset_noise_scale": 0.1},
    "HumanoidStandup-v5": {**HUMANOID, "frame_skip": 3, "uph_cost_weight": 2, "ctrl_cost_weight": 0.3,
                           "impact_cost_weight": 1e-3, "impact_cost_range": (0.001, 0.1), "reset_noise_scale": 0.1,
                           "exclude_current_positions_from_observation": False},
    "InvertedDoublePendulum-v5": {"frame_skip": 3, "healthy_reward": 7, "reset_noise_scale": 0.2},
    "InvertedPendulum-v5": {"frame_skip": 3, "reset_noise_scale": 0.15},
    "Pusher-v5": {"frame_skip": 3, "reward_near_weight": 2.0, "reward_dist_weight": 0.3, "reward_control_weight": 0.7},
    "Reacher-v5": {"frame_skip": 3, "reward_dist_weight": 0.3, "reward_control_weight": 0.7},
    "Swimmer-v5": {**RUNNER, "reset_noise_scale": 0.4},
    "Walker2d-v5": {**RUNNER, **HEALTH, "healthy_z_range": (1.1, 1.3), "healthy_angle_range": (-0.1, 0.1),
                    "reset_noise_scale": 0.05},
}  # fmt: skip
CAMERA = {"default_camera_config": {"distance": 9.0}}
CASES = [(env, {name: value}) for env, found in ARGUMENTS.items() for name, value in {**found, **CAMERA}.items()]


def vectors(env: str, count: int, **kwargs: Any) -> tuple[Any, Any]:
    return shoal.make(env, count, env_kwargs=kwargs), gymnasium.make_vec(env, count, "sync", **kwargs)


@pytest.mark.parametrize("env", ARGUMENTS)
def test_trajectories_are_the_same(env: str) -> None:
    ours, theirs = vectors(env, 3)
    assert ours.pool.plan.backend == "batched"
    assert "one object steps all envs" in ours.pool.plan.reason
    assert_alike(ours, theirs)
    ours.close()


@pytest.mark.parametrize("env", ["Hopper-v5", "Reacher-v5", "Humanoid-v5"])
def test_trajectories_are_the_same_where_episodes_begin_in_the_same_step(env: str) -> None:
    ours = shoal.make(env, 3, autoreset="same_step")
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    theirs = gymnasium.make_vec(env, 3, "sync", vector_kwargs={"autoreset_mode": mode})
    assert assert_alike(ours, theirs, max(STEPS, 60), finals=True) > 0
    ours.close()


@pytest.mark.parametrize(("env", "kwargs"), CASES, ids=[f"{env}-{next(iter(kwargs))}" for env, kwargs in CASES])
def test_arguments_mean_the_same(env: str, kwargs: dict[str, Any]) -> None:
    ours, theirs = vectors(env, 2, **kwargs)
    assert ours.single_observation_space == theirs.single_observation_space
    assert_alike(ours, theirs, max(STEPS // 3, 8))
    ours.close()


@pytest.mark.parametrize("env", ARGUMENTS)
def test_all_arguments_are_compared(env: str) -> None:
    module, _, name = gymnasium.spec(env).entry_point.partition(":")
    known = inspect.signature(getattr(__import__(module, fromlist=[name]), name)).parameters
    assert set(known) - {"kwargs"} == {*ARGUMENTS[env], *CAMERA, "xml_file"}
    changed = [one for one, value in ARGUMENTS[env].items() if value == known[one].default]
    assert not changed, "these values are the default ones"


def test_another_model_file(tmp_path: Path) -> None:
    source = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml"
    file = tmp_path / "slow_hopper.xml"
    file.write_text(source.read_text().replace('timestep="0.002"', 'timestep="0.004"'))
    ours, theirs = vectors("Hopper-v5", 2, xml_file=str(file))
    assert ours.get_attr("dt") == (0.016, 0.016)
    assert_alike(ours, theirs)
    ours.close()


def test_time_limits_are_those_of_the_spec_or_as_asked_for() -> None:
    ours, theirs = vectors("HalfCheetah-v5", 2, max_episode_steps=7)
    assert assert_alike(ours, theirs, 20) == 4
    ours.close()


def test_what_gymnasium_refuses_is_refused() -> None:
    with pytest.raises(shoal.EnvError, match="no_such_argument"):
        shoal.make("Ant-v5", 2, env_kwargs={"no_such_argument": 1})
    with pytest.raises(shoal.EnvError, match="does not exist"):
        shoal.make("Ant-v5", 2, env_kwargs={"xml_file": "/nowhere.xml"})


def test_a_seed_draws_what_one_env_draws() -> None:
    ours = shoal.make("Walker2d-v5", 5)
    obs, _ = ours.reset(seed=[5, 9, 2, 5, 1])
    env = gymnasium.make("Walker2d-v5")
    for row, seed in enumerate([5, 9, 2, 5, 1]):
        np.testing.assert_array_equal(obs[row], env.reset(seed=seed)[0])
    ours.close()
