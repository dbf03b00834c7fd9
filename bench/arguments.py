"""Command-line values that the benches share."""

from __future__ import annotations

import argparse


def integers(text: str) -> list[int]:
    """Parse positive integers, "1,4,16".

    Raises:
        argparse.ArgumentTypeError: one is below 1.
        ValueError: one is no integer.
    """
    numbers = [int(part) for part in text.split(",")]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"need positive integers, got {text!r}")
    return numbers


def integer_range(text: str) -> tuple[int, int]:
    """Parse "LOW:HIGH".

    Raises:
        ValueError: one of them is no integer.
    """
    low, _, high = text.partition(":")
    return int(low), int(high)
