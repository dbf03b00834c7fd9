"""Compiled programs of a Serve config file, without a server: python -m replicas.engine.programs

  build   compile what is missing; needs the model's config.json, not its weights
  list    show every program of the store and whether a replica would load it
  verify  check that all programs of the file are there and sound; status 1 if not
  prune   delete what no replica would load

Run it where replicas run: programs are for this machine's processor and these packages.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from replicas.engine.model_runner import ModelRunner
from replicas.engine.program_store import ProgramHeader, ProgramStore, StoredProgram
from replicas.engine.serve_file import EngineApplication, read_applications
from replicas.engine.startup import build_abstract_runner, plan_engine

_MIB = 1 << 20
_SHORT = 12


class Programs:
    """The programs that one application needs, and the store that should hold them."""

    def __init__(self, application: EngineApplication) -> None:
        """Resolve the application's engine for this machine.

        Raises:
            ValueError: its configuration cannot work, or names no store.
        """
        if application.engine.program_store is None:
            raise ValueError(f"application {application.name!r}: engine.program_store is not set")
        plan = plan_engine(application.engine)
        assert plan.store is not None
        self.name = application.name
        self.store: ProgramStore = plan.store
        self.directory = Path(application.engine.program_store)
        self._runner: ModelRunner = build_abstract_runner(plan)

    def build(self) -> int:
        """Compile what is missing, one line each; return how many that were."""
        buckets, num_compiled = self._runner.buckets, 0
        for index, bucket in enumerate(buckets):
            begin_s = time.monotonic()
            is_new = self.store.ensure(
                str(bucket), lambda b=bucket: self._runner.lower(b), self._runner.compile
            )
            num_compiled += is_new
            what = f"compiled in {time.monotonic() - begin_s:.1f} s" if is_new else "there already"
            print(f"{self.name}: {index + 1}/{len(buckets)} {bucket}: {what}", flush=True)
        self.store.save_index()
        return num_compiled

    def verify(self) -> int:
        """Check every program, one line each; return how many cannot be loaded."""
        num_bad = 0
        for bucket in self._runner.buckets:
            problem = self.store.check(str(bucket), lambda b=bucket: self._runner.lower(b))
            num_bad += problem is not None
            print(f"{self.name}: {bucket}: {problem or 'ok'}", flush=True)
        return num_bad

    def find(self) -> set[str]:
        """Return the keys of all programs that the application needs."""
        return {
            self.store.find_key(str(bucket), lambda b=bucket: self._runner.lower(b))
            for bucket in self._runner.buckets
        }

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

    def _status(self, header: ProgramHeader, needed: set[str]) -> str:
        if header.key in needed:
            return "current"
        if stale := self.store.describe_staleness(header):
            return f"stale: {stale}"
        return "of another configuration"


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
    parser.add_argument("command", choices=["build", "list", "verify", "prune"])
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--application", help="default: every one of the file")
    parser.add_argument("--prune", action="store_true", help="build: prune afterwards")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    arguments = _parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    num_bad = 0
    try:
        for application in _select(arguments.config, arguments.application):
            programs = Programs(application)
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
