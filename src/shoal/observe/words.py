"""Numbers as people read them: durations, sizes in bytes, figures, and counts of things."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Write a time with the unit that fits: 850 ns, 4.1 us, 12 ms, 1.3 s."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * length:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def size(count: int) -> str:
    """Write a number of bytes with the unit that fits: 640 bytes, 1.5 KiB, 27 MiB."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count} bytes"


def figure(value: float) -> str:
    """Write a number: three digits of a small one, no fraction of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: 1 env, 4,096 envs."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
