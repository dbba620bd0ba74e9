"""From a prompt's text to token ids, so that what a client wrote cannot become a turn of the conversation.

Before a template is rendered, a mark is put into every text of a control token that a client's string spells, wholly or
in part (see `Guard`). In the rendered text a control token is one only where no mark stands inside its text. Without a
mark, which is nearly always, the whole text is tokenised in one call, as llama.cpp's server does; with one, the text is
first parted at the real special tokens in the order in which llama.cpp parts it, and everything between is plain.

Limits: a control token whose text is a single character is not protected, and neither is one that a template puts
together around a client's word of letters only (`<` + name + `>`) or from slices of a client's text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from daemon.native.vocab import SPECIAL, Attr, SpecialToken
from daemon.prompt.conversation import ROLES, Json

Rewrites = tuple[tuple[str, str], ...]
"""What a template replaces in its strings: (old, new)."""

Piece = str | int
"""A part of a text: plain text, or the id of a special token."""

_OWN_WORDS = frozenset({*ROLES, "text", "thinking", "function"})
"""Values of `role` and `type` that the daemon itself has checked; templates build control tokens from them."""

_THOUGHTS = re.compile("think|thought|reason", re.IGNORECASE)
_SPACE = " \t\n\v\f\r"


class Tokenizer(Protocol):
    """What is needed of `daemon.native.vocab.Vocab`."""

    add_bos: bool

    @property
    def special_tokens(self) -> tuple[SpecialToken, ...]: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


class Guard:
    """Puts marks into client's strings, where they spell control tokens.

    A mark goes behind the first character of each occurrence. A string that could be a part of one, because it begins
    with the end of a token's text, ends with the beginning of one or lies within one, gets a mark at that edge. Where
    an occurrence would come about by what the template replaces, that text gets marks around it. The parts of a message
    count as one string. An assistant's own words may hold tokens that open and close thoughts: templates look for them
    there, and they begin no turn.
    """

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        texts = [token.text for token in tokens if token.attr & SPECIAL and len(token.text) > 1]
        self._all = _Spotter(texts)
        self._turns = _Spotter([text for text in texts if not _THOUGHTS.search(text)])

    def protect(self, variables: Json, mark: str, rewrites: Rewrites) -> Json:
        """Copies of a template's variables with marks in their strings."""
        everything, turns = (_Marker(spotter, mark, rewrites) for spotter in (self._all, self._turns))
        marked = {key: everything.value(value) for key, value in variables.items() if key != "messages"}
        marked["messages"] = [
            turns.value(message) if message["role"] == "assistant" else everything.value(message)
            for message in variables["messages"]
        ]
        return marked


class _Marker:
    """Copies JSON values with marks in them."""

    def __init__(self, spotter: _Spotter, mark: str, rewrites: Rewrites) -> None:
        self._spotter, self._mark, self._rewrites = spotter, mark, rewrites

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._key(key): item if _is_own(key, item) else self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return self._across_parts(value, [self.value(item) for item in value])
        return value

    def _key(self, key: str) -> str:
        """A key of a client's object. Words stay: templates ask for them by name."""
        return key if _is_word(key) else self._text(key)

    def _text(self, text: str) -> str:
        places = self._spotter.places(text)
        if places:
            cuts = [0, *sorted(places), len(text)]
            text = self._mark.join(text[start:end] for start, end in itertools.pairwise(cuts))
        rewrites = [(old, new) for old, new in self._rewrites if old in text]
        if rewrites and self._comes_about(text, rewrites):
            for old, _ in rewrites:
                text = text.replace(old, f"{self._mark}{old}{self._mark}")
        return text

    def _comes_about(self, text: str, rewrites: list[tuple[str, str]]) -> bool:
        """Whether a control token without a mark is there after the template's replacements, one or all of them."""
        together = text
        for old, new in rewrites * 2:
            together = together.replace(old, new)
            if any(self._spotter.whole(changed) for changed in (text.replace(old, new), together)):
                return True
        return False

    def _across_parts(self, parts: list[Any], marked: list[Any]) -> list[Any]:
        """The marked parts, with one more mark where an occurrence begins with the last character of a part.

        Where more of it is in the part, the mark of the part's own edge stands inside the occurrence already.
        """
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < 2 or len(texts) < len(parts):
            return marked
        ends = {end: number for number, end in enumerate(itertools.accumulate(map(len, texts))) if texts[number]}
        result = list(marked)
        for start in self._spotter.whole("".join(texts)):
            if (number := ends.get(start + 1)) is not None:
                result[number] = result[number] | {"text": result[number]["text"] + self._mark}
        return result


