"""The process that holds a local Ray cluster and runs one Serve config on it.

    python -m app.local_cluster CONFIG DASHBOARD_PORT

Deploys as `serve run CONFIG` does, on a cluster whose ports the launcher chose. SIGINT and SIGTERM
drain and end it; so does the end of its parent. Draining is more than `serve run` does: that stops
the HTTP proxy first, which cuts every stream in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

import ray
from ray import serve
from ray.serve.scripts import cli as serve_cli

LOCALHOST = "127.0.0.1"
# Serve passes requests by gRPC and tokens by sockets: the object store holds next to nothing.
OBJECT_STORE_BYTES = 128 << 20
# What the launcher allows for a stop, less what shutting Serve and Ray down takes (2-4 s).
DRAIN_S = 7.0
_PARENT_POLL_S = 1.0
_DRAIN_POLL_S = 0.1


def run(config_path: str, dashboard_port: int) -> None:
    """Start Ray, deploy the config file and block until interrupted, then drain and stop.

    Raises:
        KeyboardInterrupt: interrupted before Serve was up; nothing was served yet.
    """
    ray.init(  # pyright: ignore[reportUnknownMemberType]
        address="local",
        namespace="serve",
        dashboard_host=LOCALHOST,
        dashboard_port=dashboard_port,
        include_dashboard=True,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOCALHOST,
    )
    # Set after ray.init, which installs a SIGTERM handler that exits without draining.
    signal.signal(signal.SIGTERM, _interrupt)
    serve_cli(["run", "--non-blocking", config_path], standalone_mode=False)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        drain()
        serve.shutdown()


def drain() -> None:
    """Stop accepting requests and wait until the running ones have ended, at most `DRAIN_S`."""
    for name in serve.status().applications:
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + DRAIN_S
    while serve.status().applications and time.monotonic() < deadline:
        time.sleep(_DRAIN_POLL_S)


def _interrupt(_signal_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _follow_parent(parent: int) -> None:
    """Interrupt this process when its parent has ended, however that happened."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    """Run the command line; returns the exit status."""
    config_path, dashboard_port = sys.argv[1], int(sys.argv[2])
    follower = threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True)
    follower.start()
    try:
        run(config_path, dashboard_port)
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
