"""Two small tokenizers trained on the spot: one byte-level, one SentencePiece-like."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import Decoder

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "Hello world, this is a small tokenizer that knows a few words.",
    "The capital of France is Paris. Der Fluß fließt. 日本語のテキスト。 Это текст.",
    "user assistant system 0123456789 \n\n {} [] () == != emoji 😀 👩‍👩‍👧 é ü ñ",
] * 4


def byte_level(vocab_size: int = 600) -> tokenizers.Tokenizer:
    """GPT-2's kind: id 0 starts a turn, id 1 ends it (and is the end of sequence)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([" two words", "Ä"])  # not special, with characters outside the alphabet
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """Llama 2's kind: word marks, bytes as a last resort, the first space dropped."""
    pieces = sorted({f"▁{word}" for text in _CORPUS for word in text.split()})
    letters = sorted({c for text in _CORPUS for c in text if c.isascii() and c != " "} | {"▁"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    names += [piece for piece in pieces if piece not in names]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    sequence: list[Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(sequence)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def write_model_dir(directory: Path) -> Path:
    """A model directory that has everything but weights."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (directory / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}',
        encoding="utf-8",
    )
    return directory
