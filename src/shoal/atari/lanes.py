"""Many Atari games with a lane for each, played by the vector env of `ale_py` in its own threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from shoal.envs.batch_lanes import BatchLanes
from shoal.envs.group import Answers, Infos
from shoal.errors import BadEnv
from shoal.memory.info_columns import InfoColumns, Part
from shoal.support.checks import check_choice
from shoal.support.optional_dependencies import require

Array = npt.NDArray[Any]
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
INFOS = ("lives", "episode_frame_number", "frame_number")  # in the order of Gymnasium's infos
MOST_SEED = 2**31


class AtariLanes(BatchLanes):
    """Games of one kind; `shoal.atari.make` makes pools of them.

    Observations are uint8 [stack, height, width], with a last axis of 3 if they are in color. With the default options
    they are what Gymnasium's `AtariPreprocessing` and `FrameStackObservation` make of single games.

    Args:
        game: the name of its ROM, such as "ms_pacman".
        num_envs: how many games.
        num_threads: how many threads play them; by default one for each core.
        frame_skip: frames for which an action is repeated.
        noop_max: an episode begins with up to so many frames without an action, 0 for none.
        stack: how many of the last frames an observation has.
        padding: what stands for frames from before an episode: its first frame ("reset") or zeros ("zero").
        screen_size: height and width, or one number for both.
        grayscale: False for colors.
        episodic_life: a lost life ends the episode, and the next one begins a new game.
        clip_rewards: rewards are cut to the range from -1 to 1. Statistics of episodes count them whole.
        fire_reset: an episode begins with the action FIRE, in games that wait for it.
        repeat_action_probability: how often a frame repeats the action before, at random.
        full_action_space: all 18 actions, in every game.
        max_frames: frames after which an episode is truncated.
        statistics: the last info of an episode has its return, length and time, under "episode".
    """

    modes = tuple(MODES)
    resets_alone = True
    metadata: dict[str, Any] = {"render_modes": []}
    render_mode = None

    def __init__(
        self,
        game: str,
        num_envs: int = 1,
        *,
        num_threads: int | None = None,
        frame_skip: int = 4,
        noop_max: int = 30,
        stack: int = 4,
        padding: str = "reset",
        screen_size: int | tuple[int, int] = 84,
        grayscale: bool = True,
        episodic_life: bool = False,
        clip_rewards: bool = False,
        fire_reset: bool = False,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        max_frames: int = 108000,
        statistics: bool = True,
    ):
        check_choice("padding", padding, ("reset", "zero"))
        height, width = (screen_size, screen_size) if isinstance(screen_size, int) else screen_size
        self._arguments: dict[str, Any] = {
            "num_threads": num_threads or 0, "frameskip": frame_skip, "noop_max": noop_max, "stack_num": stack,
            "img_height": height, "img_width": width, "grayscale": grayscale, "episodic_life": episodic_life,
            "reward_clipping": False, "use_fire_reset": fire_reset, "full_action_space": full_action_space,
            "repeat_action_probability": repeat_action_probability, "max_num_frames_per_episode": max_frames,
        }  # fmt: skip
        self.name, self._count, self._mode = game, num_envs, self.modes[0]
        self._clips, self._counts, self._older = clip_rewards, statistics, stack - 1 if padding == "reset" else 0
        env = self._play()
        super().__init__(env, num_envs, env.single_observation_space, env.single_action_space)
        self._first = np.zeros((num_envs, *env.single_observation_space.shape[1:]), np.uint8)
        self._age = np.full(num_envs, stack)  # steps since the episode began, up to the number of older frames
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._since = np.zeros(num_envs)

    def _play(self) -> Any:
        vector_env = require("ale_py.vector_env", "batches of Atari games need a package", "atari")
        ale = require("ale_py", "batches of Atari games need a package", "atari")
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # each game would greet
        known = sorted(ale.roms.get_all_rom_ids())
        if self.name not in known:
            raise BadEnv(f"there is no Atari game {self.name!r}: expected one of {', '.join(known)}")
        return vector_env.AtariVectorEnv(self.name, self._count, autoreset_mode=MODES[self._mode], **self._arguments)

    def use(self, autoreset: str) -> None:
        super().use(autoreset)
        if autoreset != self._mode:  # the games begin anew by themselves, in a way that is settled when they are made
            self._mode = autoreset
            self.env.close()
            self.env = self._play()

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        numbers = np.array([-1 if seed is None else seed % MOST_SEED for seed in seeds], np.int64)
        given = {} if len(rows) == self.num_lanes else {"reset_mask": self._mask(rows)}
        obs, infos = self.env.reset(seed=numbers, options=given)
        self._begun(rows)
        self._write(out.obs, self._padded(obs, rows), slice(None), rows)
        self._episodes.begun(rows, out)
        return InfoColumns.of({name: infos[name][rows].astype(np.int64) for name in INFOS}, len(rows))

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        obs, reward, out.terminated[:], out.truncated[:], infos = self.env.step(actions)
        self._episodes.note(out)
        out.reward[:] = np.clip(reward, -1, 1) if self._clips else reward
        over = out.terminated | out.truncated
        self._age += 1
        self._count_up(reward, out.began & ~over)
        parts = [Part(None, {name: infos[name].astype(np.int64) for name in INFOS})]
        if over.any():
            parts += self._ended(np.flatnonzero(over), infos, out, parts[0])
        began = np.flatnonzero(out.began)
        if len(began):
            self._begun(began)
        self._write(out.obs, self._padded(obs, rows))
        return InfoColumns(self.num_lanes, parts)

    def _count_up(self, reward: Array, only_began: Array) -> None:
        self._returns += np.where(only_began, 0, reward)
        self._lengths += ~only_began

    def _ended(self, rows: Array, infos: Any, out: Answers, all_rows: Part) -> list[Part]:
        """Keep the last observations of these rows, and return the infos that they have beside the others."""
        own = {name: column[rows] for name, column in all_rows.columns.items()}
        if out.final:
            finals = np.array(infos["final_obs"])
            self._pad(finals, rows[self._age[rows] < self._older])
            out.final[0][rows], out.has_final[rows] = finals[rows], True
        seconds = np.round(time.perf_counter() - self._since[rows], 6)
        statistics = {"episode": {"r": self._returns[rows], "l": self._lengths[rows], "t": seconds}}
        if not self._counts:
            return []
        return [Part(rows, {"final_info": statistics, **own} if out.final else {**own, **statistics})]

    def _begun(self, rows: Array) -> None:
        self._age[rows] = self._lengths[rows] = 0
        self._returns[rows], self._since[rows] = 0, time.perf_counter()

    def _padded(self, obs: Array, rows: Array) -> Array:
        """Put first frames where the games have zeros."""
        if self._older:
            began = rows[self._age[rows] == 0]
            self._first[began] = obs[began, -1]
            self._pad(obs, rows[self._age[rows] < self._older])
        return obs

    def _pad(self, obs: Array, young: Array) -> None:
        for row in young.tolist():
            obs[row, : self._older - self._age[row]] = self._first[row]

    # ---- what ALE's vector env has no way for ------------------------------------------------------------------

    def save_rows(self, rows: Sequence[int]) -> list[Any]:
        """Refuse."""
        raise NotImplementedError(
            "ALE's batches of games cannot be saved: make the games one by one, as gymnasium.make does, and they can"
        )

    load_rows: Any = save_rows

    def close(self) -> None:
        self.env.close()
