"""TPU generations to compile for on a machine without one, and what is known of their chips.

libtpu compiles for a topology that it is told by name. Sizes and peaks are those that jax itself
keeps for its kernels; only the clock is ours. Knows nothing of what is compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

_CLOCKS_HZ = {"v5e": 1.5e9, "v6e": 1.75e9, "tpu7x": 1.9e9}
"""v5e: its bf16 peak over 4 MXUs of 128 x 128. The others are not published and assumed; they
matter only where a kernel's bundles come near the time of its DMA."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One jax device of a generation: a chip, or one of a TPU7x's two cores.

    Attributes:
        name: key of `TOPOLOGIES`.
        hbm_bytes: memory.
        hbm_bytes_per_s: its bandwidth.
        bf16_flops: peak, per second.
        vmem_bytes: scratch memory of a core.
        clock_hz: bundles per second.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops: float
    vmem_bytes: int
    clock_hz: float


def prepare(init_args: str = "") -> None:
    """Let libtpu load where there is no TPU; before the first topology of the process.

    Args:
        init_args: flags of libtpu, such as `llo.dump_flags`.
    """
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    if init_args:
        os.environ["LIBTPU_INIT_ARGS"] = init_args


def get_devices(name: str, num_devices: int = 1) -> list[Any]:
    """Devices of a generation to lay arrays out over; none of them exists."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])
    return list(topology.devices[:num_devices])


@contextlib.contextmanager
def target(name: str, *, axis: str = "tensor", num_devices: int = 1) -> Iterator[list[Any]]:
    """Make a generation the target of kernels that are lowered inside; yields its devices."""
    devices = get_devices(name, num_devices)
    abstract = AbstractDevice(
        platform="tpu",
        device_kind=devices[0].device_kind,
        num_cores=getattr(devices[0], "num_cores", 1) or 1,
    )
    mesh = AbstractMesh(
        (num_devices,), (axis,), axis_types=(AxisType.Auto,), abstract_device=abstract
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield devices


def chip(name: str) -> Chip:
    """What jax knows of a generation."""
    with target(name):
        info = pltpu.get_tpu_info()
    return Chip(
        name=name,
        hbm_bytes=info.hbm_capacity_bytes,
        hbm_bytes_per_s=info.mem_bw_bytes_per_second,
        bf16_flops=info.bf16_ops_per_second,
        vmem_bytes=info.vmem_capacity_bytes,
        clock_hz=_CLOCKS_HZ[name],
    )
