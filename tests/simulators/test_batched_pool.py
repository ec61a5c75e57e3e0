"""What a pool can do with a batch of MuJoCo envs: partial batches, snapshots, calls, attributes, pictures, refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal import native

mujoco = pytest.importorskip("mujoco", reason="the extra `mujoco` is not installed")
needs_core = pytest.mark.skipif(native.KIND == "twin", reason="without the core, ids are stepped one by one")

BALANCE = """
<mujoco>
  <option timestep="0.02"/>
  <worldbody>
    <body name="cart"><joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/>
      <body><joint type="hinge" axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 0.6" size="0.05"/></body>
    </body>
  </worldbody>
  <actuator><motor joint="slide" gear="50" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


def observe(now: Any) -> Any:
    return np.concatenate([now.qpos, now.qvel], axis=1).astype(np.float32)


def reward(now: Any, before: Any, actions: Any) -> Any:
    moved = now.qpos[:, 0] - before.qpos[:, 0]
    return 1.0 - np.square(actions).sum(axis=1), {"moved": moved}


def done(now: Any) -> Any:
    return np.abs(now.qpos[:, 1]) > 0.3


def start(qpos: Any, qvel: Any, rngs: Any) -> None:
    for row, rng in enumerate(rngs):
        qpos[row] += rng.uniform(-0.05, 0.05, qpos.shape[1])


def balance(num_envs: int, **kwargs: Any) -> Any:
    return shoal.mujoco.BatchedMujocoEnv(BALANCE, num_envs, observe, reward, done, reset=start, **kwargs)


def heavier(models: Any, rngs: Any) -> None:
    models.scale("body_mass", np.array([rng.uniform(0.5, 2.0) for rng in rngs]))
    models.set("opt.gravity", np.array([[0, 0, -rng.uniform(8, 11)] for rng in rngs]))
    models.recompute()


def actions(pool: Any, count: int, step: int) -> Any:
    return np.full((count, *pool.single_action_space.shape), 0.1 * (step % 5 - 2), np.float32)


# ---- Gymnasium's envs ------------------------------------------------------------------------------------------------


@needs_core
def test_the_plan_says_what_steps_the_envs() -> None:
    with shoal.Pool("Hopper-v5", 4) as pool:
        assert pool.plan.backend == "batched"
        assert pool.plan.num_workers >= 1
        assert "one object steps all envs" in str(pool.plan)
    with shoal.Pool("Hopper-v5", 2, num_workers=2, backend="batched") as pool:
        assert pool.plan.num_workers == 2


@needs_core
@pytest.mark.parametrize(
    ("options", "backend"),
    [({"isolate": True}, "processes"), ({"on_error": "restart"}, "processes"), ({"step_timeout": 60.0}, "processes"),
     ({"backend": "serial"}, "serial")],
)  # fmt: skip
def test_other_wishes_lead_to_other_backends(options: dict[str, Any], backend: str) -> None:
    with shoal.Pool("InvertedPendulum-v5", 2, **options) as pool:
        assert pool.plan.backend == backend
        pool.reset(seed=1)


@needs_core
def test_specs_that_differ_from_gymnasiums_are_stepped_one_by_one() -> None:
    spec = gymnasium.spec("InvertedPendulum-v5")
    with shoal.Pool(gymnasium.spec("InvertedPendulum-v4"), 2) as pool:
        assert pool.plan.backend != "batched"
    with shoal.Pool(spec, 2) as pool:
        assert pool.plan.backend == "batched"
    with pytest.raises(shoal.BadEnv, match="version 5"):
        shoal.Pool("InvertedPendulum-v4", 2, backend="batched")
    with pytest.raises(shoal.BadEnv, match="no batch of these envs"):
        shoal.Pool("CartPole-v1", 2, backend="batched")


@needs_core
def test_partial_batches_step_the_lanes_that_were_sent() -> None:
    with shoal.Pool("Hopper-v5", 6, batch_size=2) as pool, shoal.Pool("Hopper-v5", 6, backend="serial") as whole:
        batch = pool.reset(seed=4)
        expected = whole.reset(seed=4)
        np.testing.assert_array_equal(batch.obs, expected.obs)
        pool.send(np.zeros((6, 3), np.float32), np.arange(6))
        expected = whole.step(np.zeros((6, 3), np.float32))
        seen: list[int] = []
        for _ in range(3):
            part = pool.recv()
            np.testing.assert_array_equal(part.obs, expected.obs[part.env_id])
            assert set(part.info) == set(part.env_id.tolist())
            seen += part.env_id.tolist()
        assert sorted(seen) == list(range(6))


