"""Which devices jax runs on in this process, and with which options of their compilers.

The environment and threads of XLA and libtpu; knows no model. Must run before anything asks jax for
a device.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping

import jax

from replicas.config import CompilerOption, EngineConfig

_COMPUTE_NICENESS = 15
"""What Ray gives to whole workers by default; enough for others to preempt at once."""
_MIN_NICENESS_STEP = 4


def start_backend(config: EngineConfig) -> str:
    """Start jax's client for the configured platform; return the platform's name.

    Raises:
        ValueError: jax has no such device here.
    """
    add_libtpu_options(config.libtpu_options)
    if config.platform == "cpu":
        # Keeps jax from probing for TPUs, which is slow and noisy where libtpu is installed.
        jax.config.update("jax_platforms", "cpu")
        _start_cpu_client()
    platform = jax.default_backend() if config.platform == "auto" else config.platform
    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"platform is {platform!r}, but jax has no such device: {error}"
        ) from error
    return platform


def add_libtpu_options(options: Mapping[str, CompilerOption]) -> None:
    """Add flags to those that libtpu reads from the environment when it is loaded."""
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    for name, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if (flag := f"--{name}={text}") not in flags:
            flags.append(flag)
    if options:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)


def _start_cpu_client() -> None:
    """Start XLA's CPU client so that its compute threads yield to the threads that serve.

    On CPU the compute threads keep every core busy, and a thread that wakes up to pass a token on
    would wait for its turn behind them. Threads inherit the niceness of the one that starts them
    (Linux), so a thread of its own starts the client.
    """

    def start() -> None:
        if sys.platform == "linux":
            thread_id = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + _MIN_NICENESS_STEP
            os.setpriority(os.PRIO_PROCESS, thread_id, max(niceness, _COMPUTE_NICENESS))
        jax.devices("cpu")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


def check_xla_options(options: Mapping[str, CompilerOption]) -> None:
    """Let the compiler judge its options before anything slow begins.

    Raises:
        ValueError: it has no such option, or does not take the value.
    """
    if not options:
        return
    try:
        jax.jit(lambda x: x).lower(0).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"xla_options: the compiler refuses them: {error}") from error
