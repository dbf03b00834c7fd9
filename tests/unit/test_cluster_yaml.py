"""cluster.yaml through Ray's own validation, GCP provider and autoscaler, without Google Cloud.

The provider modules import Google's client libraries, which a development machine does not have:
the `gcp` fixture puts small stand-ins in `sys.modules` and takes them, and what was imported over
them, out again. No Ray process is started.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.autoscaler import tags

from tests.watchdog import load_watchdog

ROOT = Path(__file__).resolve().parents[2]
spot_watchdog = load_watchdog()
# Module name -> what Ray's provider takes from it at import or calls in these tests.
GOOGLE_MODULES: dict[str, dict[str, Any]] = {
    "google_auth_httplib2": {"AuthorizedHttp": lambda credentials, http: http},
    "httplib2": {"Http": SimpleNamespace},
    "googleapiclient": {},
    "googleapiclient.discovery": {"Resource": object},
    "googleapiclient.errors": {"HttpError": type("HttpError", (Exception,), {})},
    "google.oauth2.service_account": {},
    "google.oauth2.credentials": {"Credentials": object},
}
TPU_TYPES = ("tpu_v5e_4", "tpu_v5e_8", "tpu_v6e_1", "tpu_v6e_4", "tpu_v6e_8", "tpu_v7x_4")

Config = dict[str, Any]


class RecordingApi:
    """Stands for a discovery client: any chain of calls, the last `create`/`insert` kept."""

    def __init__(self) -> None:
        self.bodies: list[Config] = []
        self._http = SimpleNamespace(credentials=None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            if "body" in kwargs:
                self.bodies.append(kwargs["body"])
            return {"name": "operation"} if name == "execute" else self

        return call


@pytest.fixture
def gcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Ray's GCP provider modules, imported over stand-ins for Google's client libraries."""
    for name, attributes in GOOGLE_MODULES.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)
    prefix = "ray.autoscaler._private.gcp"
    before = {name for name in sys.modules if name.startswith(prefix)}
    yield SimpleNamespace(
        config=importlib.import_module(f"{prefix}.config"),
        node=importlib.import_module(f"{prefix}.node"),
        provider=importlib.import_module(f"{prefix}.node_provider"),
    )
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        if name not in before:
            del sys.modules[name]


@pytest.fixture
def raw() -> Config:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def prepared(raw: Config) -> Config:
    """What `ray up` works with: defaults merged, then the schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(raw))
    validate_config(config)
    return config


def schedule(config: Config, demands: list[tuple[Config, Config]]) -> tuple[Config, int]:
    """Node types that Ray's autoscaler would launch for `demands`, and how many it cannot meet.

    Args:
        config: prepared and filled out.
        demands: (resources, required labels) of each pending actor; the cluster is empty.
    """
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.core.generated.autoscaler_pb2 import ResourceRequest, ResourceRequestByCount
    from ray.core.generated.common_pb2 import LabelSelectorConstraint, LabelSelectorOperator

    autoscaling = AutoscalingConfig(config, skip_content_hash=True)
    types = autoscaling.get_node_type_configs()
    del types[autoscaling.get_head_node_type()]
    requests = []
    for resources, labels in demands:
        request = ResourceRequest(resources_bundle=resources)
        if labels:
            selector = request.label_selectors.add()
            for key, value in labels.items():
                selector.label_constraints.append(
                    LabelSelectorConstraint(
                        label_key=key,
                        label_values=[value],
                        operator=LabelSelectorOperator.LABEL_OPERATOR_IN,
                    )
                )
        requests.append(ResourceRequestByCount(request=request, count=1))
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            node_type_configs=types,
            max_num_nodes=autoscaling.get_max_num_nodes(),
            disable_launch_config_check=True,
            resource_requests=requests,
        )
    )
    launched = {launch.instance_type: launch.count for launch in reply.to_launch}
    return launched, len(reply.infeasible_resource_requests)


def test_ray_accepts_the_file(raw: Config) -> None:
    config = prepared(raw)
    assert config["head_node_type"] == "head"
    assert config["available_node_types"]["head"]["max_workers"] == 0
    assert set(config["available_node_types"]) == {"head", *TPU_TYPES}


def test_ray_refuses_a_node_type_without_resources(raw: Config) -> None:
    del raw["available_node_types"]["tpu_v6e_4"]["resources"]
    with pytest.raises(Exception, match="'resources' is a required property"):
        prepared(raw)


def test_ray_refuses_an_unknown_key(raw: Config) -> None:
    raw["idle_timeout_minute"] = 5
    with pytest.raises(Exception, match="idle_timeout_minute"):
        prepared(raw)


def test_the_head_is_a_cpu_machine_and_every_worker_one_tpu_host(
    gcp: SimpleNamespace, raw: Config, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = gcp.node.GCPNodeType
    for name, node_type in prepared(raw)["available_node_types"].items():
        node_config = node_type["node_config"]
        expected = kinds.COMPUTE if name == "head" else kinds.TPU
        assert gcp.config.get_node_type(node_config) == expected, name
    assert "TPU pod detected" not in caplog.text


def test_a_multi_host_slice_would_be_noticed(
    gcp: SimpleNamespace, raw: Config, caplog: pytest.LogCaptureFixture
) -> None:
    node_config = raw["available_node_types"]["tpu_v6e_8"]["node_config"]
    gcp.config.get_node_type({**node_config, "acceleratorType": "v6e-16"})
    assert "TPU pod detected" in caplog.text


def test_tpu7x_cannot_be_written_as_an_accelerator_type(gcp: SimpleNamespace, raw: Config) -> None:
    node_config = dict(raw["available_node_types"]["tpu_v7x_4"]["node_config"])
    del node_config["acceleratorConfig"]
    with pytest.raises(ValueError, match="tpu7x-8"):
        gcp.config.get_node_type({**node_config, "acceleratorType": "tpu7x-8"})


@pytest.mark.parametrize("name", TPU_TYPES)
def test_declared_resources_and_labels_are_those_a_node_reports(
    gcp: SimpleNamespace, raw: Config, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type that promised more than its nodes hold would be launched for ever in vain."""
    from ray._private.accelerators import tpu

    filled = gcp.provider.GCPNodeProvider.fillout_available_node_types_resources(prepared(raw))
    node_type = filled["available_node_types"][name]
    node_config = node_type["node_config"]
    pod_type = node_config.get("acceleratorType") or gcp.config.tpu_accelerator_config_to_type(
        node_config["acceleratorConfig"]
    )
    resources, labels = node_type["resources"], node_type["labels"]

    manager = tpu.TPUAcceleratorManager
    monkeypatch.setenv(tpu.GKE_TPU_ACCELERATOR_TYPE_ENV_VAR, pod_type)
    monkeypatch.setenv(tpu.GKE_TPU_TOPOLOGY_ENV_VAR, labels["ray.io/tpu-topology"])
    monkeypatch.setenv(tpu.GKE_TPU_NAME_ENV_VAR, "a-node")
    monkeypatch.setenv(tpu.GKE_TPU_WORKER_ID_ENV_VAR, "0")
    reported = {
        "ray.io/accelerator-type": manager.get_current_node_accelerator_type(),
        **manager.get_current_node_accelerator_labels(),
    }
    assert labels.items() <= reported.items()
    assert resources[f"accelerator_type:{reported['ray.io/accelerator-type']}"] == 1
    assert resources[f"TPU-{pod_type}-head"] == 1
    assert f"TPU-{pod_type}-head" in manager.get_current_node_additional_resources()
    assert resources["TPU"] == tpu.get_num_chips_from_topology(labels["ray.io/tpu-topology"])
    assert manager.validate_resource_request_quantity(resources["TPU"])[0]
    assert manager.is_valid_tpu_accelerator_topology(
        pod_type.split("-")[0], labels["ray.io/tpu-topology"]
    )