@needs_core
def test_calls_and_attributes_reach_single_lanes() -> None:
    envs = shoal.make("HalfCheetah-v5", 3)
    envs.reset(seed=1)
    states = envs.call("state_vector")
    assert len({state.tobytes() for state in states}) == 3
    assert envs.get_attr("dt") == (0.05,) * 3
    placed = np.arange(9) / 10
    envs.pool.apply(lambda env: env.unwrapped.set_state(placed, np.zeros(9)), env_ids=[1])
    obs, *_ = envs.step(np.zeros((3, 6), np.float32))
    single = gymnasium.make("HalfCheetah-v5")
    single.reset(seed=2)
    single.unwrapped.set_state(placed, np.zeros(9))
    np.testing.assert_array_equal(obs[1], single.step(np.zeros(6, np.float32))[0])
    envs.set_attr("_ctrl_cost_weight", 7.0)
    _, _, _, _, infos = envs.step(np.ones((3, 6), np.float32))
    np.testing.assert_array_equal(infos["reward_ctrl"], np.full(3, -42, np.float32))
    with pytest.raises(shoal.EnvError, match="shared by all lanes"):
        envs.set_attr("_ctrl_cost_weight", [1.0, 2.0, 3.0])
    with pytest.raises(shoal.EnvError, match="cannot be replaced"):
        envs.set_attr("data", None)
    envs.close()


@needs_core
def test_restarts_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="steps all envs as one, of which none can be restarted alone"):
        shoal.Pool("Hopper-v5", 2, backend="batched", on_error="restart")


@needs_core
@pytest.mark.parametrize("env", ["Humanoid-v5", "Hopper-v5", "Pusher-v5"])
def test_a_snapshot_goes_on_bit_for_bit(env: str, tmp_path: Path) -> None:
    with shoal.Pool(env, 3) as pool, shoal.Pool(env, 3) as other:
        pool.reset(seed=2)
        other.reset(seed=9)
        for step in range(25):
            pool.step(actions(pool, 3, step))
        pool.snapshot().save(tmp_path / "file")
        other.restore(shoal.Snapshot.load(tmp_path / "file"))
        for step in range(40):
            one, two = pool.step(actions(pool, 3, step)), other.step(actions(pool, 3, step))
            np.testing.assert_array_equal(one.obs, two.obs)
            np.testing.assert_array_equal(one.reward, two.reward)
            assert str(one.info) == str(two.info)


@needs_core
def test_pictures_need_a_render_mode_and_windows_another_backend() -> None:
    with shoal.Pool("Hopper-v5", 2) as pool:
        pool.reset(seed=1)
        with pytest.raises(shoal.EnvError, match="without a render_mode"):
            pool.render(env_ids=[0])
    with pytest.raises(shoal.BadEnv, match="opens a window for each env"):
        shoal.Pool("Hopper-v5", 2, backend="batched", env_kwargs={"render_mode": "human"})


@needs_core
def test_pictures_of_single_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Viewer:
        """What draws, without a display: a picture of where the simulation is."""

        def __init__(self, model: Any, data: Any, *_: Any):
            self.model, self.data = model, data

        def render(self, render_mode: str, camera_id: int) -> Any:
            return np.full((2, 2, 3), self.data.qpos[0] * 1000)

        def close(self) -> None:
            """Nothing to close."""

    rendering = pytest.importorskip("gymnasium.envs.mujoco.mujoco_rendering")
    monkeypatch.setattr(rendering, "OffScreenViewer", Viewer)
    monkeypatch.setattr(rendering.MujocoRenderer, "_set_cam_config", lambda self: None)
    envs = shoal.make("Hopper-v5", 3, env_kwargs={"render_mode": "rgb_array"})
    envs.reset(seed=5)
    places = [data.qpos[0] for data in envs.get_attr("data")]
    frames = envs.pool.render(env_ids=[2, 0])
    assert [frame[0, 0, 0] for frame in frames] == [places[2] * 1000, places[0] * 1000]
    assert len(envs.render()) == 3
    envs.close()


