"""Chooses how envs are run: the backend, the number of workers, how long a wait spins.

`building` makes a pool's parts by such a plan, in one short sequence of steps. May import `engine` and what is below
it. Read `plan` first. `tuning`, which tries plans on real pools, lies above the pool and so in a package of its own.
"""
