"""Mistakes of a user of the command line. Each ends as one sentence and exit code 2."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done; the message is one sentence for the user."""


class Skip(Exception):
    """Raised by a contender that does not apply to this work; becomes a row with the reason."""
