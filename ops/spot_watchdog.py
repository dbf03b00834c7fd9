"""Deletes spot TPU VMs that Google took back, so that Ray's autoscaler orders others.

    python ops/spot_watchdog.py --project P --zone Z --cluster systole [--interval-s 20] [--once]

Ray's GCP provider neither deletes a TPU VM in state PREEMPTED nor forgets it, so the autoscaler
counts it as a worker for ever (ray-project/ray#29698; remove this file when that is fixed). Run it
on the head, in the container: its service account may delete TPU VMs. A node that is gone is a
missing worker; the replica that waits for it makes the autoscaler create the next one, which is the
re-request. With `--recreate` it is requested here at once, with the same body, for clusters whose
minimum is kept by nobody else.

Knows the TPU API (v2alpha1) and nothing of Ray. Standard library only. Deletes nothing but workers
of the named cluster in a state from which a TPU VM does not come back.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any, NoReturn

API = "https://tpu.googleapis.com/v2alpha1"
METADATA_TOKEN = (
    "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
)
LOST_STATES = frozenset({"PREEMPTED", "TERMINATED"})
"""States of a TPU VM that was taken back; STOPPED is what a person did, and can be started."""
CLUSTER_LABEL = "ray-cluster-name"
KIND_LABEL = "ray-node-type"
NAME_LABEL = "ray-node-name"
REQUEST_FIELDS = (
    "acceleratorType",
    "acceleratorConfig",
    "runtimeVersion",
    "networkConfig",
    "schedulingConfig",
    "serviceAccount",
    "metadata",
    "tags",
    "labels",
)
"""What of a node is an order for another one; the rest describes the one that is lost."""
TIMEOUT_S = 30.0
MAX_PAUSE_S = 300.0
OPERATION_POLL_S = 2.0
MAX_DELETION_S = 600.0


class ApiError(Exception):
    """The TPU API did not do what it was asked; worth another attempt."""


@dataclass(frozen=True, slots=True)
class TpuApi:
    """The TPU API of one zone.

    Attributes:
        parent: "projects/P/locations/Z".
        api: base address, no slash at the end.
        token_url: where the machine's access token comes from; "" sends none.
    """

    parent: str
    api: str = API
    token_url: str = METADATA_TOKEN

    def nodes(self) -> list[dict[str, Any]]:
        """Return every TPU VM of the zone."""
        found: list[dict[str, Any]] = []
        page = ""
        while True:
            suffix = f"?pageToken={page}" if page else ""
            answer = self._call("GET", f"{self.parent}/nodes{suffix}")
            found += answer.get("nodes", [])
            page = answer.get("nextPageToken", "")
            if not page:
                return found

    def delete(self, name: str, *, poll_s: float) -> None:
        """Delete a TPU VM and wait until it is gone; one that is gone already is fine."""
        self._finish(self._call("DELETE", name, may_miss=True), poll_s=poll_s)

    def create(self, body: dict[str, Any], node_id: str) -> None:
        """Order a TPU VM; what becomes of it is up to whoever waits for the node."""
        self._call("POST", f"{self.parent}/nodes?nodeId={node_id}", body=body)

    def _finish(self, operation: dict[str, Any], *, poll_s: float) -> None:
        give_up_at = time.monotonic() + MAX_DELETION_S
        while operation and not operation.get("done"):
            if time.monotonic() > give_up_at:
                raise ApiError(f"{operation.get('name')} is not done after {MAX_DELETION_S} s")
            time.sleep(poll_s)
            operation = self._call("GET", operation["name"])
        if error := operation.get("error"):
            raise ApiError(f"{operation.get('name')}: {error.get('message', error)}")

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        may_miss: bool = False,
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.token_url:
            headers["Authorization"] = f"Bearer {self._token()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.api}/{path}", data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if may_miss and error.code == 404:
                return {}
            reason = error.read().decode(errors="replace")[:500]
            raise ApiError(f"{method} {path}: HTTP {error.code}: {reason}") from None
        except (OSError, ValueError) as error:
            raise ApiError(f"{method} {path}: {error}") from None

    def _token(self) -> str:
        request = urllib.request.Request(self.token_url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)["access_token"]


def lost_workers(nodes: list[dict[str, Any]], cluster: str) -> list[dict[str, Any]]:
    """Return the workers of a cluster that were taken back."""
    return [
        node
        for node in nodes
        if node.get("state") in LOST_STATES
        and node.get("labels", {}).get(CLUSTER_LABEL) == cluster
        and node.get("labels", {}).get(KIND_LABEL) == "worker"
    ]


def request_of(node: dict[str, Any]) -> dict[str, Any]:
    """Return the order that gives another node like this one."""
    body = {key: node[key] for key in REQUEST_FIELDS if key in node}
    if "acceleratorConfig" in body:  # the API reports both and takes one
        body.pop("acceleratorType", None)
    return body


def sweep(api: TpuApi, cluster: str, *, recreate: bool, poll_s: float = OPERATION_POLL_S) -> int:
    """Delete what was taken back, and order the same again if wanted; return how many.

    Raises:
        ApiError: the API failed; what was done stays done, and the next sweep does the rest.
    """
    lost = lost_workers(api.nodes(), cluster)
    for node in lost:
        print(f"{node['name']} is {node['state']}: deleting it", flush=True)
        api.delete(node["name"], poll_s=poll_s)
        if recreate:
            name = node["labels"].get(NAME_LABEL, f"ray-{cluster}-worker")
            node_id = f"{name}-{uuid.uuid4().hex[:8]}-tpu"  # Ray tells the kind by the end
            api.create(request_of(node), node_id)
            print(f"ordered {node_id} instead", flush=True)
    return len(lost)


def watch(api: TpuApi, cluster: str, *, recreate: bool, interval_s: float) -> NoReturn:
    """Sweep for ever; after a failure wait longer, up to five minutes."""
    pause_s = interval_s
    while True:
        try:
            sweep(api, cluster, recreate=recreate)
            pause_s = interval_s
        except ApiError as error:
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            print(f"{error}; again in {pause_s:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause_s)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--project", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--cluster", required=True, help="cluster_name of cluster.yaml")
    parser.add_argument("--interval-s", type=float, default=20.0)
    parser.add_argument("--recreate", action="store_true", help="order the same again at once")
    parser.add_argument("--once", action="store_true", help="one sweep; status 1 if it failed")
    parser.add_argument("--api", default=API, help="another address of the TPU API")
    parser.add_argument("--token-url", default=METADATA_TOKEN, help='"" sends no token')
    options = parser.parse_args(arguments)
    parent = f"projects/{options.project}/locations/{options.zone}"
    api = TpuApi(parent, options.api, options.token_url)
    if not options.once:
        watch(api, options.cluster, recreate=options.recreate, interval_s=options.interval_s)
    try:
        sweep(api, options.cluster, recreate=options.recreate)
    except ApiError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
