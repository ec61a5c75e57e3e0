"""Who runs the envs: the caller itself, threads, processes, or the caller beside processes (hybrid)."""
