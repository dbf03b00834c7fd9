"""Brings a model's files to this machine and says in which directory they lie.

    python -m replicas.model_files.fetch MODEL [--revision R] [--cache DIR]

does so ahead of a start. A local directory is used where it is. Invariant: what comes back is a
directory that holds the part asked for in full.
"""

from __future__ import annotations

import argparse
import errno
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from replicas.model_files.bucket import BucketModel
from replicas.model_files.hub import HubModel
from replicas.model_files.selection import Part, list_missing, select_metadata, select_weights
from replicas.model_files.source import (
    BucketSource,
    HubSource,
    LocalSource,
    ModelSourceError,
    parse_source,
    read_setting,
)

DEFAULT_CACHE = Path(".cache/models")

ProgressFn = Callable[[int, int], None]


def fetch_model(
    model: str, part: Part, *, cache: str | None = None, progress: ProgressFn | None = None
) -> Path:
    """Return a directory with a part of a model, downloaded where it is not here yet.

    Args:
        model: canonical text of a source.
        part: what of it is needed.
        cache: directory for downloads; None: the Hub client's own for models of the Hub,
            `DEFAULT_CACHE` for others.
        progress: called with (bytes done, bytes in all) while something is downloaded.

    Raises:
        ModelSourceError: it cannot be had; the message says why and what to do.
    """
    source = parse_source(model)
    if isinstance(source, LocalSource):
        return source.directory
    remote = _open(source, cache)
    _download(remote, select_metadata(remote.sizes, part), progress)
    if part == "weights":
        try:
            names = select_weights(remote.sizes, remote.directory)
        except ValueError as error:
            raise ModelSourceError(f"{source}: {error}") from error
        _download(remote, names, progress)
    return remote.directory


def pin_model(model: str, *, cache: str | None = None) -> str:
    """Return the text of the version that a source names now, after a look at what it holds.

    All replicas of an application then serve the same commit, whenever they start.

    Raises:
        ModelSourceError: it cannot be reached, or lacks files that a served model has.
    """
    source = parse_source(model)
    if isinstance(source, LocalSource):
        return model
    remote = _open(source, cache)
    if missing := list_missing(remote.sizes):
        raise ModelSourceError(f"{source} lacks {', '.join(missing)}")
    return str(remote.source)


def read_cache_setting(
    cache: str | None, *, source: LocalSource | BucketSource | HubSource, root: Path
) -> str | None:
    """Return the directory that the setting `model_cache` stands for, as `fetch_model` takes it.

    Args:
        cache: the setting.
        source: of the model.
        root: what relative paths are relative to.
    """
    if cache is None and not isinstance(source, BucketSource):
        return None
    return str(root / (DEFAULT_CACHE if cache is None else Path(cache).expanduser()))


def _open(source: BucketSource | HubSource, cache: str | None) -> BucketModel | HubModel:
    directory = None if cache is None else Path(cache)
    with _disk_errors_explained(source):
        if isinstance(source, HubSource):
            return HubModel(source, directory)
        return BucketModel(source, directory or DEFAULT_CACHE)


def _download(
    remote: BucketModel | HubModel, names: Collection[str], progress: ProgressFn | None
) -> None:
    wanted = [name for name in names if not (remote.directory / name).exists()]
    if not wanted:
        return
    total = sum(remote.sizes[name] for name in wanted)
    _require_room(remote, total)
    counter = _ByteCounter(total, progress)
    with _disk_errors_explained(remote.source):
        remote.download(wanted, counter.add)


def _require_room(remote: BucketModel | HubModel, num_bytes: int) -> None:
    """Refuse what the disk cannot hold, before an hour of download and not after it.

    Raises:
        ModelSourceError: the disk is too small.
    """
    existing = next(path for path in (remote.directory, *remote.directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ModelSourceError(
            f"{remote.source} needs {num_bytes / 1e9:.2f} GB in {existing}, which has "
            f"{free / 1e9:.2f} GB free: name a larger disk in model_cache"
        )


@contextmanager
def _disk_errors_explained(source: BucketSource | HubSource) -> Generator[None]:
    """Turn errors of this machine's file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full: name a larger one in model_cache" if is_full else str(error)
        raise ModelSourceError(f"{source}: {reason}") from error


class _ByteCounter:
    """Sums up what the threads of a download report."""

    def __init__(self, total: int, progress: ProgressFn | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come; fewer than none where a file starts again."""
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Download a model into the cache.")
    parser.add_argument("model", help="gs://bucket/path, or org/name of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the Hub")
    parser.add_argument("--cache", help="directory, as the setting model_cache")
    options = parser.parse_args(arguments)
    try:
        source = read_setting(options.model, revision=options.revision, root=Path())
        fetch_model(str(source), "tokenizer", cache=options.cache, progress=_show)
        directory = fetch_model(str(source), "weights", cache=options.cache, progress=_show)
    except ModelSourceError as error:
        print(f"cannot fetch: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


def _show(done: int, total: int) -> None:
    """Draw a bar on the terminal; a file gets one line a download."""
    if sys.stderr.isatty() or done == total:
        filled = 30 * done // max(total, 1)
        bar = "#" * filled + "-" * (30 - filled)
        start, end = ("\r", "\n" if done == total else "") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}[{bar}] {done / 1e6:.1f}/{total / 1e6:.1f} MB", end=end, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
