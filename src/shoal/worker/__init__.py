"""Runs the envs of one worker: builds and steps them, carries out commands of the caller, and replaces lost envs.

It may import `state`, `envs`, `memory`, `spaces` and `native`, and packages below them. Read `base` first: it has all
that kinds of blocks have in common; then `single`, and `grouped` for envs with several lanes.
"""
