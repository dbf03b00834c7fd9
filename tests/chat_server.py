"""A chat server over a fake token client whose model answers with a given text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import tokenizers
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.completion_service import CompletionService
from app.content_filter import Check, ContentFilter
from app.exchange import Edge
from app.http_api import create_app
from app.ingress_config import IngressConfig
from app.metrics import IngressMetrics
from app.shared_state import SharedState
from app.tokenizer import Tokenizer
from replicas.wire import ModelInfo
from tests.asgi_client import Answer, Client
from tests.fake_client import EOS, FakeClient
from tests.grammar_follower import Follower
from tests.tiny_tokenizer import byte_level

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "f"}}]
ARGUMENTS = '{"city": "Zürich 🚀"}'

# Arguments are an object here, text in DEEPSEEK; null content is refused here, wanted there.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ '' + m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}<think>\n{% endif %}"
    "{% endif %}"
)
DEEPSEEK = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for call in m.tool_calls %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    "function<｜tool▁sep｜>"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endfor %}<|start|>assistant"
)


def call_text(arguments: str = ARGUMENTS, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Server:
    """A chat server whose model answers with a given text."""

    def __init__(
        self,
        directory: Path,
        template: str,
        text: str,
        *,
        special: Sequence[str] = (),
        tokens_per_delta: int = 1,
        takes_grammars: bool = False,
        shared: SharedState | None = None,
        check: Check | None = None,
        **config: Any,
    ) -> None:
        vocabulary = byte_level()
        vocabulary.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
        vocabulary.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        self.tokenizer = Tokenizer.load(directory)
        self.output = [*self.tokenizer.encode(text, add_special_tokens=False), EOS]
        info = ModelInfo(
            model_id="dir",
            max_model_len=4000,
            max_request_tokens=4000,
            vocab_size=vocabulary.get_vocab_size(with_added_tokens=True),
            eos_token_ids=(EOS,),
            fingerprint="0123456789abcdef0123",
            takes_grammars=takes_grammars,
        )
        follower = Follower(vocabulary.to_str(), info) if takes_grammars else None
        self.fake = FakeClient(
            follower or (lambda *_: self.output),
            model_info=info,
            tokens_per_delta=tokens_per_delta,
        )
        settings = IngressConfig(
            model_dir=str(directory), model_id="tiny", **{"keep_alive_s": 30.0, **config}
        )
        metrics = IngressMetrics("ingress-1")
        self.service = CompletionService(
            self.fake,
            self.tokenizer,
            settings,
            metrics,
            content_filter=None if check is None else ContentFilter(check),
        )
        self.edge = Edge(settings, metrics, shared or SharedState())
        self.app = create_app(
            self.service, self.fake, settings, metrics, edge=self.edge, echo_request_id=True
        )
        self.client = Client(self.app)

    def openai(self, key: str = "none") -> AsyncOpenAI:
        """OpenAI's own client of this server."""
        transport = httpx2.ASGITransport(app=self.app)
        http = httpx2.AsyncClient(transport=transport, base_url="http://test")
        return AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=http)

    async def post(self, **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, **fields}
        return await self.client.post("/v1/chat/completions", body)

    async def whole(self, **fields: Any) -> ChatCompletion:
        answer = await self.post(**fields)
        assert answer.status == 200, answer.json()
        return ChatCompletion.model_validate(answer.json())

    async def streamed(self, **fields: Any) -> ChatCompletion:
        """A stream, put together by OpenAI's own client."""
        options = {"stream_options": {"include_usage": True}}
        answer = await self.post(stream=True, **options, **fields)
        state = ChatCompletionStreamState()
        for event in answer.events():
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        return state.current_completion_snapshot

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.fake.calls[-1].prompt, skip_special_tokens=False)
