"""A script for the fake token client: a model that only its grammar keeps in form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replicas.grammar import Vocabulary
from replicas.wire import ModelInfo, SamplingParams
from tests.fake_client import EOS


class Follower:
    """Writes whatever the grammar of a request allows, another text for each seed."""

    def __init__(self, tokenizer_json: str, info: ModelInfo) -> None:
        self._vocabulary = Vocabulary(
            tokenizer_json, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
        )

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        del prompt
        rng = np.random.default_rng(sampling.seed % 1000)
        matcher = self._vocabulary.matcher(sampling.grammar)
        words = np.zeros(self._vocabulary.num_words, np.int32)
        token_ids: list[int] = []
        while (
            not matcher.is_complete
            and EOS not in token_ids
            and len(token_ids) < sampling.max_tokens
        ):
            matcher.fill_mask(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token_ids.append(int(rng.choice(np.flatnonzero(bits))))
            assert matcher.consume(token_ids[-1])
        return [*token_ids, EOS]
