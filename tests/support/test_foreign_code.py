"""Code of objects that are not Shoal's: what it raises, and what others raise beside it."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from shoal.support.foreign_code import NotAnException, guarded


def test_an_exit_becomes_an_exception() -> None:
    with pytest.raises(NotAnException, match="SystemExit: 7"):
        guarded(sys.exit, 7)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupt_beside_the_call_stays_one(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come while handlers are put in place, or back."""
    real, calls = signal.signal, []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    real(signal.SIGTERM, lambda *_: sys.exit(3))

    def interrupted(number: int, handler: Any) -> Any:
        calls.append(real(number, handler))
        if len(calls) == at:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(signal, "signal", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            guarded(str, 1)
    finally:
        for number, handler in before.items():
            real(number, handler)
