"""A made-up byte-level BPE vocabulary of any size that llama.cpp loads like a trained one.

Every byte has a token, so that any text round-trips; every merge makes a token that exists; every token is valid text.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_MIN = 256 + len(SPECIAL)
NORMAL, CONTROL = 1, 3

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content if message.content is string else '') "
    "+ '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Vocab:
    """Tokens in the order of their ids, their GGUF types, and merges in the order of their rank."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    @property
    def bos(self) -> int:
        """<|endoftext|>, as in models of this family; not added by itself."""
        return len(self.tokens) - 3

    @property
    def eos(self) -> int:
        """<|im_end|>."""
        return len(self.tokens) - 1

    @property
    def ends(self) -> list[int]:
        """Every id that ends an answer."""
        return [self.bos, self.eos]


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def make_vocab(n_vocab: int) -> Vocab:
    """A vocabulary of exactly `n_vocab` tokens; the three special ones come last.

    Raises:
        ValueError: fewer than the bytes and special tokens need, or more than words of four letters can fill.
    """
    if n_vocab < N_MIN:
        raise ValueError(f"a vocabulary needs at least {N_MIN} tokens, not {n_vocab}")
    pairs = list(itertools.islice(_pairs(), n_vocab - N_MIN))
    if len(pairs) < n_vocab - N_MIN:
        raise ValueError(f"a vocabulary can have at most {N_MIN + len(pairs)} tokens, not {n_vocab}")
    tokens = [*byte_letters(), *(left + right for left, right in pairs), *SPECIAL]
    types = [NORMAL] * (n_vocab - len(SPECIAL)) + [CONTROL] * len(SPECIAL)
    return Vocab(tokens, types, [f"{left} {right}" for left, right in pairs])


def _pairs() -> Iterator[tuple[str, str]]:
    """Merges, shortest result first: letter pairs, then " " before a pair, then longer words of pairs."""
    letters = string.ascii_lowercase
    twos = ["".join(two) for two in itertools.product(letters, letters)]
    yield from itertools.product(letters, letters)
    space = byte_letters()[ord(" ")]
    yield from ((space, two) for two in twos)
    yield from ((two, letter) for two in twos for letter in letters)
    yield from itertools.product(twos, twos)


def add_to(writer: Any, vocab: Vocab) -> None:
    """The vocabulary's keys and its template into a `gguf.GGUFWriter`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(vocab.bos)
    writer.add_eos_token_id(vocab.eos)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
