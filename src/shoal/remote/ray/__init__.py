"""backend="ray": blocks of envs in the actors of a Ray cluster.

It imports the modules of `remote`, and Ray only when a pool asks for it. Read `transport` first (options, and where
actors are placed), then `link` (the caller's end and the actor's end).

The way of one message: `RayLink.post` calls the actor's `serve`, which puts the message into the inbox of the thread
that runs `RayHost.work`. The result of the call is the answer. Small messages to an actor on the caller's own node go
through a `RayChannel` in shared memory instead, and the thread of `Listener` takes their answers.
"""
