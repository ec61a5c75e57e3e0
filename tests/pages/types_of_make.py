"""What type checkers must find `shoal.make` to return; `make types` checks this file, and nothing runs it."""

from stable_baselines3 import PPO
from typing_extensions import assert_type

import shoal
from shoal.dialects.agents import BatchedParallelEnv
from shoal.dialects.baselines import BaselinesVecEnv
from shoal.dialects.dm_env import BatchedEnvironment
from shoal.dialects.gymnasium import VectorEnv
from shoal.dialects.gymnasium029 import VectorEnv as OldVectorEnv
from shoal.dialects.sample_factory import BatchedEnv
from shoal.dialects.sb3 import SubprocVecEnv, VecNormalize, make_vec_env
from shoal.dialects.tianshou import PoolVectorEnv
from shoal.dialects.vec_env import PoolVecEnv

assert_type(shoal.make("CartPole-v1", 4), VectorEnv)
assert_type(shoal.make("CartPole-v1", 4, api="gymnasium", on_error="restart", step_timeout=1.0), VectorEnv)
assert_type(shoal.make("CartPole-v1", 4, api="gymnasium029"), OldVectorEnv)
assert_type(shoal.make("CartPole-v1", 4, api="sb3"), PoolVecEnv)
assert_type(shoal.make("CartPole-v1", 4, api="baselines"), BaselinesVecEnv)
assert_type(shoal.make("CartPole-v1", 4, api="dm_env"), BatchedEnvironment)
assert_type(shoal.make("CartPole-v1", 4, api="tianshou", wait_num=2), PoolVectorEnv)
assert_type(shoal.make("CartPole-v1", 4, api="sample_factory"), BatchedEnv)
assert_type(shoal.make("CartPole-v1", 4, api="agents"), BatchedParallelEnv)

# What Stable-Baselines3 takes, and what it does not know.
PPO("MlpPolicy", shoal.make("CartPole-v1", 4, api="sb3"))
PPO("MlpPolicy", VecNormalize(make_vec_env("CartPole-v1", 4, vec_env_cls=SubprocVecEnv)))

# A misspelt option is an error before anything runs.
shoal.make("CartPole-v1", 4, on_eror="restart")  # type: ignore[call-overload]  # pyright: ignore
shoal.Pool("CartPole-v1", 4, backend=3)  # type: ignore[arg-type]  # pyright: ignore
