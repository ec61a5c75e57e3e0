"""Compiled envs in single precision on the CPU: floats of 32 bits in columns, and loops over lanes as vector code.

The package may import what `shoal.compiled` may. Read `source` first (what a kernel does), then `math32` and
`arithmetic` (what becomes of the user's calculations), and `build` (how it is compiled). What imports Numba is
imported when a class is compiled.
"""
