"""The GKE manifests: KubeRay's documented fields, Ray's Serve schema and autoscaler, our settings.

`FIELDS` is written after KubeRay's reference of its custom resources (v1.6): the CRDs themselves
are not on a development machine. Pod templates are checked for what matters here only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.serve.schema import ServeDeploySchema

from app.settings import parse_settings
from tests.node_files import provide_files

OPS = Path(__file__).resolve().parents[2] / "ops"
MANIFESTS = sorted((OPS / "kuberay").glob("rayservice-*.yaml"))
Config = dict[str, Any]


def closed(required: tuple[str, ...], **properties: Any) -> Config:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


STRING, COUNT, FLAG, ANY = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {},
)
STRINGS = {"type": "object", "additionalProperties": STRING}
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "properties": {
        "resources": closed(("limits", "requests"), limits=STRINGS, requests=STRINGS),
        "env": {"type": "array", "items": closed(("name",), name=STRING, value=STRING)},
    },
}
TEMPLATE = closed(
    ("spec",),
    metadata=closed((), labels=STRINGS, annotations=STRINGS),
    spec={
        "type": "object",
        "required": ["containers"],
        "properties": {
            "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
            "nodeSelector": STRINGS,
        },
    },
)
GROUP = {"resources": STRINGS, "labels": STRINGS, "rayStartParams": STRINGS, "template": TEMPLATE}
FIELDS = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=closed(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=STRING,
        serveService=ANY,
        excludeHeadPodFromServeSvc=FLAG,
        rayClusterDeletionDelaySeconds=COUNT,
        upgradeStrategy=closed(
            (),
            type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]},
            clusterUpgradeOptions=ANY,
        ),
        rayClusterConfig=closed(
            ("headGroupSpec",),
            rayVersion=STRING,
            suspend=FLAG,
            managedBy=STRING,
            enableInTreeAutoscaling=FLAG,
            gcsFaultToleranceOptions=ANY,
            headServiceAnnotations=STRINGS,
            authOptions=closed((), mode={"enum": ["disabled", "token"]}, secretName=STRING),
            autoscalerOptions=closed(
                (),
                resources=ANY,
                image=STRING,
                imagePullPolicy=STRING,
                securityContext=ANY,
                idleTimeoutSeconds=COUNT,
                upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
                version={"enum": ["v1", "v2"]},
                env=ANY,
                envFrom=ANY,
                volumeMounts=ANY,
            ),
            headGroupSpec=closed(
                ("template",),
                headService=ANY,
                enableIngress=FLAG,
                serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                **GROUP,
            ),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    ("groupName", "template", "minReplicas", "maxReplicas"),
                    groupName=STRING,
                    suspend=FLAG,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    idleTimeoutSeconds=COUNT,
                    numOfHosts={"type": "integer", "minimum": 1},
                    scaleStrategy=ANY,
                    **GROUP,
                ),
            },
        ),
    ),
)


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def manifest(request: pytest.FixtureRequest) -> Config:
    return yaml.safe_load(request.param.read_text())


def serve_config(manifest: Config) -> Config:
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])


def worker_group(manifest: Config) -> Config:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return group


def node_types(manifest: Config) -> Config:
    """What KubeRay's autoscaler works with, by Ray's own code."""
    spec = manifest["spec"]["rayClusterConfig"]
    resource = {"metadata": {"name": "systole", "namespace": "default"}, "spec": spec}
    return _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]


def test_every_field_is_one_of_kuberay_s(manifest: Config) -> None:
    jsonschema.validate(manifest, FIELDS)


def test_a_misspelt_field_would_be_noticed(manifest: Config) -> None:
    group = worker_group(manifest)
    group["numHosts"] = group.pop("numOfHosts")
    with pytest.raises(jsonschema.ValidationError, match="numHosts"):
        jsonschema.validate(manifest, FIELDS)


def test_ray_and_the_application_accept_the_serve_part(manifest: Config, tmp_path: Path) -> None:
    config = serve_config(manifest)
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "app.build:build"
    args = config["applications"][0]["args"]
    provide_files(args, tmp_path, model_name="model")
    settings = parse_settings(args)
    assert settings.ingress.key_hashes
    assert settings.replicas.resources["TPU"] == settings.engine.tensor_parallel
    assert settings.replicas.drain_timeout_s > args["ingress"]["request_timeout_s"]


def test_one_serve_configuration_for_vm_and_gke(manifest: Config) -> None:
    """The manifests hold what ops/serve_config.v6e.yaml holds, but for places and numbers."""
    ours, vm = serve_config(manifest), yaml.safe_load((OPS / "serve_config.v6e.yaml").read_text())
    assert ours.keys() == vm.keys()
    for key in ("http_options", "proxy_location", "controller_options", "logging_config"):
        assert ours[key] == vm[key]
    mine, theirs = ours["applications"][0]["args"], vm["applications"][0]["args"]
    assert mine["engine"] == theirs["engine"]
    assert mine["router"] == theirs["router"]
    assert mine["replicas"].keys() == theirs["replicas"].keys()


def test_the_autoscaler_offers_what_a_replica_asks_for(manifest: Config) -> None:
    group = worker_group(manifest)
    offered = node_types(manifest)[group["groupName"]]
    replicas = serve_config(manifest)["applications"][0]["args"]["replicas"]
    assert all(offered["resources"].get(k, 0) >= v for k, v in replicas["resources"].items())
    # As many hosts as replicas, none of them kept without one.
    assert offered["max_workers"] == replicas["autoscaling"]["max_replicas"]
    assert offered["min_workers"] == 0
    assert offered["labels"] == {"ray.io/accelerator-type": "TPU-V6E"}


def test_hosts_and_chips_make_up_the_slice(manifest: Config) -> None:
    group = worker_group(manifest)
    pod = group["template"]["spec"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    (container,) = pod["containers"]
    chips = {container["resources"][kind]["google.com/tpu"] for kind in ("limits", "requests")}
    assert chips == {"4"}
    assert group["numOfHosts"] * 4 == rows * columns


def test_hosts_of_a_larger_slice_are_kept_apart() -> None:
    multi = yaml.safe_load((OPS / "kuberay" / "rayservice-v6e-multi-host.yaml").read_text())
    environment = serve_config(multi)["applications"][0]["runtime_env"]["env_vars"]
    assert environment["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert environment["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert (environment["TPU_WORKER_ID"], environment["TPU_WORKER_HOSTNAMES"]) == ("0", "localhost")


def test_a_pod_outlives_its_drain_and_strangers_stay_out(manifest: Config) -> None:
    cluster = manifest["spec"]["rayClusterConfig"]
    drain_s = serve_config(manifest)["applications"][0]["args"]["replicas"]["drain_timeout_s"]
    assert worker_group(manifest)["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s
    assert cluster["authOptions"] == {"mode": "token"}
    policy = yaml.safe_load((OPS / "kuberay" / "network-policy.yaml").read_text())
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in (cluster["headGroupSpec"], worker_group(manifest)):
        assert selected <= group["template"]["metadata"]["labels"].items()
    open_to_all = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [{"ports": [{"protocol": "TCP", "port": 8000}]}]
