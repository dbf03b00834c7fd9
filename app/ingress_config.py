"""What an Ingress replica is told: frozen, made by `app.settings`, read by everyone else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.audit import AuditConfig
from app.rate_limits import NO_LIMITS, RateLimits
from app.tool_calls.styles import CallStyle, ReasoningStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """Settings of the HTTP edge.

    Attributes:
        model_dir: model directory, or where it is downloaded from; its tokenizer and chat template
            are read.
        model_cache: directory for downloads; None: see `replicas.model_files.fetch`.
        model_id: the name that clients send as `model`.
        key_hashes: sha256 digests of the accepted API keys; empty: no key is asked for.
        key_names: names of the keys by their digests.
        admin_key_hashes: digests of the keys for /admin; empty: there is no /admin.
        max_body_bytes: request bodies over this are refused before they are read.
        body_timeout_s: a body that has not arrived within so many seconds is given up.
        max_choices: prompts x n of one request.
        keep_alive_s: silence in a stream after which a comment is sent; also how long the status
            line waits for the first token, so that a refusal still gets its own status.
        request_timeout_s: time budget of one request, seconds, or None.
        tool_call_style: how the model writes tool calls; None: as its chat template does.
        reasoning_style: how it writes reasoning; None: as its chat template does.
        limits: what each key may do in a minute; also told to the shared state, which counts.
        audit: where requests are noted; None: nowhere.
        content_filter: `module:function` that is asked about prompts and answers, or None.
    """

    model_dir: str
    model_id: str
    model_cache: str | None = None
    key_hashes: frozenset[str] = field(default=frozenset(), repr=False)
    key_names: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    admin_key_hashes: frozenset[str] = field(default=frozenset(), repr=False)
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    max_choices: int = 128
    keep_alive_s: float = 5.0
    request_timeout_s: float | None = 3600.0
    tool_call_style: CallStyle | None = None
    reasoning_style: ReasoningStyle | None = None
    limits: RateLimits = NO_LIMITS
    audit: AuditConfig | None = None
    content_filter: str | None = None
