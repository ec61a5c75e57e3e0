"""Pools whose envs live on other machines: hosts, and who carries messages to them. Imported when a pool asks for it."""
