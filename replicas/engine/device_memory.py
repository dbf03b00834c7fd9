"""How much memory the devices of a replica use, as they say themselves.

Knows a device by its `memory_stats()`. On CPU there are none: the process' memory is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Device(Protocol):
    """What is needed of a jax device."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    def memory_stats(self) -> Mapping[str, int] | None:
        """Bytes by name; None where the platform does not count."""
        ...


class DeviceMemory(NamedTuple):
    """Memory of one device now.

    Attributes:
        device: its number, as text.
        used_bytes: allocated.
        peak_bytes: most that ever was.
        limit_bytes: what there is.
    """

    device: str
    used_bytes: int
    peak_bytes: int
    limit_bytes: int


def read_device_memory(devices: Sequence[Device]) -> tuple[DeviceMemory, ...]:
    """Ask every device that counts; takes microseconds, from any thread."""
    found: list[DeviceMemory] = []
    for device in devices:
        if stats := device.memory_stats():
            used = stats.get("bytes_in_use", 0)
            found.append(
                DeviceMemory(
                    device=str(device.id),
                    used_bytes=used,
                    peak_bytes=stats.get("peak_bytes_in_use", used),
                    limit_bytes=stats.get("bytes_limit", 0),
                )
            )
    return tuple(found)
