"""The memory that a pool and its workers share: the slab, its header, and what is read from it or goes beside it.

May import `errors`, `support`, `native` and `spaces`. Read `slab` first; `native.layout` has the table of its fields.
"""