# ---- envs of one's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_model_and_three_functions(kind: str) -> None:
    class Balance(shoal.mujoco.BatchedMujocoEnv):
        def __init__(self, num_envs: int = 1, num_threads: int | None = None):
            super().__init__(BALANCE, num_envs, max_episode_steps=30, num_threads=num_threads)

        observe, reward, done, draw = (staticmethod(one) for one in (observe, reward, done, start))

    env: Any = Balance if kind == "class" else functools.partial(balance, max_episode_steps=30)
    options = {} if kind == "class" else {"backend": "batched"}
    with shoal.Pool(env, 5, **options) as pool:
        assert pool.plan.backend == "batched"
        assert pool.single_observation_space == gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        assert pool.single_action_space == gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        first = pool.reset(seed=3)
        np.testing.assert_array_equal(first.obs[1, :2], np_first(4))
        ended = 0
        for _ in range(60):
            batch = pool.step(np.full((5, 1), 0.2, np.float32))
            ended += int((batch.terminated | batch.truncated).sum())
        assert ended >= 5
        assert set(batch.info[0]) <= {"moved"}


def np_first(seed: int) -> Any:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    return rng.uniform(-0.05, 0.05, 2).astype(np.float32)


def test_lanes_of_a_batch_step_as_mujoco_does() -> None:
    with shoal.Pool(functools.partial(balance, frame_skip=3), 3, backend="batched") as pool:
        pool.reset(seed=1)
        model = mujoco.MjModel.from_xml_string(BALANCE)
        data = mujoco.MjData(model)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(3)))
        data.qpos[:] += rng.uniform(-0.05, 0.05, 2)
        mujoco.mj_forward(model, data)
        for step in range(4):  # it falls soon after
            batch = pool.step(actions(pool, 3, step))
            data.ctrl[:] = actions(pool, 3, step)[2]
            mujoco.mj_step(model, data, 3)
            expected = np.concatenate([data.qpos, data.qvel]).astype(np.float32)
            np.testing.assert_array_equal(batch.obs[2], expected)


def test_models_of_lanes_differ() -> None:
    make = functools.partial(balance, randomize=heavier)
    with shoal.Pool(make, 4, backend="batched") as pool, shoal.Pool(make, 4, backend="batched") as again:
        pool.reset(seed=7)
        again.reset(seed=7)
        masses = [model.body_mass.copy() for model in pool.get_attr("model")]
        assert len({tuple(mass) for mass in masses}) == 4
        np.testing.assert_array_equal(masses, [model.body_mass for model in again.get_attr("model")])
        subtree = [model.body_subtreemass[0] for model in pool.get_attr("model")]
        np.testing.assert_allclose(subtree, [mass.sum() for mass in masses])  # which MuJoCo derives from masses
        for step in range(10):
            one, two = pool.step(actions(pool, 4, step)), again.step(actions(pool, 4, step))
        np.testing.assert_array_equal(one.obs, two.obs)
        saved = pool.snapshot()
        again.reset(seed=1)
        again.restore(saved)
        np.testing.assert_array_equal(masses, [model.body_mass for model in again.get_attr("model")])
        for step in range(10):
            one, two = pool.step(actions(pool, 4, step)), again.step(actions(pool, 4, step))
            np.testing.assert_array_equal(one.obs, two.obs)


def test_a_simulation_that_mujoco_gives_up_is_named() -> None:
    def breaks(models: Any, rngs: Any) -> None:
        models.set("opt.integrator", [77 if row == 1 else 0 for row in models.rows])

    with shoal.Pool(functools.partial(balance, randomize=breaks), 3, backend="batched") as pool:
        pool.reset(seed=1)
        with pytest.raises(shoal.EnvError, match="invalid integrator"):
            pool.step(actions(pool, 3, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model": "/nowhere.xml"}, "expected a MjModel, the path of an XML file"),
     ({"observe": None}, "needs a function 'observe'"),
     ({"observe": lambda now: np.zeros(3)}, "expected a row for each of 2 lanes"),
     ({"observe": lambda now: now.xpos}, "name it in `fields`"),
     ({"frame_skip": 0}, "frame_skip"), ({"render_mode": "human"}, "drawn one by one")],
)  # fmt: skip
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"model": BALANCE, "observe": observe, "reward": reward, **change}
    with pytest.raises((shoal.BadEnv, shoal.EnvError), match=message):
        shoal.Pool(functools.partial(shoal.mujoco.BatchedMujocoEnv, **arguments), 2, backend="batched")


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises((shoal.BadEnv, shoal.EnvError), match="has 3 lanes, and 2 envs were asked for"):
        shoal.Pool(lambda num_envs: balance(3), 2, backend="batched")
    with pytest.raises((shoal.BadEnv, shoal.EnvError), match="is one env, and no batch"):
        shoal.Pool(lambda num_envs: gymnasium.make("CartPole-v1"), 2, backend="batched")
