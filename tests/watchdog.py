"""ops/spot_watchdog.py as a module: ops is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_watchdog() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "ops" / "spot_watchdog.py"
    spec = importlib.util.spec_from_file_location("spot_watchdog", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spot_watchdog"] = module
    spec.loader.exec_module(module)
    return module
