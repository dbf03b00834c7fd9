"""Serves golden checkpoints one after the other and compares what comes over HTTP.

    python -m bench.golden_http [DIR...]

starts one local Ray cluster, and for each checkpoint the whole application: ingress, router and one
engine. The greedy tokens of the stored prompts, sent together, must be the reference's wherever it
is decided. Prints the table of docs/models.md, a row as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import tokenizers
from ray import serve

from app.auth import hash_key
from app.build import build
from bench.golden import count_equal
from bench.report import ROOT
from replicas.models.registry import load_model_config

GOLDEN_DIR = ROOT / "tests" / "golden"
_PAGE_SIZE = 16
_READY_S = 600.0  # of a server, its programs' compilation included, on a busy machine
_ANSWER_S = 300.0
_KEY = "golden"
"""Needed where the cluster's Serve has gRPC servers, which listen on all interfaces."""


def serve_checkpoint(checkpoint: Path, directory: Path, *, port: int) -> tuple[int, int]:
    """Serve a checkpoint, ask for its texts, and take it down again; Serve must be running.

    Args:
        checkpoint: directory of the weights and golden.npz.
        directory: an empty one, which becomes the model's.
        port: of Serve's HTTP.

    Returns:
        Greedy tokens equal to the reference, and how many should be.

    Raises:
        TimeoutError: the service did not become ready.
    """
    golden = np.load(checkpoint / "golden.npz")
    limit = _longest_text(checkpoint)
    texts = [
        (golden[f"prompt_{i}"].tolist(), golden[f"greedy_{i}"].tolist(), golden[f"margin_{i}"])
        for i in range(sum(key.startswith("prompt_") for key in golden.files))
    ]
    texts = [text for text in texts if len(text[0]) + len(text[1]) <= limit]
    longest = max(len(prompt) + len(greedy) for prompt, greedy, _ in texts)
    write_model(checkpoint, directory)
    url = f"http://127.0.0.1:{port}/golden"
    arguments = {
        "model": str(directory),
        "served_model_name": "golden",
        "engine": {
            "platform": "cpu",
            "dtype": "float32",
            "page_size": _PAGE_SIZE,
            "num_pages": 1 + len(texts) * -(-longest // _PAGE_SIZE),
            "max_num_seqs": 8,
            "max_model_len": longest,
            "max_num_batched_tokens": 16,
            "max_mixed_tokens": 16,
        },
        "ingress": {"api_key_hashes": [hash_key(_KEY.encode())]},
    }
    serve.run(build(arguments), name="golden", route_prefix="/golden")
    try:
        _wait_until_ready(url)
        with ThreadPoolExecutor(len(texts)) as threads:
            outputs = threads.map(lambda text: _complete(url, text[0], len(text[1])), texts)
            counts = [
                count_equal(tokens, greedy, margins)
                for tokens, (_, greedy, margins) in zip(outputs, texts, strict=True)
            ]
    finally:
        serve.delete("golden")
    return sum(equal for equal, _ in counts), sum(total for _, total in counts)


def _longest_text(checkpoint: Path) -> int:
    """Tokens of the longest text that one engine serves as the reference does."""
    config = load_model_config(checkpoint)
    if config.rope.kind == "longrope":  # it has other frequencies for longer texts
        return config.rope.original_max_position_embeddings
    return config.max_position_embeddings


def write_model(checkpoint: Path, directory: Path) -> None:
    """Fill a model directory: the checkpoint's files, and a tokenizer of one word per id."""
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to((checkpoint / name).resolve())
    vocab_size = load_model_config(checkpoint).vocab_size
    words = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def _wait_until_ready(url: str) -> None:
    give_up_at = time.monotonic() + _READY_S
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                return
        except OSError:  # a 503 included
            time.sleep(0.1)
    raise TimeoutError(f"{url} was not ready after {_READY_S} s")


def _complete(url: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt of ids."""
    body = {
        "model": "golden",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
        return json.load(response)["choices"][0]["token_ids"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Golden checkpoints over HTTP.")
    parser.add_argument("directories", nargs="*", type=Path, help="all of tests/golden by default")
    options = parser.parse_args(arguments)
    logging.getLogger("ray").setLevel(logging.WARNING)
    checkpoints = options.directories or sorted(path.parent for path in GOLDEN_DIR.glob("*/*.npz"))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options_of_ray: dict[str, Any] = {
        "address": "local",
        "num_cpus": 16,  # logical: every Serve actor reserves one
        "include_dashboard": False,
        "log_to_driver": False,
        "_node_ip_address": "127.0.0.1",
    }
    ray.init(**options_of_ray)
    has_failed = False
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print("| checkpoint | family | greedy over HTTP | seconds |\n|---|---|---|---|", flush=True)
        for checkpoint in checkpoints:
            begin_s = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                equal, total = serve_checkpoint(checkpoint, Path(directory), port=port)
            has_failed |= equal != total
            family = load_model_config(checkpoint).family
            seconds = time.monotonic() - begin_s
            print(
                f"| {checkpoint.name} | `{family}` | {equal} of {total} | {seconds:.0f} |",
                flush=True,
            )
        serve.shutdown()
    finally:
        ray.shutdown()
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
