"""Makes a Hugging Face tokenizer from the vocabulary in a GGUF file's metadata.

The vocabulary itself is rebuilt by transformers' converter, called with our own metadata because
its own reader needs torch. This file adds what that converter leaves out: pre-tokenizers it does
not know, the BOS rule, special tokens and the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
)

from replicas.models.gguf import GgufError, GgufFile

# Byte-level BPE vocabularies differ in how text is cut before merging. transformers falls back to
# GPT-2's rule for those it does not know, which gives wrong ids without a warning: so a name must
# be listed, there or here, to be accepted.
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "default": _BYTE_LEVEL,
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
}


def convert_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file, chat template included.

    Raises:
        GgufError: the file has no vocabulary, or one of a kind that cannot be rebuilt faithfully.
    """
    vocabulary = {
        name: file.metadata[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in file.metadata
    }
    _check_supported(file, vocabulary)
    backend, _ = convert_gguf_tokenizer(
        str(file.metadata["general.architecture"]), dict(vocabulary)
    )
    if (pre_tokenizer := _PRE_TOKENIZERS.get(_pre_tokenizer_name(vocabulary))) is not None:
        backend.pre_tokenizer = pre_tokenizer
    special = {
        "bos_token": special_token(file, "bos"),
        "eos_token": special_token(file, "eos"),
        "unk_token": special_token(file, "unknown"),
        "pad_token": special_token(file, "padding"),
    }
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece(vocabulary))
    if add_bos and special["bos_token"] is not None:
        _prepend_bos(backend, special["bos_token"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=file.metadata.get(
            f"{file.metadata['general.architecture']}.context_length"
        ),
        **{name: token for name, token in special.items() if token is not None},
    )
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        tokenizer.chat_template = template
    return tokenizer


def special_token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of the token in a role ("bos", "eos", "eot", ...), None where there is none."""
    token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if isinstance(token_id, int) else None


def special_token(file: GgufFile, role: str) -> str | None:
    """Return the text of the token in a role, None where there is none.

    Raises:
        GgufError: its id lies outside the vocabulary.
    """
    if (token_id := special_token_id(file, role)) is None:
        return None
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    if not 0 <= token_id < len(tokens):
        raise GgufError(
            f"{file.path} is damaged: its {role} token has id {token_id}, but its vocabulary has "
            f"{len(tokens)} tokens"
        )
    return tokens[token_id]


def is_sentencepiece(vocabulary: Mapping[str, object]) -> bool:
    """Tell a SentencePiece vocabulary, which gets a BOS unless the file says otherwise."""
    return vocabulary["tokenizer_type"] == "llama"


def _pre_tokenizer_name(vocabulary: Mapping[str, object]) -> str:
    """Return the name of a byte-level vocabulary's pre-tokenizer; "" where the kind has none."""
    if vocabulary["tokenizer_type"] != "gpt2":
        return ""
    return str(vocabulary.get("pre_tokenizer_type", "default"))


def _check_supported(file: GgufFile, vocabulary: Mapping[str, object]) -> None:
    if not isinstance(vocabulary.get("tokens"), list):
        raise GgufError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
    kind = vocabulary.get("tokenizer_type")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise GgufError(
            f"{file.path} has a tokenizer of kind {kind!r} (tokenizer.ggml.model); supported: "
            + ", ".join(sorted(GGUF_TOKENIZER_TYPES))
        )
    known = {"", *_PRE_TOKENIZERS, *GGUF_PRE_TOKENIZER_SPLITS}
    if (name := _pre_tokenizer_name(vocabulary)) not in known:
        raise GgufError(
            f"{file.path} cuts text by the rule {name!r} (tokenizer.ggml.pre), which is not known "
            "here; supported: " + ", ".join(sorted(known - {""}))
        )


def _prepend_bos(backend: Tokenizer, bos_token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos_token} $A",
        pair=f"{bos_token} $A {bos_token} $B",
        special_tokens=[(bos_token, backend.token_to_id(bos_token))],
    )
