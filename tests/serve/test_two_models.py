"""ops/serve_config.two-models.yaml through HTTP: two real engines, with tiny models on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import yaml
from ray import serve

from app.auth import hash_key
from app.build import build
from tests.checkpoints import write_checkpoint
from tests.tiny_tokenizer import write_model_dir

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[2]
TINY_ENGINE = {
    "platform": "cpu",
    "dtype": "float32",
    "page_size": 8,
    "num_pages": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_mixed_tokens": 16,
    "max_model_len": 128,
}
NAMES = ("large", "small")
KEY = "two-models"


@pytest.fixture(scope="module")
def urls(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    config = yaml.safe_load((ROOT / "ops" / "serve_config.two-models.yaml").read_text())
    root = tmp_path_factory.mktemp("two-models")
    for seed, application in enumerate(config["applications"]):
        args: dict[str, Any] = copy.deepcopy(application["args"])
        directory = write_model_dir(root / application["name"])
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        vocab_size = tokenizer.get_vocab_size()
        write_checkpoint(directory, {"vocab_size": vocab_size}, seed=seed)
        args["model"] = str(directory)
        args["engine"] = TINY_ENGINE
        args["replicas"] = {"num_replicas": 1}
        del args["ingress"]["api_keys_file"]
        args["ingress"]["api_key_hashes"] = [hash_key(KEY.encode())]
        args["ingress"]["num_replicas"] = 1
        serve.run(build(args), name=application["name"], route_prefix=application["route_prefix"])
    yield {name: f"http://127.0.0.1:{serve_port}/{name}/v1" for name in NAMES}
    for name in NAMES:
        serve.delete(name)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)


def test_each_path_serves_its_model_and_refuses_the_other(urls: dict[str, str]) -> None:
    texts: dict[str, str] = {}
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        with client(urls[name]) as api:
            assert [model.id for model in api.models.list()] == [name]
            answer = api.completions.create(model=name, prompt="Hello", max_tokens=8, temperature=0)
            texts[name] = answer.choices[0].text
            assert answer.model == name
            with pytest.raises(openai.NotFoundError):
                api.completions.create(model=other, prompt="Hello", max_tokens=1)
    assert texts["large"] != texts["small"]  # other weights, other words
