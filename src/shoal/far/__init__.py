"""Envs of a pool that live elsewhere: their hosts, and who carries messages to them. Imported when a pool asks."""
