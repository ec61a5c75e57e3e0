"""The command `shoal`: benchmarks, profiles, tuning, estimates, videos, a live view, and a check of the installation.

This is the top package: it may import all others, and none imports it. Read `main` first: it has one function for each
command. `arguments` has their options, `report` writes their results, and `bench`, `contenders` and `peers` make up the
benchmark, in which each contender runs in a process of its own (`contender_process`, `contender_main`).
"""
