"""What a caller and its workers share: the slab with a row for each lane, and the messages that travel beside it.

May import `spaces`, `native` and what is below them. Read `slab` first, then `answers`, which reads what lanes have
answered, and `messages`.
"""
