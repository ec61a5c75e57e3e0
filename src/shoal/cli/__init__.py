"""The command `shoal`: benchmarks, profiles, tuning, estimates, videos, a live view, and a check of the installation.

This is the top package: it may import all others, and none imports it. Read `main` first: it has the table of
commands. `arguments` has their options, `report` writes their results, and most commands have a module of their name.
The benchmark is `bench`, `contenders` and `peers`: each contender runs in a process of its own (`contender_process`).
"""
