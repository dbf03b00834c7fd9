"""Builds the native CPU kernels ahead of the first start: `python -m ops.build_kernels`.

Exit status 0 when they are built, 3 when this machine cannot build them; that is said in a line
and is no error, because the slower path in plain jax serves as well.
"""

from __future__ import annotations

import sys

from kernels.cpu import library

UNAVAILABLE_STATUS = 3


def main() -> int:
    """Build; returns the exit status."""
    print("Building the native CPU kernels (some 10 s, once)", flush=True)
    try:
        library.build()
    except library.NativeUnavailable as error:
        print(f"Native CPU kernels: {error}. Serving works without them, but slower; install g++.")
        return UNAVAILABLE_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
