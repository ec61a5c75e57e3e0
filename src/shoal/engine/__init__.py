"""What drives the lanes of a pool: it asks workers for steps, waits for answers, and replaces what is lost.

Knows no backend by name and no public API. May import `backends`, `options` and what is below them. Read `scheduler`
first; `lane_table` is what all parts share, also which lanes were asked, and `recovery` what happens after a loss.
"""
