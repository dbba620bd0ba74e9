"""From the sampling fields of a body to `daemon.messages.Sampling`."""

from __future__ import annotations

from daemon.api.schema import MAX_BIASES, LogitBias, SamplingFields
from daemon.api.services import TextPool
from daemon.config import SamplingSection
from daemon.errors import BadRequest
from daemon.messages import Sampling

NEVER = -1e30
_SEEDS = 2**32
_RANDOM_SEED = _SEEDS - 1
"""llama.cpp's own mark for "a random one"."""
_PLAIN = frozenset(Sampling.model_fields) - {"seed", "logit_bias", "dry_sequence_breakers", "top_k"}


async def read_sampling(fields: SamplingFields, defaults: SamplingSection, pool: TextPool, n_vocab: int) -> Sampling:
    """What the body says over what the configuration says over llama.cpp's defaults.

    Raises:
        BadRequest: a logit_bias that cannot be read.
    """
    values = defaults.model_dump() | fields.model_dump(include=set(_PLAIN), exclude_none=True)
    if fields.top_k is not None:
        values["top_k"] = max(fields.top_k, 0)
    if fields.dry_sequence_breakers is not None:
        values["dry_sequence_breakers"] = tuple(fields.dry_sequence_breakers)
    bias = await read_logit_bias(fields.logit_bias, pool, n_vocab) if fields.logit_bias else ()
    return Sampling(**values, seed=read_seed(fields.seed), logit_bias=bias)


def read_seed(seed: int | None) -> int | None:
    """A 32-bit seed; None (random) for none, a negative one, and llama.cpp's 4294967295."""
    if seed is None or seed < 0 or seed == _RANDOM_SEED:
        return None
    return seed % _RANDOM_SEED


def derive_seed(seed: int | None, index: int) -> int | None:
    """The seed of the answer with this index: different for each, the same every time."""
    return None if seed is None else (seed + index) % _RANDOM_SEED


async def read_logit_bias(given: LogitBias, pool: TextPool, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs from a map or from llama.cpp's list; a text counts for each of its tokens.

    Raises:
        BadRequest: a value out of range, a token that does not exist, or too many of them.
    """
    result: dict[int, float] = {}
    for key, value in _pairs(given):
        bias = _bias(value)
        for token in await _token_ids(key, pool, n_vocab):
            result[token] = bias
        if len(result) > MAX_BIASES:
            raise _bad(f"at most {MAX_BIASES} tokens can have a bias")
    return tuple(result.items())


def names_tokens(given: LogitBias | None) -> bool:
    """Whether a token is named by its id."""
    return any(isinstance(key, int) for key, _ in _pairs(given or []))


def _pairs(given: LogitBias) -> list[tuple[int | str, object]]:
    if isinstance(given, dict):
        return [(int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key, v) for key, v in given.items()]
    pairs: list[tuple[int | str, object]] = []
    for item in given:
        if len(item) != 2 or isinstance(item[0], bool | float):
            raise _bad("each entry is [token id or text, bias or false]")
        pairs.append((item[0], item[1]))
    return pairs


def _bias(value: object) -> float:
    if value is False:
        return NEVER
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1000 <= value <= 1000:
        raise _bad("a bias is a number from -100 to 100, or false")
    return NEVER if value <= -100 else float(value)


async def _token_ids(key: int | str, pool: TextPool, n_vocab: int) -> list[int]:
    if isinstance(key, str):
        return await pool.tokenize(key, add_special=False, parse_special=False)
    if not 0 <= key < n_vocab:
        raise _bad(f"token ids go from 0 to {n_vocab - 1}")
    return [key]


def _bad(what: str) -> BadRequest:
    return BadRequest(f"logit_bias: {what}", param="logit_bias")
