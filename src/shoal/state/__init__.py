"""The state of envs and pools as data: taken from what runs, kept in a file, put back later.

It may import `envs`, `memory` and the packages below them. Read `env_state` first: it saves and loads one env.
`datafile` turns plain values into JSON and arrays; `generators` and `sizes` check what a file says; `snapshot` is the
state of a whole pool.
"""
