"""backend="mpi": blocks of envs in the ranks of an MPI job. Rank 0 drives the pools, and the other ranks serve.

    import shoal

    shoal.serve()                                       # ranks but 0 stay here until rank 0 is done, and leave
    pool = shoal.Pool("CartPole-v1", 64, backend="mpi")

It imports the modules of `remote`, and mpi4py only when a rank serves or a pool asks for it. Read `transport` first
(rank 0's side), then `serve` (the other ranks' side).

One message: `MpiLink.post` sends it by the `Mailbox` of the `Driver`, with the tag of its host. The `MpiServer`
of the rank gives it to the host of this tag, and sends back what the host answers. One thread of rank 0 takes the
answers of all ranks, for all pools.
"""