@pytest.mark.parametrize("name", [name for name in TPU_TYPES if name != "tpu_v7x_4"])
def test_a_replica_that_names_the_type_scales_it_from_zero(
    gcp: SimpleNamespace, raw: Config, name: str
) -> None:
    filled = gcp.provider.GCPNodeProvider.fillout_available_node_types_resources(prepared(raw))
    node_type = filled["available_node_types"][name]
    demand = ({"CPU": 1, "TPU": node_type["resources"]["TPU"]}, node_type["labels"])
    assert schedule(filled, [demand, demand]) == ({name: 2}, 0)


def test_the_v6e_example_scales_v6e_hosts_from_zero(gcp: SimpleNamespace, raw: Config) -> None:
    example = yaml.safe_load((ROOT / "ops" / "serve_config.v6e.yaml").read_text())
    resources = example["applications"][0]["args"]["replicas"]["resources"]
    filled = gcp.provider.GCPNodeProvider.fillout_available_node_types_resources(prepared(raw))
    assert schedule(filled, [(resources, {})] * 3) == ({"tpu_v6e_4": 3}, 0)


def test_undeclared_labels_make_the_replica_infeasible(gcp: SimpleNamespace, raw: Config) -> None:
    labels = raw["available_node_types"]["tpu_v6e_4"].pop("labels")
    filled = gcp.provider.GCPNodeProvider.fillout_available_node_types_resources(prepared(raw))
    assert schedule(filled, [({"TPU": 4}, labels)]) == ({}, 1)


def test_no_more_nodes_than_max_workers(gcp: SimpleNamespace, raw: Config) -> None:
    filled = gcp.provider.GCPNodeProvider.fillout_available_node_types_resources(prepared(raw))
    labels = filled["available_node_types"]["tpu_v6e_4"]["labels"]
    launched, _ = schedule(filled, [({"TPU": 4}, labels)] * 9)
    assert launched == {"tpu_v6e_4": raw["max_workers"]}


def test_tpu7x_stays_off_until_enabled(gcp: SimpleNamespace, raw: Config) -> None:
    demand = ({"TPU": 4}, raw["available_node_types"]["tpu_v7x_4"]["labels"])
    provider = gcp.provider.GCPNodeProvider
    filled = provider.fillout_available_node_types_resources(prepared(raw))
    assert schedule(filled, [demand]) == ({}, 1)
    raw["available_node_types"]["tpu_v7x_4"]["max_workers"] = 1
    filled = provider.fillout_available_node_types_resources(prepared(raw))
    assert schedule(filled, [demand]) == ({"tpu_v7x_4": 1}, 0)


