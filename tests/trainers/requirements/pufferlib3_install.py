"""Install PufferLib 3.0.0 beside the torch that is there, without the games that it brings.

Its `setup.py` knows NO_OCEAN, which leaves the games out, and then misses a name. It builds for CUDA where it finds
nvcc.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

SOURCE = (
    "https://files.pythonhosted.org/packages/7c/e1/5292f9b69c6263707b40ba04a87e6b9bcc177281d31092f77afd90c412f1/"
    "pufferlib-3.0.0.tar.gz"
)
SHA256 = "7df3a3e3f5f894d78d2a1f5374097890aec01473183e748abefe4f3faa10eaa9"
INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]

if __name__ == "__main__":
    with urllib.request.urlopen(SOURCE, timeout=300) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise SystemExit(f"{SOURCE} is not what it was")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")
        setup = Path(folder, "pufferlib-3.0.0", "setup.py")
        text = setup.read_text().replace('shutil.which("nvcc")', "None")
        setup.write_text("c_extension_paths = []\n" + text)
        subprocess.run([*INSTALL, str(setup.parent)], check=True, env=os.environ | {"NO_OCEAN": "1"})
