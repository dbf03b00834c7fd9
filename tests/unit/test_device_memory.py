"""What devices say of their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicas.engine.device_memory import DeviceMemory, read_device_memory


@dataclass
class FakeDevice:
    id: int
    stats: Mapping[str, int] | None

    def memory_stats(self) -> Mapping[str, int] | None:
        return self.stats


def test_devices_that_count_are_listed_and_others_are_not() -> None:
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 9}
    devices = [FakeDevice(3, stats), FakeDevice(4, None), FakeDevice(5, {"bytes_in_use": 2})]
    assert read_device_memory(devices) == (
        DeviceMemory("3", used_bytes=5, peak_bytes=7, limit_bytes=9),
        DeviceMemory("5", used_bytes=2, peak_bytes=2, limit_bytes=0),
    )
