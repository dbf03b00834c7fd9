"""A model of the Hugging Face Hub, in the Hub client's own cache.

Token, endpoint, cache and offline mode are that library's usual ones (HF_TOKEN, HF_ENDPOINT,
HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE). Files appear under their names only when they are whole; an
interrupted download goes on where the connection broke, and after a restart with the files that are
not there yet. Invariant: all files are of one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas.model_files.source import HubSource, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Generator

_CLIENT_NAME = "systole"
_NUM_THREADS = 8
_ACCESS_DENIED = (401, 403)


class HubModel:
    """The files of one commit.

    Attributes:
        source: with the commit as its revision.
        sizes: bytes of every file of the repository, by name.
        directory: where the files that have been downloaded lie.
    """

    def __init__(self, source: HubSource, cache: Path | None) -> None:
        """Ask the Hub for the commit and its files, and download config.json.

        Raises:
            ModelSourceError: the model is not there, not for us, or the Hub cannot be reached.
        """
        import huggingface_hub

        self._cache = cache
        api = huggingface_hub.HfApi(library_name=_CLIENT_NAME)
        with _explained(source):
            commit = api.resolve_revision(
                source.repo_id, revision=source.revision, cache_dir=cache
            ).resolved
            self.source = HubSource(source.repo_id, commit)
            snapshot = huggingface_hub.snapshot_download(
                source.repo_id,
                revision=commit,
                cache_dir=cache,
                allow_patterns=["config.json"],
                library_name=_CLIENT_NAME,
                tqdm_class=_make_bar(_ignore),
            )
            self.directory = Path(snapshot)
            self.sizes = self._list_files()

    def download(self, names: Collection[str], on_bytes: Callable[[int], None]) -> None:
        """Download files into `directory`.

        Raises:
            ModelSourceError: some cannot be had.
        """
        with _explained(self.source), ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(lambda name: self._download(name, on_bytes), names))

    def _download(self, name: str, on_bytes: Callable[[int], None]) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self.source.repo_id,
            name,
            revision=self.source.revision,
            cache_dir=self._cache,
            library_name=_CLIENT_NAME,
            tqdm_class=_make_bar(on_bytes),
        )

    def _list_files(self) -> dict[str, int]:
        """Return the sizes of all files; the list of a commit is kept, and asked for once."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            entries = get_cached_repo_tree(
                self.source.repo_id, revision=self.source.revision, cache_dir=self._cache
            )
            return {entry.path: entry.size for entry in entries}
        except CachedRepoTreeNotFoundError:  # the cache is an older client's
            files = [path for path in self.directory.rglob("*") if path.is_file()]
            return {str(path.relative_to(self.directory)): path.stat().st_size for path in files}


def _make_bar(on_bytes: Callable[[int], None]) -> type[Any]:
    """Return a progress bar that shows nothing and hands the bytes on."""
    from tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            on_bytes(int(n or 0))

    return SilentBar


@contextmanager
def _explained(source: HubSource) -> Generator[None]:
    """Turn the Hub client's errors into one that says what to do."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelSourceError(
            f"{source} is gated: accept its terms on the model's page, and set HF_TOKEN to a token "
            f"of that account ({_token_state(get_token())})"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceError(
            f"{source.repo_id} has no revision {source.revision!r}: name a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceError(
            f"the Hub has no model {source.repo_id!r}, or it is private: check the name (a local "
            f"directory is named by its path), and for a private model set HF_TOKEN "
            f"({_token_state(get_token())})"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = "try again later"
        if status in _ACCESS_DENIED:
            advice = f"HF_TOKEN must be a valid token with access ({_token_state(get_token())})"
        raise ModelSourceError(
            f"{source}: the Hub at {constants.ENDPOINT} answers with status {status}: {advice}"
        ) from error
    except (
        errors.OfflineModeIsEnabled,
        errors.RevisionResolutionError,
        errors.LocalEntryNotFoundError,
        httpx2.TransportError,
    ) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "it does not answer"
        raise ModelSourceError(
            f"{source} is not in the cache in full, and the Hub at {constants.ENDPOINT} cannot be "
            f"asked: {reason} ({type(error).__name__})"
        ) from error


def _token_state(token: str | None) -> str:
    return "a token is set" if token else "none is set"


def _ignore(num_bytes: int) -> None:
    del num_bytes
