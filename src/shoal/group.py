"""The public name of `shoal.envs.group`: the protocol of an env that has several lanes."""

from shoal.envs.group import MODES, Answers, GroupEnv, Infos, is_group

__all__ = ["MODES", "Answers", "GroupEnv", "Infos", "is_group"]
