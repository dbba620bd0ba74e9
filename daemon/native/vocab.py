"""A model's vocabulary: text to token ids and back, exact to the byte."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from pathlib import Path
from types import ModuleType

from daemon.errors import BadRequest, ModelUnusable
from daemon.native.library import TAIL, lib, load_reason

INT32_MAX = 2**31 - 1
VOCAB_TYPES = {1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}


class Attr(IntFlag):
    """What a token is; the values are llama.cpp's."""

    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    NORMALIZED = 64
    LSTRIP = 128
    RSTRIP = 256
    SINGLE_WORD = 512


SPECIAL = Attr.CONTROL | Attr.UNKNOWN
"""Tokens that stand for no text: parsed only where the caller asks for it, shown only where it asks."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that the tokenizer looks for in the text before anything else."""

    id: int
    text: str
    attr: Attr


class Vocab:
    """The vocabulary inside a loaded model. Ids are 0 <= id < `n_tokens`; anything else raises `BadRequest`.

    Safe to use from several threads: the library only reads.
    """

    def __init__(self, module: ModuleType, model: int) -> None:
        """Use `of_model` or `open`.

        Raises:
            ModelUnusable: the model has no vocabulary, or one that its own settings contradict.
        """
        self._lib = module
        self._model = model
        self._vocab = module.llama_model_get_vocab(model)
        self.n_tokens: int = module.llama_vocab_n_tokens(self._vocab)
        self.type = VOCAB_TYPES.get(module.llama_vocab_type(self._vocab), "")
        if not self.type or self.n_tokens <= 0:
            raise ModelUnusable("The model has no vocabulary.")
        self.bos = self._id("bos")
        self.eos = self._id("eos")
        self.eot = self._id("eot")
        self.add_bos = bool(module.llama_vocab_get_add_bos(self._vocab))
        self.add_eos = bool(module.llama_vocab_get_add_eos(self._vocab))
        if (self.add_bos and self.bos is None) or (self.add_eos and self.eos is None):
            # llama.cpp aborts the process when it is asked to add a token that does not exist.
            raise ModelUnusable("The model asks for a BOS or EOS token that its vocabulary does not have.")
        self._pieces: tuple[list[bytes | None], list[bytes | None]] = ([None] * self.n_tokens, [None] * self.n_tokens)

    @classmethod
    def of_model(cls, model: int) -> Vocab:
        """The vocabulary of a `llama_model *` that the caller keeps loaded as long as it uses the result."""
        return cls(lib(), model)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Vocab]:
        """Load only the vocabulary of a GGUF file (the first part of a split one); no device is touched.

        Raises:
            ModelUnusable: the file cannot be read, or is not a model that llama.cpp knows.
        """
        module = lib()
        model = _load_vocab_only(module, path)
        try:
            yield cls(module, model)
        finally:
            module.llama_model_free(model)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`; NUL characters are text like any other.

        `add_special` adds BOS and EOS where the model wants them; `parse_special` reads the texts of control tokens as
        those tokens.

        Raises:
            BadRequest: lone surrogates, or more than 2^31-1 bytes or tokens.
        """
        data = encode(text)
        room = len(data) // 2 + 64
        tokens, count = self._tokenize_into(data, room, add_special, parse_special)
        if count < 0:
            # The library answers a buffer that is too small with the negated number of tokens, or INT32_MIN.
            if -count > INT32_MAX:
                raise BadRequest("The text has more tokens than can be counted.")
            tokens, count = self._tokenize_into(data, -count, add_special, parse_special)
        return list(tokens[:count])

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token, not always whole UTF-8; control tokens are empty unless `special`."""
        if not 0 <= token < self.n_tokens:
            raise BadRequest(f"There is no token {token}; the vocabulary has {self.n_tokens}.")
        table = self._pieces[special]
        known = table[token]
        if known is None:
            known = table[token] = self._read_piece(token, special)
        return known

    def pieces(self, tokens: Iterable[int], special: bool = True) -> list[bytes]:
        """The bytes of every token, control tokens included unless told otherwise."""
        return [self.piece(token, special) for token in tokens]

    def detokenize(self, tokens: Iterable[int], special: bool = True) -> str:
        """The pieces joined; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.pieces(tokens, special)).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, self._checked(token)))

    def is_control(self, token: int) -> bool:
        """Whether the token is a control token."""
        return bool(self._lib.llama_vocab_is_control(self._vocab, self._checked(token)))

    def attr(self, token: int) -> Attr:
        """What the token is."""
        return Attr(self._lib.llama_vocab_get_attr(self._vocab, self._checked(token)))

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it, which for ordinary tokens is not the text it stands for."""
        return bytes(self._lib.llama_vocab_get_text(self._vocab, self._checked(token))).decode("utf-8", "replace")

    def chat_template(self, name: str | None = None) -> str | None:
        """The source of the model's chat template, the default one or a named one; None where there is none."""
        key = None if name is None else name.encode("utf-8")
        source = self._lib.llama_model_chat_template(self._model, key)
        return None if source is None else bytes(source).decode("utf-8", "replace")

    @cached_property
    def eog(self) -> frozenset[int]:
        """Every token that ends an answer."""
        is_eog, vocab = self._lib.llama_vocab_is_eog, self._vocab
        return frozenset(token for token in range(self.n_tokens) if is_eog(vocab, token))

    @cached_property
    def special_tokens(self) -> tuple[SpecialToken, ...]:
        """What the tokenizer looks for first: control, unknown and user-defined tokens, the longest text first."""
        get_attr, vocab = self._lib.llama_vocab_get_attr, self._vocab
        wanted = int(SPECIAL | Attr.USER_DEFINED)
        ids = [token for token in range(self.n_tokens) if get_attr(vocab, token) & wanted]
        found = [SpecialToken(token, self.text(token), self.attr(token)) for token in ids]
        return tuple(sorted((t for t in found if t.text), key=lambda t: (-len(t.text.encode()), t.id)))

    def _id(self, name: str) -> int | None:
        token = int(getattr(self._lib, f"llama_vocab_{name}")(self._vocab))
        return token if 0 <= token < self.n_tokens else None

    def _checked(self, token: int) -> int:
        # An id out of range is an exception in C++, which ends the process.
        if not 0 <= token < self.n_tokens:
            raise BadRequest(f"There is no token {token}; the vocabulary has {self.n_tokens}.")
        return token

    def _tokenize_into(
        self, data: bytes, room: int, add_special: bool, parse_special: bool
    ) -> tuple[ctypes.Array[ctypes.c_int32], int]:
        tokens = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
        return tokens, int(count)

    def _read_piece(self, token: int, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size


def encode(text: str) -> bytes:
    """UTF-8 of `text`.

    Raises:
        BadRequest: lone surrogates, or more than 2^31-1 bytes.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest("The text holds a lone surrogate and is no Unicode.") from None
    if len(data) > INT32_MAX:
        raise BadRequest("The text is larger than 2 GiB.")
    return data


def _load_vocab_only(module: ModuleType, path: Path) -> int:
    if not path.is_file():
        raise ModelUnusable(f"There is no model file {path}.")
    params = module.llama_model_default_params()
    # An empty device list: enumerating them would start every GPU driver for nothing.
    no_devices = (ctypes.c_void_p * 1)()
    params.devices = ctypes.addressof(no_devices)
    params.vocab_only = True
    params.n_gpu_layers = 0
    TAIL.clear()
    model = module.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ModelUnusable(f"{path.name} cannot be loaded: {load_reason()}")
    return int(model)
