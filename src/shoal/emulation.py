"""The public name of `shoal.spaces.emulation`: nested observations and actions as one flat row for each env."""

from shoal.spaces.emulation import ActionEmulation, ActionPart, Emulation

__all__ = ["ActionEmulation", "ActionPart", "Emulation"]
