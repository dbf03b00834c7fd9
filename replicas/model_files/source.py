"""What the setting `model` names: a local directory, a path in a Cloud Storage bucket, a Hub model.

Each has one canonical text, which configurations carry: an absolute path, `gs://bucket/path` or
`hf://org/name@revision`. Pure but for the question whether a directory exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
# Directory of a checkout that models are kept in: what is named below it is never asked of the Hub.
_LOCAL_PARENT = "models"

_BUCKET_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[^/#?]+)*)/*")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class ModelSourceError(ValueError):
    """A model cannot be had from where it should be; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A directory of this machine, or of a file system that all nodes share."""

    directory: Path

    @property
    def name(self) -> str:
        """What the model is called: the directory's name."""
        return self.directory.name

    def __str__(self) -> str:
        return str(self.directory)


@dataclass(frozen=True, slots=True)
class BucketSource:
    """A path of a Google Cloud Storage bucket.

    Attributes:
        bucket: its name.
        path: prefix of the objects, without slashes around it; "" for the whole bucket.
    """

    bucket: str
    path: str

    @property
    def name(self) -> str:
        """What the model is called: the last part of the path."""
        return self.path.rpartition("/")[2] or self.bucket

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.path}".rstrip("/")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model of the Hugging Face Hub.

    Attributes:
        repo_id: organisation and name.
        revision: branch, tag or commit.
    """

    repo_id: str
    revision: str = DEFAULT_REVISION

    @property
    def name(self) -> str:
        """What the model is called: its id."""
        return self.repo_id

    def __str__(self) -> str:
        return f"hf://{self.repo_id}@{self.revision}"


ModelSource = LocalSource | BucketSource | HubSource


def parse_source(text: str) -> ModelSource:
    """Read a canonical text; whatever has no scheme is a directory.

    Raises:
        ModelSourceError: the scheme is unknown, or what follows is malformed.
    """
    scheme = _SCHEME.match(text)
    if scheme is None:
        return LocalSource(Path(text))
    if scheme[1] == "gs":
        url = _BUCKET_URL.fullmatch(text)
        if url is None:
            raise ModelSourceError(f"{text!r} is not of the form gs://bucket/path")
        return BucketSource(url[1], url[2].strip("/"))
    if scheme[1] == "hf":
        repo_id, _, revision = text.removeprefix("hf://").partition("@")
        if not _REPO_ID.fullmatch(repo_id):
            raise ModelSourceError(f"{text!r} is not of the form hf://org/name@revision")
        return HubSource(repo_id, revision or DEFAULT_REVISION)
    raise ModelSourceError(
        f"{text!r}: models come from a directory, gs://bucket/path or the Hub (org/name)"
    )


def read_setting(text: str, *, revision: str | None = None, root: Path) -> ModelSource:
    """Read the setting as people write it: `org/name` is a Hub model unless it is a path here.

    Args:
        text: of the setting `model`.
        revision: of the setting `revision`.
        root: what relative paths are relative to.

    Raises:
        ModelSourceError: see `parse_source`; or there is a revision of something that has none.
    """
    if _SCHEME.match(text):
        source = parse_source(text)
    else:
        directory = (root / Path(text).expanduser()).resolve()
        source = HubSource(text) if _names_hub_model(text, root) else LocalSource(directory)
    if revision is None:
        return source
    if not isinstance(source, HubSource):
        raise ModelSourceError(f"revision = {revision!r} is for models of the Hub, not for {text}")
    if source.revision not in (DEFAULT_REVISION, revision):
        raise ModelSourceError(
            f"{text} and revision = {revision!r} name different revisions: leave one out"
        )
    return HubSource(source.repo_id, revision)


def _names_hub_model(text: str, root: Path) -> bool:
    """Whether a text without a scheme can be no path: a misspelt path must not reach the Hub."""
    if not _REPO_ID.fullmatch(text):
        return False
    organisation = text.partition("/")[0]
    return organisation != _LOCAL_PARENT and not (root / organisation).exists()
