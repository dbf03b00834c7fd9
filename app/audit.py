"""The audit file: one line of JSON for each request that reached an endpoint, when it has ended.

Who asked for how much of what, and how it ended. Keys appear by name. Prompts and answers do not
appear unless the settings say so. Invariant: a line is written in one piece, so that several
ingress replicas of a node may share a file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from app.generation import Generation
from replicas.errors import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """What is written where.

    Attributes:
        file: absolute path; its directory exists.
        include_text: prompts (as they were sent) and answers too.
    """

    file: str
    include_text: bool = False


class AuditLog:
    """Appends to the file."""

    def __init__(self, config: AuditConfig) -> None:
        self._includes_text = config.include_text
        # Readable by its owner only: with texts it holds what users wrote.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(config.file, flags, 0o600)

    @property
    def includes_text(self) -> bool:
        """Whether `request` and `output` are written."""
        return self._includes_text

    def write(
        self,
        *,
        request_id: str,
        key: str,
        endpoint: str,
        status: int,
        error: BaseException | None,
        generation: Generation | None,
        num_tokens: int,
        duration_s: float,
        request: dict[str, Any] | None,
        output: list[str] | None,
    ) -> None:
        """Write the line of one request.

        Args:
            request_id: as in the answer's headers.
            key: the name of its API key.
            endpoint: its path, or the gRPC method.
            status: HTTP status of the answer; 499 for a client that left.
            error: what it failed by, or None.
            generation: what was planned, if it came to that.
            num_tokens: of requests that generate nothing.
            duration_s: from arrival to end.
            request: its body, where texts are wanted.
            output: texts of its choices, where they are wanted.
        """
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "key": key,
            "endpoint": endpoint,
            "status": status,
            "outcome": _outcome(status, error),
            "error": _code(error),
            "duration_s": round(duration_s, 6),
        }
        if generation is None:
            line["prompt_tokens"] = num_tokens
        else:
            usage, sampling = generation.usage(), generation.choices[0].sampling
            first_s = generation.first_token_s
            line |= {
                "model": generation.header.model,
                "response_id": generation.header.id,
                "stream": generation.params.stream,
                "max_tokens": sampling.max_tokens,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
                "finish_reasons": [choice.finish_reason for choice in generation.choices],
                "first_token_s": None if first_s is None else round(first_s, 6),
            }
        if self._includes_text:
            line |= {"request": request, "output": output}
        os.write(self._fd, orjson.dumps(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def check_file(path: Path) -> None:
    """Check that the file can be written.

    Raises:
        OSError: it cannot, or its directory does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def _outcome(status: int, error: BaseException | None) -> str:
    if status == 499:
        return "client_left"
    if status >= 500:
        return "failed"
    return "refused" if status >= 400 or error is not None else "ok"


def _code(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return (error.code if isinstance(error, ServingError) else None) or type(error).__name__
