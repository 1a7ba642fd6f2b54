"""ExecuTorch for the tests: where this environment has none, that of `make executorch-venv`, behind this environment's own packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / ".executorch-venv"
SITE = ROOT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

if importlib.util.find_spec("executorch") is None and SITE.is_dir():
    sys.path.append(str(SITE))

INSTALLED = importlib.util.find_spec("executorch") is not None
NEEDED = pytest.mark.skipif(
    not INSTALLED, reason=f"ExecuTorch is not here: {ROOT} does not exist; `make executorch-venv` builds it"
)
