"""The service under attack: a small random model on a Ray cluster of its own, by the launcher.

Everything is a descendant of the launcher, which takes in orphans; only descendants are signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from app.launch_config import find_free
from app.process_tree import find_members
from app.readiness import dashboard_headers
from bench import processes
from bench.own_time import now
from bench.top import Scrape, parse
from tests.checkpoints import TINY_LLAMA, write_checkpoint
from tests.node_metrics import read_node_metrics
from tests.tiny_tokenizer import write_model_dir

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
}
NUM_ENGINES = 2
NUM_INGRESSES = 2
START_LIMIT_S = 240.0
STOP_LIMIT_S = 40.0
LONGEST_ANSWER_S = 900
ENGINE, ROUTER, INGRESS = "replica:Engine", "replica:Router", "replica:Ingress"
CONTROLLER, PROXY, GCS = "actor:ServeController", "haproxy", "gcs_server"
PROXY_MANAGER = "actor:HAProxyManager"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Service:
    """One launched service; `start` may be called again after it has ended."""

    def __init__(self, directory: Path) -> None:
        """Write the model, the config and the clock's offset below `directory`."""
        self.directory = directory
        self.store = directory / "programs"
        self.log = directory / "launch.log"
        self.port = find_free()
        self._clock = directory / "clock"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._clock.write_bytes(struct.pack("d", 0.0))
        model = write_model_dir(directory / "model")
        write_checkpoint(model, TINY_LLAMA | MODEL)
        config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        # As docs/operations.md says: the longest answer is within both.
        for part in (config["controller_options"], config["applications"][0]):
            flags = part["runtime_env"]["env_vars"]
            flags["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] = str(LONGEST_ANSWER_S + 60)
        config["applications"][0]["args"] = {
            "model": str(model),
            "engine": {
                "platform": "cpu",
                "dtype": "float32",
                "num_pages": 4096,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 32,
                "max_mixed_tokens": 32,
                "program_store": str(self.store),
            },
            "replicas": {"num_replicas": NUM_ENGINES, "drain_timeout_s": LONGEST_ANSWER_S},
            "ingress": {"num_replicas": NUM_INGRESSES},
        }
        self.config_path = directory / "serve_config.yaml"
        self.config_path.write_text(yaml.safe_dump(config))

    @property
    def url(self) -> str:
        """Root of the HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The launcher's process."""
        assert self._process is not None
        return self._process

    def start(self) -> float:
        """Launch, and wait until all replicas answer; return the seconds that took."""
        began = now()
        # The processes of the service start with these.
        own = {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "fake_clock"), str(ROOT)]),
            "SYSTOLE_CHAOS_CLOCK": str(self._clock),
        }
        command = [sys.executable, "-m", "app.launch", "--config", str(self.config_path)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=ROOT,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while not self.is_whole():
            if self._process.poll() is not None or now() - began > START_LIMIT_S:
                raise RuntimeError(f"the service does not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        return now() - began

    def stop(self) -> None:
        """Stop the launcher; it ends what it started."""
        if self._process is None:
            return
        for pid in self._members():  # a stopped process cannot end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                for pid in self._members():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._process.kill()
                self._process.wait()

    def pids(self, group: str) -> list[int]:
        """Processes of one kind, as `bench.processes.group_of` names them."""
        return [p.pid for p in processes.by_pid(self._members()) if p.group == group]

    def kill(self, group: str, *, count: int = 1) -> None:
        """SIGKILL the first `count` processes of a kind."""
        for pid in self.pids(group)[:count]:
            os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def stopped(self, group: str) -> Iterator[None]:
        """SIGSTOP one process of a kind (all of a proxy's), SIGCONT at the end."""
        pids = self.pids(group)
        assert pids, group
        pids = pids if group == PROXY else pids[:1]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def set_clock(self, offset_s: float) -> None:
        """Move the wall clock of all Python processes of the service, from now on."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", offset_s))

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the application's part of the config, and send it to Serve as an operator does."""
        config = yaml.safe_load((ROOT / "run" / str(self.port) / "serve_config.yaml").read_text())
        change(config["applications"][0])
        config.pop("controller_options", None)  # are for Serve's start
        request = urllib.request.Request(
            f"{self.dashboard_url}/api/serve/applications/",
            data=json.dumps(config).encode(),
            headers={"Content-Type": "application/json", **dashboard_headers()},
            method="PUT",
        )
        with _OPENER.open(request, timeout=30) as response:
            response.read()

    def application(self) -> dict[str, Any]:
        """What Serve says of the application: status, message, deployments."""
        request = urllib.request.Request(
            f"{self.dashboard_url}/api/serve/applications/", headers=dashboard_headers()
        )
        with _OPENER.open(request, timeout=30) as response:
            return json.load(response)["applications"]["systole"]

    @property
    def dashboard_url(self) -> str:
        """Of the latest start."""
        return re.findall(r"Dashboard +(http://\S+)", self.log.read_text())[-1]

    def replicas(self) -> set[int]:
        """Processes of all deployments."""
        return {pid for group in (ENGINE, ROUTER, INGRESS) for pid in self.pids(group)}

    def is_whole(self) -> bool:
        """Whether all replicas live, all engines take requests, and the proxy answers."""
        body = self.get_json("/ready")
        return bool(
            body
            and body.get("num_replicas") == NUM_ENGINES
            and len(self.pids(ENGINE)) == NUM_ENGINES
            and len(self.pids(INGRESS)) == NUM_INGRESSES
            and self.pids(ROUTER)
            and self.pids(CONTROLLER)
        )

    def scrape(self) -> Scrape | None:
        """/metrics of any one ingress; None where nothing answers."""
        text = self.get_text("/metrics")
        return parse(text, at_s=time.monotonic()) if text else None

    def scrape_node(self) -> Scrape | None:
        """What Ray's agent exports for the whole node."""
        text = read_node_metrics(self._members())
        return parse(text, at_s=time.monotonic()) if text else None

    def get_json(self, path: str) -> dict[str, Any] | None:
        """Body of a GET, whatever its status; None where there is none."""
        text = self.get_text(path)
        with contextlib.suppress(ValueError):
            body = json.loads(text)
            return body if isinstance(body, dict) else None
        return None

    def get_text(self, path: str) -> str:
        """Body of a GET, whatever its status; "" where there is none."""
        return self._fetch(self.url + path)

    def post(self, body: dict[str, Any]) -> int:
        """Status of a completion; 0 where there is none."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _OPENER.open(request, timeout=30) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @staticmethod
    def _fetch(url: str) -> str:
        try:
            with _OPENER.open(url, timeout=3) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError):
                return error.read().decode()
        except OSError:
            pass
        return ""

    def _members(self) -> set[int]:
        return set() if self._process is None else find_members(self._process.pid, -1)