@pytest.mark.parametrize("name", TPU_TYPES)
def test_the_request_for_a_tpu_vm_asks_for_no_external_address(
    gcp: SimpleNamespace, raw: Config, name: str
) -> None:
    api = RecordingApi()
    resource = gcp.node.GCPTPU(api, "project", "zone", raw["cluster_name"])
    node_config = prepared(raw)["available_node_types"][name]["node_config"]
    labels = {"ray-node-name": "a", "ray-node-type": "worker"}
    resource.create_instance(node_config, labels, wait_for_operation=False)
    (body,) = api.bodies
    assert body["networkConfig"]["enableExternalIps"] is False
    assert body["runtimeVersion"]
    assert ("acceleratorType" in body) != ("acceleratorConfig" in body)


def test_a_spot_vm_that_ray_ordered_is_one_that_the_watchdog_replaces(
    gcp: SimpleNamespace, raw: Config
) -> None:
    api = RecordingApi()
    resource = gcp.node.GCPTPU(api, "project", "zone", raw["cluster_name"])
    node_config = prepared(raw)["available_node_types"]["tpu_v6e_4"]["node_config"]
    spot = node_config | {"schedulingConfig": {"spot": True}}
    kind = {tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER, tags.TAG_RAY_NODE_NAME: "ray-worker"}
    resource.create_instance(spot, kind, wait_for_operation=False)
    (body,) = api.bodies
    assert body["schedulingConfig"] == {"spot": True}
    node = body | {"name": "projects/p/locations/z/nodes/a", "state": "PREEMPTED"}
    assert spot_watchdog.lost_workers([node], raw["cluster_name"]) == [node]
    assert spot_watchdog.request_of(node) == body
    created: list[str] = []
    zone: Any = SimpleNamespace(
        nodes=lambda: [node],
        delete=lambda name, poll_s: None,
        create=lambda body, node_id: created.append(node_id),
    )
    assert spot_watchdog.sweep(zone, raw["cluster_name"], recreate=True) == 1
    (ordered,) = created
    assert gcp.node.GCPNodeType.name_to_type(ordered) == gcp.node.GCPNodeType.TPU


def test_ray_adds_no_external_address_to_the_head(gcp: SimpleNamespace, raw: Config) -> None:
    config = prepared(raw)
    # With every network given, Ray does not look for one (and would attach an external NAT).
    assert gcp.config._configure_subnet(config, None) == config
    (interface,) = config["available_node_types"]["head"]["node_config"]["networkInterfaces"]
    assert "accessConfigs" not in interface
    assert config["provider"]["use_internal_ips"] is True


def test_workers_start_at_zero_and_idle_ones_are_released(raw: Config) -> None:
    config = prepared(raw)
    assert all(node["min_workers"] == 0 for node in config["available_node_types"].values())
    assert config["idle_timeout_minutes"] > 0


def test_every_node_gets_the_token_and_demands_it(raw: Config) -> None:
    config = prepared(raw)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    for commands in ("head_setup_commands", "worker_setup_commands"):
        assert any("chmod 600 ~/.ray/auth_token" in line for line in config[commands])
    assert not any(
        "auth_token" in line or "RAY_AUTH_TOKEN" in line
        for commands in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in config[commands]
    )


def test_the_dashboard_is_on_loopback_and_ports_are_fixed(raw: Config) -> None:
    head = " ".join(raw["head_start_ray_commands"])
    worker = " ".join(raw["worker_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head
    for flag in (
        "--node-manager-port=",
        "--object-manager-port=",
        "--runtime-env-agent-port=",
        "--dashboard-agent-listen-port=",
        "--metrics-export-port=",
        "--min-worker-port=",
        "--max-worker-port=",
    ):
        assert flag in head
        assert flag in worker


def test_mounted_files_exist_and_image_installs_hashed_locks(raw: Config) -> None:
    for source in raw["file_mounts"].values():
        assert source.startswith("~") or (ROOT / source).is_file(), source
    dockerfile = (ROOT / "ops" / "Dockerfile").read_text()
    assert "--require-hashes -r requirements.lock -r requirements-cluster.lock" in dockerfile
    cluster = pinned(ROOT / "ops" / "requirements-cluster.lock")
    main = pinned(ROOT / "requirements.lock")
    assert {"libtpu", "google-api-python-client", "google-auth-httplib2"} <= set(cluster)
    assert {name: main[name] for name in set(cluster) & set(main)} == {
        name: cluster[name] for name in set(cluster) & set(main)
    }
    assert main["ray"] == importlib.import_module("ray").__version__


def pinned(lock: Path) -> dict[str, str]:
    """Package versions of a lock file."""
    pairs = [line.split()[0].split("==") for line in lock.read_text().splitlines() if "==" in line]
    return {name.split("[")[0]: version for name, version in pairs if not name.startswith("#")}
