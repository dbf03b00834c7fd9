"""TPU slices to compile for on a machine that has none.

libtpu compiles for a topology that it is told by name. Knows nothing of what is compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from replicas.engine.tpu_chips import CHIPS, Chip
from replicas.models.sharding import TENSOR_AXIS

_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}


def prepare_libtpu() -> None:
    """Let libtpu load where there is no TPU; before the first topology of the process."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def get_devices(topology: str) -> list[Any]:
    """Return a slice's devices, in the order of their ids; none of them exists.

    Args:
        topology: generation and shape as libtpu names them: v5e:2x2, v6e:2x4, tpu7x:2x2x1.

    Raises:
        ValueError: there is no such topology, or no libtpu.
    """
    generation, _, shape = topology.partition(":")
    if generation not in CHIPS or not shape:
        raise ValueError(
            f"topology {topology!r} is not GENERATION:SHAPE, such as v6e:2x2; generations are "
            + ", ".join(CHIPS)
        )
    prepare_libtpu()
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # jax raises what its plugin does
        raise ValueError(f"topology {topology!r}: libtpu does not know it: {error}") from error
    return sorted(described.devices, key=lambda device: device.id)


def chip_of(topology: str) -> Chip:
    """Return the generation of a topology's name."""
    return CHIPS[topology.partition(":")[0]]


@contextlib.contextmanager
def lowering_for(devices: Sequence[Any]) -> Iterator[None]:
    """Make devices the target of kernels that are lowered inside; they need not exist."""
    abstract = AbstractDevice(
        platform="tpu",
        device_kind=devices[0].device_kind,
        num_cores=getattr(devices[0], "num_cores", 1) or 1,
    )
    mesh = AbstractMesh(
        (len(devices),), (TENSOR_AXIS,), axis_types=(AxisType.Auto,), abstract_device=abstract
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield
