"""The HTTP app over a fake token client, for the tests of its endpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from app.metrics import IngressMetrics
from app.tokenizer import Tokenizer
from tests.asgi_client import Client
from tests.fake_client import FakeClient

TEXT = "Hello world, 火星🚀 this is a small tokenizer"
MODEL = "tiny%s/model"  # an id with everything that formats and paths could trip over


@dataclasses.dataclass
class Server:
    """An app under test and what stands behind it."""

    tokenizer: Tokenizer
    fake: FakeClient
    client: Client
    metrics: IngressMetrics
    app: Starlette

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        text = self.metrics.render(None).decode()
        return {
            tuple(v for k, v in sorted(sample.labels.items()) if k != "ingress"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }


MakeServer = Callable[..., Server]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 100, **fields}
