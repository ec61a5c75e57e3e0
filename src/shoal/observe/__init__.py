"""What a pool tells about itself while it runs: counts, shares of the time, advice in words, and `shoal top`.

The package reads counters that the workers and the scheduler keep in the slab. It may import what lies below pools:
support, native and memory. Read `stats` first: it defines what `pool.stats()` returns, and `diagnosis` puts that into
words. `timeline` and `html_report` are the page of `shoal profile --html`. `running_pools` and `top` look at the pools
of other processes.
"""
