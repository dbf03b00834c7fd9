"""What is known of TPU generations: the one table that sizes and predictions are taken from.

Memory is what libtpu's compiler says is available to programs; peaks and bandwidths are those of
jax's own table for kernels (a test compares them); links and prices are Google's published figures;
bundles are counted by `bench.tpu_static kernels`. Knows neither models nor programs.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One jax device of a generation: a chip, or one of the two cores of a TPU7x chip.

    Attributes:
        name: generation, the first part of a topology's name.
        device_kind: as jax calls it.
        devices_per_chip: jax devices that one chip shows as.
        hbm_bytes: memory that programs can have; libtpu's compile-time limit ("available HBM").
        hbm_bytes_per_s: its bandwidth.
        bf16_flops: peak, per second.
        int8_ops: peak, per second; 0 where there are no such units.
        ici_bytes_per_s: all links, one direction: cloud.google.com/tpu/docs, "System architecture".
        clock_hz: bundles per second. v5e's and v5p's follow from the bf16 peak and the size of the
            MXUs; the others are not published and assumed.
        decode_bundles: of the decode kernel per MiB of KV, see docs/tpu.md.
        decode_int8_bundles: the same where pages are of 8-bit integers.
        prefill_bundles: of the prefill kernel per 32 queries x 512 keys x 32 query heads.
        dollars_per_chip_hour: on demand, us regions, cloud.google.com/tpu/pricing; None: not
            listed there.
    """

    name: str
    device_kind: str
    devices_per_chip: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops: float
    int8_ops: float
    ici_bytes_per_s: float
    clock_hz: float
    decode_bundles: float
    decode_int8_bundles: float
    prefill_bundles: float
    dollars_per_chip_hour: float | None


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            device_kind="TPU v5 lite",
            devices_per_chip=1,
            hbm_bytes=int(15.75 * _GIB),
            hbm_bytes_per_s=0.82e12,
            bf16_flops=197e12,
            int8_ops=394e12,
            ici_bytes_per_s=200e9,
            clock_hz=1.5e9,
            decode_bundles=342,
            decode_int8_bundles=1121,
            prefill_bundles=2157,
            dollars_per_chip_hour=1.20,
        ),
        Chip(
            name="v5p",
            device_kind="TPU v5",
            devices_per_chip=1,
            hbm_bytes=int(95.73 * _GIB),
            hbm_bytes_per_s=2.46e12,
            bf16_flops=459e12,
            int8_ops=918e12,
            ici_bytes_per_s=600e9,
            clock_hz=1.75e9,
            decode_bundles=342,
            decode_int8_bundles=1121,
            prefill_bundles=2157,
            dollars_per_chip_hour=4.20,
        ),
        Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            devices_per_chip=1,
            hbm_bytes=int(31.24 * _GIB),
            hbm_bytes_per_s=1.64e12,
            bf16_flops=920e12,
            int8_ops=1840e12,
            ici_bytes_per_s=400e9,
            clock_hz=1.75e9,
            decode_bundles=292,
            decode_int8_bundles=554,
            prefill_bundles=1238,
            dollars_per_chip_hour=2.70,
        ),
        Chip(
            name="tpu7x",
            device_kind="TPU7x",
            devices_per_chip=2,
            hbm_bytes=int(94.74 * _GIB),
            hbm_bytes_per_s=3.7e12,
            bf16_flops=1155e12,
            int8_ops=0,
            ici_bytes_per_s=600e9,
            clock_hz=1.9e9,
            decode_bundles=312,
            decode_int8_bundles=624,
            prefill_bundles=1336,
            dollars_per_chip_hour=None,
        ),
    )
}


def find_chip(device_kind: str) -> Chip:
    """Return the generation of a device.

    Raises:
        ValueError: it is none of the table.
    """
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    known = ", ".join(chip.device_kind for chip in CHIPS.values())
    raise ValueError(f"device {device_kind!r} is not known (known: {known}); set engine.num_pages")
