"""Compiled programs of a Serve config file, without a server: python -m replicas.engine.programs

  build   compile what is missing; needs the model's config.json, not its weights
  list    show every program of the store and whether a replica would load it
  verify  check that all programs of the file are there and sound; status 1 if not
  prune   delete what no replica would load
  check   say whether the file's engines fit a TPU slice, and how fast; status 1 if they do not

Programs are for this machine's processor and these packages: run it where replicas run. With
--topology they are for a TPU slice, and no TPU is needed: v6e:2x2, v5e:2x4, tpu7x:2x2x1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from replicas.config import EngineConfig
from replicas.engine import tpu_topology
from replicas.engine.backend import add_libtpu_options
from replicas.engine.memory_plan import NoRoom
from replicas.engine.model_runner import ModelRunner
from replicas.engine.preflight import (
    DEFAULT_CONTEXT,
    MemoryCheck,
    ProgramCheck,
    advise_on_programs,
    advise_on_weights,
    check_memory,
    compile_program,
    predict_bucket,
)
from replicas.engine.program_store import LowerFn, ProgramHeader, ProgramStore, StoredProgram
from replicas.engine.serve_file import EngineApplication, read_applications
from replicas.engine.startup import (
    EnginePlan,
    build_abstract_runner,
    plan_engine,
)

_MIB = 1 << 20
_SHORT = 12


class Programs:
    """The programs that one application needs, and the store that should hold them."""

    def __init__(self, application: EngineApplication, topology: str | None) -> None:
        """Resolve the application's engine for this machine, or for a TPU slice.

        Raises:
            ValueError: its configuration cannot work, or names no store.
        """
        if application.engine.program_store is None:
            raise ValueError(f"application {application.name!r}: engine.program_store is not set")
        plan = plan_for(application.engine, topology)
        assert plan.store is not None
        self.name = application.name
        self.store: ProgramStore = plan.store
        self.directory = Path(application.engine.program_store)
        self._runner: ModelRunner = build_abstract_runner(plan)
        self._devices = plan.mesh.devices.flatten().tolist() if plan.is_ahead else None

    def build(self) -> int:
        """Compile what is missing, one line each; return how many that were."""
        wanted, num_compiled = self._wanted(), 0
        for index, (name, lower) in enumerate(wanted.items()):
            begin_s = time.monotonic()
            is_new = self.store.ensure(name, lower, self._runner.compile)
            num_compiled += is_new
            what = f"compiled in {time.monotonic() - begin_s:.1f} s" if is_new else "there already"
            print(f"{self.name}: {index + 1}/{len(wanted)} {name}: {what}", flush=True)
        self.store.save_index()
        return num_compiled

    def verify(self) -> int:
        """Check every program, one line each; return how many cannot be loaded."""
        num_bad = 0
        for name, lower in self._wanted().items():
            problem = self.store.check(name, lower)
            num_bad += problem is not None
            print(f"{self.name}: {name}: {problem or 'ok'}", flush=True)
        return num_bad

    def find(self) -> set[str]:
        """Return the keys of all programs that the application needs."""
        return {self.store.find_key(name, lower) for name, lower in self._wanted().items()}

    def list(self) -> None:
        """Print a line per program of the store."""
        needed, now_s = self.find(), time.time()
        entries = list(self.store.entries())
        print(f"{self.directory}: {len(entries)} programs", flush=True)
        for entry in entries:
            if entry.header is None:
                print(f"{entry.path.name[:_SHORT]}  unusable: {entry.problem}")
                continue
            print(_describe(entry, entry.header, now_s), self._status(entry.header, needed))

    def prune(self) -> None:
        """Delete what no replica would load, one line each."""
        self.find()
        for path, reason in self.store.prune():
            print(f"deleted {path.name[:_SHORT]}: {reason}")

    def _wanted(self) -> dict[str, LowerFn]:
        """Every program by name, with what traces it for the devices that it is for."""
        programs = self._runner.programs
        return {name: functools.partial(self._lower, lower) for name, lower in programs.items()}

    def _lower(self, lower: LowerFn) -> jax.stages.Lowered:
        if self._devices is None:
            return lower()
        with tpu_topology.lowering_for(self._devices):
            return lower()

    def _status(self, header: ProgramHeader, needed: set[str]) -> str:
        if header.key in needed:
            return "current"
        if stale := self.store.describe_staleness(header):
            return f"stale: {stale}"
        return "of another configuration"


def plan_for(config: EngineConfig, topology: str | None) -> EnginePlan:
    """Resolve an engine for this machine, or for the first devices of a TPU slice.

    Raises:
        ValueError: its configuration cannot work there.
    """
    if topology is None:
        return plan_engine(config)
    jax.config.update("jax_platforms", "cpu")
    add_libtpu_options(config.libtpu_options)
    devices = tpu_topology.get_devices(topology)
    return plan_engine(dataclasses.replace(config, platform="tpu"), devices)


def check(application: EngineApplication, topology: str | None, *, context: int) -> bool:
    """Print whether an application's engine fits a TPU slice, and what its steps would take.

    Raises:
        ValueError: no topology is named, or the configuration cannot work for another reason.
    """
    if topology is None:
        raise ValueError("check needs --topology, such as --topology v6e:2x2")
    name, chip = application.name, tpu_topology.chip_of(topology)
    try:
        plan = plan_for(application.engine, topology)
    except NoRoom as error:
        print(f"{name}: {error}")
        _print_advice(name, topology, advise_on_weights(error.config, error.model_config, chip))
        return False
    devices = plan.mesh.devices.flatten().tolist()
    memory, runner = check_memory(plan, chip), build_abstract_runner(plan)
    print(f"{name}: {_describe_memory(memory, topology)}", flush=True)
    context = min(context, plan.config.max_model_len or context)
    programs: list[ProgramCheck] = []
    decode = ""
    for bucket in runner.buckets[::-1]:  # the largest first: where memory is short, it shows
        program = compile_program(runner, bucket, devices, kv_bytes=memory.kv_bytes)
        programs.append(program)
        step_s = predict_bucket(plan, chip, bucket, context=context).step_s
        num_chips = max(1, len(devices) // chip.devices_per_chip)
        tokens_per_s = bucket.num_tokens / step_s / num_chips
        speed = f"{1e3 * step_s:.2f} ms, {tokens_per_s:,.0f} tokens/s/chip"
        what = _describe_program(program, chip.hbm_bytes)
        print(f"{name}: {bucket}: {what}; {speed}", flush=True)
        if bucket.num_tokens == bucket.num_seqs and not decode:
            decode = f"decode of {bucket.num_seqs} at {context:,} tokens: {speed}"
    advice = advise_on_programs(plan.config, memory, programs)
    if advice:
        _print_advice(name, topology, advice)
        return False
    print(f"{name}: fits {topology}: {len(programs)} programs; predicted {decode}")
    return True


def _describe_memory(memory: MemoryCheck, topology: str) -> str:
    return (
        f"{topology}, {memory.num_devices} devices with {_gb(memory.chip.hbm_bytes)} each: weights "
        f"{_gb(memory.weight_bytes)}, KV {_gb(memory.kv_bytes)} = {memory.num_pages:,} pages = "
        f"{memory.num_tokens:,} tokens, {memory.num_full_length:.1f} sequences of full length"
    )


def _describe_program(program: ProgramCheck, limit: int) -> str:
    if program.error is not None:
        return program.error
    what = "fits" if program.total_bytes <= limit else "DOES NOT FIT"
    return (
        f"{what}, {_gb(program.total_bytes)} with {_gb(program.temporary_bytes)} of temporaries, "
        f"compiled in {program.compile_s:.0f} s"
    )


def _print_advice(name: str, topology: str, advice: Sequence[str]) -> None:
    print(f"{name}: does not fit {topology}; change one of:")
    for line in advice:
        print(f"{name}:   {line}")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _describe(entry: StoredProgram, header: ProgramHeader, now_s: float) -> str:
    parts = header.parts
    flags = " ".join(
        f"{name}={parts[name]}"
        for name in ("xla_flags", "libtpu_flags", "xla_options")
        if parts.get(name) not in (None, "", "{}")
    )
    return "  ".join(
        (
            header.key[:_SHORT],
            f"{header.name:>8}",
            f"{entry.num_bytes / _MIB:6.1f} MiB",
            f"{_age(now_s - header.created_s):>4}",
            f"compiled in {header.compile_s:.1f} s",
            header.model,
            f"{parts.get('platform')} {parts.get('device_kind')} [{parts.get('devices')}]",
            f"jax {parts.get('jax')}, jaxlib {parts.get('jaxlib')}",
            f"program {parts.get('stablehlo', '')[:_SHORT]}",
            *([flags] if flags else []),
        )
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _select(path: Path, name: str | None) -> list[EngineApplication]:
    """Read the file's applications, or the one named, and take over their compilers' variables.

    Raises:
        ValueError: there is none of that name, or two need different variables.
    """
    applications = [a for a in read_applications(path) if name in (None, a.name)]
    if not applications:
        raise ValueError(f"{path} has no application {name!r}")
    variables = applications[0].compiler_variables
    if any(a.compiler_variables != variables for a in applications):
        raise ValueError(
            "the applications set different XLA_FLAGS or LIBTPU_INIT_ARGS, which a process reads "
            "once: name one with --application"
        )
    os.environ.update(variables)
    return applications


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m replicas.engine.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["build", "list", "verify", "prune", "check"])
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--application", help="default: every one of the file")
    parser.add_argument("--prune", action="store_true", help="build: prune afterwards")
    parser.add_argument("--topology", help="a TPU slice, such as v6e:2x2; check needs it")
    parser.add_argument(
        "--context",
        type=int,
        default=DEFAULT_CONTEXT,
        help="check: tokens of each sequence in the predicted steps (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    arguments = _parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    num_bad = 0
    try:
        for application in _select(arguments.config, arguments.application):
            if arguments.command == "check":
                num_bad += not check(application, arguments.topology, context=arguments.context)
                continue
            programs = Programs(application, arguments.topology)
            if arguments.command == "build":
                begin_s = time.monotonic()
                count = programs.build()
                print(f"{programs.name}: {count} compiled in {time.monotonic() - begin_s:.1f} s")
            elif arguments.command == "verify":
                num_bad += programs.verify()
            elif arguments.command == "list":
                programs.list()
            if arguments.command == "prune" or arguments.prune:
                programs.prune()
    except ValueError as error:
        raise SystemExit(f"programs: {error}") from None
    return 1 if num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
