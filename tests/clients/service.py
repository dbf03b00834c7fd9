"""The service under test: serve_config.yaml with a key and changes, started by the launcher."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.launch_config import find_free
from bench.server_process import ServerCommand
from tests.clients.tools import ROOT

KEY = "test-key"  # as tests/serve/test_api.py has it
TOOLS_TEMPLATE = Path(__file__).parent / "tools_template.jinja"
START_LIMIT_S = 600.0


def with_tools(model: Path, directory: Path) -> Path:
    """Return a model directory of the same name, whose chat template takes tools as Hermes' does.

    The default model has never seen a tool; where a grammar forces a call, it makes one.
    """
    changed = directory / model.name
    changed.mkdir()
    for path in model.iterdir():
        (changed / path.name).symlink_to(path)
    template = changed / "chat_template.jinja"
    template.unlink(missing_ok=True)
    shutil.copy(TOOLS_TEMPLATE, template)
    return changed


def read_model() -> Path:
    """Return the directory of the model that serve_config.yaml names."""
    return ROOT / _read_config()["applications"][0]["args"]["model"]


def command(directory: Path, changes: Mapping[str, Any]) -> ServerCommand:
    """Write the config of a service on a port of its own, and say how to launch it.

    Args:
        directory: takes the config and the key's file.
        changes: replaces the application's arguments of these names.
    """
    config, url = _read_config(), f"http://127.0.0.1:{find_free()}"
    keys_file = directory / "api_keys"
    keys_file.write_text(f"{KEY}\n", encoding="utf-8")
    arguments = config["applications"][0]["args"]
    arguments.update(changes)
    arguments["ingress"] = {**arguments["ingress"], "api_keys_file": str(keys_file)}
    path = directory / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    words = [sys.executable, "-m", "app.launch", "--config", str(path)]
    words += ["--port", url.rpartition(":")[2], "--watch-pid", str(os.getpid())]
    return ServerCommand(
        name="the service",
        command=shlex.join(words),
        url=url,
        ready_url=f"{url}/ready",
        start_limit_s=START_LIMIT_S,
    )


def _read_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