class _Spotter:
    """Finds where strings spell any of some texts, or a piece of one at their edges."""

    def __init__(self, texts: list[str]) -> None:
        self._whole = re.compile(f"(?={_any_of(texts)})") if texts else None
        heads = {text[:n] for text in texts for n in range(2, len(text))}
        tails = {text[-n:] for text in texts for n in range(2, len(text))}
        self._heads = frozenset(piece for piece in heads if not _is_word(piece))
        self._tails = frozenset(piece for piece in tails if not _is_word(piece))
        self._longest = max(map(len, texts), default=0)
        self._together = "\0".join(texts)

    def whole(self, text: str) -> list[int]:
        """Where occurrences begin; they may overlap."""
        return [] if self._whole is None else [match.start() for match in self._whole.finditer(text)]

    def places(self, text: str) -> set[int]:
        """Where marks belong."""
        places = {start + 1 for start in self.whole(text)}
        core = text.strip(_SPACE)
        if not core or not self._longest:
            return places
        start = text.index(core[0])
        end = start + len(core)
        sizes = range(2, min(len(core), self._longest) + 1)
        if any(core[-size:] in self._heads for size in sizes):
            places.add(end)
        if any(core[:size] in self._tails for size in sizes):
            places.add(start)
        if 1 < len(core) < self._longest and not _is_word(core) and core in self._together:
            places.add(end)
        return places


class PromptTokens:
    """Ids of prompts in one vocabulary."""

    def __init__(self, vocab: Tokenizer) -> None:
        self._vocab = vocab
        self._parts = Parts(vocab.special_tokens)
        self.guard = Guard(vocab.special_tokens)

    def of(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered prompt that may hold marks, with BOS and EOS where the model wants them.

        Raises:
            BadRequest: as `Vocab.tokenize`.
        """
        vocab = self._vocab
        if not mark or mark not in text:
            return vocab.tokenize(text, add_special=True, parse_special=True)
        ends = vocab.tokenize("", add_special=True, parse_special=True)
        ids = ends[:1] if vocab.add_bos else []
        tail = ends[len(ids) :]
        for piece in self._parts.of(text):
            if isinstance(piece, int):
                ids.append(piece)
            elif plain := piece.replace(mark, ""):
                ids += vocab.tokenize(plain, add_special=False, parse_special=False)
        return ids + tail


class Parts:
    """Cuts texts at special tokens, as llama.cpp does: the longest text first, white space beside a token that eats it
    dropped. A token's text with a mark inside it is not that text; marks are left in.
    """

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        self._spotter = _Spotter(list(self._tokens))
        self._lengths = sorted({len(text) for text in self._tokens})

    def of(self, text: str) -> list[Piece]:
        """The pieces of `text` in their order."""
        starts = self._spotter.whole(text)
        found = {text[start : start + length] for start in starts for length in self._lengths}
        pieces: list[Piece] = [text]
        for spelled, token in self._tokens.items():
            if spelled in found:
                pieces = [part for piece in pieces for part in _cut(piece, token)]
        return pieces


def _cut(piece: Piece, token: SpecialToken) -> Iterator[Piece]:
    """The piece cut at each occurrence. What the token eats behind it is gone before the next one is looked for."""
    rest = piece
    while isinstance(rest, str) and token.text in rest:
        before, _, rest = rest.partition(token.text)
        if before := before.rstrip(_SPACE) if token.attr & Attr.LSTRIP else before:
            yield before
        yield token.id
        rest = rest.lstrip(_SPACE) if token.attr & Attr.RSTRIP else rest
    if rest != "":
        yield rest


def _is_own(key: str, value: Any) -> bool:
    return key in {"role", "type"} and isinstance(value, str) and value in _OWN_WORDS


def _is_word(text: str) -> bool:
    return text.isalnum() or text.isidentifier()


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches any of `texts`, branching a character at a time: thousands cost one."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        branches.setdefault(text[0], []).append(text[1:])
    choices = [re.escape(character) + _any_of(rest) for character, rest in branches.items()]
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
