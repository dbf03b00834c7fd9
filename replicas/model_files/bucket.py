"""A model in a Google Cloud Storage bucket, copied to a cache on this machine.

Each version of the objects has a directory of its own, so a running replica's files never change.
Invariant: a file under its name is whole and has the size and the digest that the bucket states;
half a download is `NAME.part`, which the next attempt continues.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas.model_files.source import BucketSource, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Generator

_NUM_THREADS = 8
# One request. Threads times this is the host memory that a download takes.
_CHUNK_BYTES = 16 << 20
_ACCESS_DENIED = (401, 403)


class BucketModel:
    """The objects under a path, as they are now.

    Attributes:
        source: where they are.
        sizes: bytes of every object, by its name below the path.
        directory: where those that have been downloaded lie.
    """

    def __init__(self, source: BucketSource, cache: Path) -> None:
        """List the objects.

        Raises:
            ModelSourceError: there are none, or they cannot be listed.
        """
        self.source = source
        self._files = _open_file_system()
        prefix = f"{source.bucket}/{source.path}".rstrip("/")
        with _explained(source):
            found: Mapping[str, Mapping[str, Any]] = self._files.find(prefix, detail=True)
        self._objects = {
            path.removeprefix(f"{prefix}/"): found[path]
            for path in sorted(found)
            if not path.endswith("/")  # a folder that somebody made by hand
        }
        self.sizes = {name: int(entry["size"]) for name, entry in self._objects.items()}
        if not self.sizes:
            raise ModelSourceError(f"{source}: there are no objects under this path")
        folder = "--".join(["gs", source.bucket, *filter(None, source.path.split("/"))])
        self.directory = cache / folder / self._version()

    def download(self, names: Collection[str], on_bytes: Callable[[int], None]) -> None:
        """Download objects into `directory`; one process of a machine at a time.

        Raises:
            ModelSourceError: some cannot be had, or came damaged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (
            (self.directory / ".lock").open("w") as lock,
            _explained(self.source),
            ThreadPoolExecutor(_NUM_THREADS) as threads,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            list(threads.map(lambda name: self._download(name, on_bytes), names))

    def _version(self) -> str:
        """Digest of what tells one state of the objects from another."""
        digest = hashlib.blake2b(digest_size=8)
        for name, entry in self._objects.items():
            digest.update(f"{name}\0{entry['size']}\0{entry.get('generation')}\n".encode())
        return digest.hexdigest()

    def _download(self, name: str, on_bytes: Callable[[int], None]) -> None:
        target = self.directory / name
        if target.exists():
            on_bytes(self.sizes[name])
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        self._append(name, part, on_bytes)
        expected = self._objects[name].get("md5Hash")  # objects composed of others have none
        if expected is not None and _md5_of(part) != base64.b64decode(expected):
            part.unlink()
            raise ModelSourceError(
                f"{self.source}/{name}: what came is not what the bucket states; it was deleted, "
                "try again"
            )
        part.replace(target)

    def _append(self, name: str, part: Path, on_bytes: Callable[[int], None]) -> None:
        """Write what is missing of a file, from the end of what is there."""
        entry, size = self._objects[name], self.sizes[name]
        with part.open("ab") as file:
            on_bytes(min(file.tell(), size))
            while (offset := file.tell()) < size:
                end = min(offset + _CHUNK_BYTES, size)
                # The generation: an object that is replaced meanwhile must not give the rest.
                chunk: bytes = self._files.cat_file(
                    entry["name"], start=offset, end=end, generation=entry.get("generation")
                )
                if len(chunk) != end - offset:
                    raise ModelSourceError(
                        f"{self.source}/{name}: of {end - offset} bytes at {offset}, "
                        f"{len(chunk)} came"
                    )
                file.write(chunk)
                on_bytes(len(chunk))
            file.flush()
            os.fsync(file.fileno())


def _open_file_system() -> Any:
    """Return gcsfs with its usual credentials: application default, gcloud's, the machine's own."""
    try:
        import gcsfs
    except ImportError as error:
        raise ModelSourceError(
            "models in gs:// need the package gcsfs on every node (the extra `gcs`)"
        ) from error
    return gcsfs.GCSFileSystem(use_listings_cache=False)


def _md5_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").digest()


@contextmanager
def _explained(source: BucketSource) -> Generator[None]:
    """Turn the client's errors into one that says what to do."""
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except FileNotFoundError as error:
        raise ModelSourceError(
            f"{source}: there is no such bucket or object, or it was replaced during the download"
        ) from error
    except GoogleAuthError as error:
        raise ModelSourceError(f"{source}: {_ADVICE}: {error}") from error
    except HttpError as error:
        reason = f"status {error.code}: {error.message}"
        if int(error.code or 0) in _ACCESS_DENIED:
            reason = f"{_ADVICE}: {reason}"
        raise ModelSourceError(f"{source}: {reason}") from error
    except aiohttp.ClientError as error:
        raise ModelSourceError(f"{source}: Cloud Storage cannot be reached: {error}") from error
    except OSError as error:
        if not str(error).startswith("Forbidden"):  # gcsfs has no class for it
            raise
        raise ModelSourceError(f"{source}: {_ADVICE}: {error}") from error


_ADVICE = (
    "the credentials do not give access; set GOOGLE_APPLICATION_CREDENTIALS, or give the machine's "
    "service account the role Storage Object Viewer"
)
