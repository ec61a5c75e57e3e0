"""What differs from one operating system to the next: a class for each system, of which `system` is the one in use.

`base` says what Shoal asks of a system, `posix` does it by what every POSIX system has (macOS is one), `linux` by what
only Linux has, and `windows` has what pools in one process need. SHOAL_PORTABLE=1 chooses `posix` on Linux: so it is
tested here (`make test-portable`). No other part of Shoal asks which system it runs on. It may import `errors`;
psutil is imported inside of functions. Read `base` first.
"""

from __future__ import annotations

import os
import sys

from shoal.support.system.base import System

__all__ = ["System", "system"]

system: System
if sys.platform == "win32":
    from shoal.support.system.windows import Windows

    system = Windows()
elif sys.platform == "linux" and not os.environ.get("SHOAL_PORTABLE"):
    from shoal.support.system.linux import Linux

    system = Linux()
else:
    from shoal.support.system.posix import Posix

    system = Posix()
