"""How blocks of envs are run: by the caller itself, in threads, in processes, or as one batched env.

A `Backend` makes the workers of a pool, and a `Worker` is the caller's handle of one block; both say nothing of steps,
which `worker` does. May import `worker` and what is below it. Read `backend` first, then `base`, then one backend, such
as `threads`.
"""
