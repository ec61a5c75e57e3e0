"""Runs blocks of a pool's envs in hosts elsewhere: in Ray actors (`remote.ray`) or MPI ranks (`remote.mpi`).

It may import `planning`, `engine` and the packages below them. The packages `ray` and `mpi` import the modules here,
and these import neither of the two. Read `transport` first (the protocols), then `worker` and `backend` (the pool's
side), `host` (the other side) and `wire` (the messages). Tests have a small transport within one process.

The way of one message: the pool writes requests into its slab and prompts the backend. The dispatcher's thread lets
each `RemoteWorker` pack its new requests into one message (`Wire.request`) and gives it to the worker's `Link`. The
transport carries it to the `BlockHost`, which posts it to local workers (`admit`), waits for their answers (`poll`) and
packs them (`Wire.answer`). The transport carries the answer back and has the backend `deliver` it; the worker writes it
into the slab and wakes the pool.
"""
