"""Makes envs from what the user passed, and turns those of other libraries into Gymnasium envs or envs with lanes.

May import `memory` and the packages below it. Read `functions` first (from an argument to functions that make envs),
then `adapt` (from an env of any library to one that a worker can step).
"""
