"""Small helpers that know nothing of envs: checks of arguments, deadlines, cores, processes, files, optional packages.

It may import `shoal.errors` alone. All modules are independent of each other; `checks` is used most, so read it first.
"""
