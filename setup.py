"""Builds the optional C core. Without a compiler the install goes on, and the Python twin is used."""

from __future__ import annotations

import glob
import os
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# The core is for Linux, and for macOS without futexes, which SHOAL_PORTABLE=1 builds on Linux too. From 3.12 on the
# stable ABI has all it needs, so that one wheel serves every later version; the free-threaded build has no stable ABI.
BUILT = sys.platform in ("linux", "darwin") and not os.environ.get("SHOAL_SKIP_NATIVE")
STABLE = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")

MACROS = [("SHOAL_STABLE_ABI", "1")] if STABLE else []
if os.environ.get("SHOAL_PORTABLE"):
    MACROS.append(("SHOAL_PORTABLE", "1"))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("cp312", "abi3", platform) if STABLE and BUILT and python.startswith("cp") else (python, abi, platform)


core = Extension(
    "shoal.native._core",
    sources=["src/shoal/native/_core.c"],
    depends=[*sorted(glob.glob("src/shoal/native/*.h")), "src/shoal/compiled/shoal_env.h"],
    extra_compile_args=["-std=c11", "-O3", *os.environ.get("SHOAL_CFLAGS", "").split()],
    extra_link_args=["-lm", *os.environ.get("SHOAL_CFLAGS", "").split()],
    define_macros=MACROS,
    py_limited_api=STABLE,
    optional=True,
)

setup(ext_modules=[core] if BUILT else [], cmdclass={"bdist_wheel": Wheel})
