"""PuffeRL of pufferlib-core over its own best vectorizer and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

from ladder import climb
from puffer_cells import cells

if __name__ == "__main__":
    climb("PufferLib core", ["pufferlib-core", "gymnasium", "torch"], cells())
