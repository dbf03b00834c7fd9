"""The app under test, as every test of an HTTP endpoint uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.completion_service import CompletionService
from app.generation_config import SamplingDefaults
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.tokenizer import Tokenizer
from replicas.wire import ModelInfo, SamplingParams
from tests.asgi_client import Client
from tests.fake_client import EOS, FakeClient
from tests.http_server import MODEL, TEXT, MakeServer, Server
from tests.tiny_tokenizer import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture
async def make_server(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[MakeServer]:
    services: list[CompletionService] = []

    def make(
        script: Callable[[Sequence[int], SamplingParams], Sequence[int]] | None = None,
        *,
        config: dict[str, Any] | None = None,
        with_chat: bool = True,
        max_model_len: int = 200,
        defaults: SamplingDefaults | None = None,
        takes_grammars: bool = False,
        **options: Any,
    ) -> Server:
        output = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
        info = ModelInfo(
            model_id="dir",
            max_model_len=max_model_len,
            max_request_tokens=max_model_len,
            vocab_size=500,
            eos_token_ids=(EOS,),
            fingerprint="0123456789abcdef0123",
            takes_grammars=takes_grammars,
        )
        fake = FakeClient(script or (lambda *_: output), model_info=info, **options)
        settings = IngressConfig(
            model_dir=str(model_dir), model_id=MODEL, **{"keep_alive_s": 30.0, **(config or {})}
        )
        metrics = IngressMetrics("ingress-1")
        used = tokenizer
        if not with_chat:
            used = Tokenizer.load(model_dir)
            used.chat_template = None
        service = CompletionService(fake, used, settings, metrics, defaults)
        services.append(service)
        app = create_app(service, fake, settings, metrics, echo_request_id=True)
        return Server(used, fake, Client(app), metrics, app)

    yield make
    for service in services:
        await service.close()
