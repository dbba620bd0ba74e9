"""Typed configuration: load, override, validate, compare; each key knows when a change takes effect."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from daemon.errors import ConfigError
from daemon.hotset import budget, reserve
from daemon.messages import Priority

ENV_PREFIX = "HOTSET_"
PATH_KEYS = ("model.path", "model.chat_template", "residency.hot_set", "http.keys_file")


class Effect(StrEnum):
    """When a changed key takes effect."""

    LIVE = "live"
    NEXT_LOAD = "next load"
    RESTART = "restart"


def _key(default: Any, effect: Effect, **bounds: Any) -> Any:
    return Field(default=default, json_schema_extra={"effect": effect.value}, validate_default=False, **bounds)


def live(default: Any, **bounds: Any) -> Any:
    """A key that applies at once, without dropping a stream."""
    return _key(default, Effect.LIVE, **bounds)


def next_load(default: Any, **bounds: Any) -> Any:
    """A key that applies when the engine loads the next time."""
    return _key(default, Effect.NEXT_LOAD, **bounds)


def restart(default: Any, **bounds: Any) -> Any:
    """A key that applies when the service starts the next time."""
    return _key(default, Effect.RESTART, **bounds)


class Section(BaseModel):
    """Base of every table: unknown keys are errors, values are never coerced, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Words = Annotated[tuple[str, ...], Field(strict=False)]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class ModelSection(Section):
    """[model]: which file, and how much context."""

    path: str = next_load("")
    name: str = next_load("", max_length=200)
    context: int = next_load(0, ge=0, le=16_777_216)
    chat_template: str = next_load("")
    load: Literal["auto", "mmap", "none"] = next_load("auto")


class EngineSection(Section):
    """[engine]: the child process that owns llama.cpp."""

    device: str = next_load("auto", min_length=1)
    gpu_layers: int = next_load(-1, ge=-1, le=10_000)
    cpu_moe_layers: int = next_load(-1, ge=-1, le=10_000)
    threads: int = next_load(0, ge=0, le=1024)
    threads_batch: int = next_load(0, ge=0, le=1024)
    max_sequences: int = next_load(8, ge=1, le=64)
    kv_cells: int = next_load(0, ge=0, le=16_777_216)
    ubatch: int = next_load(512, ge=32, le=8192)
    cache_type_k: CacheType = next_load("f16")
    cache_type_v: CacheType = next_load("f16")
    repack: bool = next_load(True)
    hang_seconds: float = live(300.0, ge=5, le=86_400)
    load_hang_seconds: float = live(1800.0, ge=5, le=86_400)
    restart_delay_seconds: float = live(1.0, ge=0.05, le=600)
    restart_delay_max_seconds: float = live(60.0, ge=0.05, le=3600)


class ResidencySection(Section):
    """[residency]: which experts are kept in VRAM, and how much of it they may take."""

    enabled: bool = next_load(True)
    hot_set: str = next_load("")
    vram: str | int | dict[str, str | int] = live("auto")
    reserve: str | int | dict[str, str | int] = live("auto")
    frozen: bool = live(False)
    upload: float = live(2560.0, ge=0, le=1_048_576)
    gate: bool = live(True)
    remember: bool = next_load(True)

    @field_validator("vram", mode="before")
    @classmethod
    def _readable_budgets(cls, vram: object) -> object:
        """Before its type is looked at: what pydantic says of a union is a line for each of its types."""
        budget.parse_all(vram)
        return vram

    @field_validator("reserve", mode="before")
    @classmethod
    def _readable_reserves(cls, kept: object) -> object:
        """Before its type, as budgets are."""
        reserve.parse_all(kept)
        return kept


class HttpSection(Section):
    """[http]: address, keys, limits."""

    host: str = restart("127.0.0.1", min_length=1)
    port: int = restart(8117, ge=0, le=65_535)
    keys: Words = live(())
    keys_file: str = live("")
    allowed_hosts: Words = live(())
    allowed_origins: Words = live(("http://localhost", "http://127.0.0.1", "tauri://localhost", "app://"))
    max_body_mib: int = restart(32, ge=1, le=1024)
    ping_seconds: float = live(5.0, ge=0.05, le=300)
    write_timeout_seconds: float = live(60.0, ge=0.1, le=3600)
    max_lag_kib: int = live(4096, ge=64, le=1_048_576)
    max_answer_mib: int = live(64, ge=1, le=65_536)
    shutdown_seconds: float = live(30.0, ge=0, le=600)

    @field_validator("keys")
    @classmethod
    def _usable_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        bare = [split_key(key)[1] for key in keys]
        if any(len(key) < 8 or not key.isascii() or any(c.isspace() for c in key) for key in bare):
            raise ValueError("a key needs at least 8 printable ASCII characters and no spaces")
        return keys

    @field_validator("allowed_hosts")
    @classmethod
    def _plain_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not name or set(":/*") & set(name) for name in names):
            raise ValueError("a host is a name without scheme, port and wildcard, such as box.example")
        return names

    @field_validator("allowed_origins")
    @classmethod
    def _whole_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        # Without "://" the words would be taken for a scheme: any host of it, or none that exists.
        if any("://" not in origin or "*" in origin for origin in origins):
            raise ValueError("an origin is a scheme and a host without wildcard, such as https://chat.example")
        return origins


class QueueSection(Section):
    """[queue]: how many requests may wait, and what one client may have at once."""

    max_waiting: int = live(64, ge=0, le=100_000)
    client_waiting: int = live(0, ge=0, le=100_000)
    client_running: int = live(0, ge=0, le=1000)
    client_tokens: int = live(0, ge=0, le=1_000_000_000)


class SchedulingSection(Section):
    """[scheduling]: how prompts and answers share the steps of the engine."""

    target_latency: float = live(2.0, ge=1.1, le=100)
    decode_share: float = live(0.5, ge=0.05, le=0.95)
    park_mib: int = live(1024, ge=0, le=1_048_576)


class TextSection(Section):
    """[text]: the pool that renders templates and tokenises."""

    workers: int = next_load(1, ge=1, le=16)
    timeout_seconds: float = next_load(10.0, ge=0.1, le=600)
    memory_mib: int = next_load(1024, ge=64, le=65_536)


class LogSection(Section):
    """[log]: what is written, and how."""

    level: Literal["debug", "info", "warning", "error"] = live("info")
    format: Literal["auto", "console", "json"] = restart("auto")


class SamplingSection(Section):
    """[sampling]: what applies when a request does not say."""

    temperature: float = live(0.8, ge=0, le=5)
    top_k: int = live(40, ge=0, le=1_000_000)
    top_p: float = live(0.95, ge=0, le=1)
    min_p: float = live(0.05, ge=0, le=1)
    typical_p: float = live(1.0, gt=0, le=1)
    repeat_penalty: float = live(1.0, gt=0, le=10)
    repeat_last_n: int = live(64, ge=-1, le=1_000_000)
    frequency_penalty: float = live(0.0, ge=-2, le=2)
    presence_penalty: float = live(0.0, ge=-2, le=2)


class Config(Section):
    """The whole file; a missing table has its defaults."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    residency: ResidencySection = ResidencySection()
    http: HttpSection = HttpSection()
    queue: QueueSection = QueueSection()
    scheduling: SchedulingSection = SchedulingSection()
    text: TextSection = TextSection()
    log: LogSection = LogSection()
    sampling: SamplingSection = SamplingSection()


def keys() -> dict[str, FieldInfo]:
    """Every key as "section.key", with its pydantic field."""
    return {
        f"{section}.{key}": info
        for section, field in Config.model_fields.items()
        for key, info in _section_type(field).model_fields.items()
    }


def effect(path: str) -> Effect:
    """When a change of "section.key" takes effect.

    Raises:
        KeyError: no such key.
    """
    extra = keys()[path].json_schema_extra
    assert isinstance(extra, dict)
    return Effect(str(extra["effect"]))


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read `path` (None: defaults only), apply `HOTSET_<SECTION>_<KEY>` from `environ`, validate everything.

    Raises:
        ConfigError: lists every fault, not only the first.
    """
    data = _read(path) if path is not None else {}
    problems = _overlay(data, environ)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += [(".".join(str(part) for part in item["loc"]), _reason(dict(item))) for item in error.errors()]
        raise ConfigError(problems) from None
    problems += cross_checks(config)
    if problems:
        raise ConfigError(problems)
    return _absolute(config, path.parent) if path is not None else config


def difference(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The keys that differ: "section.key" -> (old value, new value)."""
    result: dict[str, tuple[Any, Any]] = {}
    for path in keys():
        before, after = _value(old, path), _value(new, path)
        if before != after:
            result[path] = (before, after)
    return result


def merge(running: Config, wanted: Config, effects: Collection[Effect] = (Effect.LIVE,)) -> Config:
    """`wanted` for the keys with one of these effects, `running` for all others."""
    new = {path: after for path, (_, after) in difference(running, wanted).items() if effect(path) in effects}
    return _replace(running, new)


def shadowed(path: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The keys that the file sets to one value and `environ` to another, which is the one that counts.

    Raises:
        ConfigError: the file cannot be read.
    """
    data, environment = _read(path), dict[str, Any]()
    _overlay(environment, environ)
    return [
        f"{section}.{key}"
        for section, table in environment.items()
        for key, value in table.items()
        if key in data.get(section, {}) and data[section][key] != value
    ]


def api_keys(config: Config) -> tuple[str, ...]:
    """The keys of `http.keys` and of the lines of `http.keys_file`.

    Raises:
        ConfigError: the file cannot be read, is empty, or holds something that is no key.
    """
    if not config.http.keys_file:
        return config.http.keys
    try:
        lines = Path(config.http.keys_file).read_text("utf-8").split()
        extra = HttpSection(keys=tuple(lines)).keys
    except ValidationError as error:
        raise ConfigError([("http.keys_file", _reason(dict(error.errors()[0])))]) from None
    except (OSError, ValueError):  # no UTF-8, or a zero byte in the name
        raise ConfigError([("http.keys_file", "the file cannot be read")]) from None
    if not extra:
        # Without this an emptied file would open a service on the network to everybody.
        raise ConfigError([("http.keys_file", "the file holds no key")])
    return config.http.keys + extra


def split_key(text: str) -> tuple[Priority | None, str]:
    """A key of `http.keys` without the class that may stand before it, as in "background:KEY", and that class."""
    first, _, key = text.partition(":")
    priority = next((one for one in get_args(Priority) if one == first), None)
    return (priority, key) if priority else (None, text)


def is_loopback(host: str) -> bool:
    """Whether binding `host` keeps the service on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _section_type(field: FieldInfo) -> type[Section]:
    section = field.annotation
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return section


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError([("", f"{path} cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise ConfigError([("", f"{path} is not UTF-8")]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([("", f"{path} is not TOML: {error}")]) from None
    except RecursionError:
        raise ConfigError([("", f"{path} is nested too deep")]) from None


def _overlay(data: dict[str, Any], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Put the environment's values into `data`; return what could not be used."""
    problems: list[tuple[str, str]] = []
    paths = {ENV_PREFIX + path.replace(".", "_").upper(): path for path in keys()}
    sections = tuple(f"{ENV_PREFIX}{name.upper()}_" for name in Config.model_fields)
    for name, text in environ.items():
        if name not in paths:
            if name.startswith(sections):
                problems.append((name, "no such key"))
            continue
        section, key = paths[name].split(".")
        try:
            value = _from_text(text, keys()[paths[name]])
        except ValueError as error:
            problems.append((name, str(error)))
            continue
        table = data.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return problems


def _from_text(text: str, info: FieldInfo) -> Any:
    """A value of the environment, read as the key's default is typed; lists are comma-separated."""
    default = info.default
    if isinstance(default, bool):
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ValueError("must be true or false")
        return words[text.lower()]
    if isinstance(default, int | float):
        return _number(text, type(default))
    if isinstance(default, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        if "_" not in text and text.isascii():
            return kind(text)
    except ValueError:
        pass
    raise ValueError("must be a whole number in plain digits" if kind is int else "must be a number in plain digits")


def _absolute(config: Config, base: Path) -> Config:
    """Paths in a file are relative to it."""
    values = {path: _value(config, path) for path in PATH_KEYS}
    return _replace(config, {path: str((base / value).absolute()) for path, value in values.items() if value})


def _value(config: Config, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def _replace(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with other values for the keys "section.key", which are valid ones."""
    updates: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, key = path.split(".")
        updates.setdefault(section, {})[key] = value
    parts = {section: getattr(config, section).model_copy(update=changed) for section, changed in updates.items()}
    return config.model_copy(update=parts)


def cross_checks(config: Config) -> list[tuple[str, str]]:
    """The faults of keys that do not go together, as (key, what is wrong)."""
    problems: list[tuple[str, str]] = []
    if not is_loopback(config.http.host) and not (config.http.keys or config.http.keys_file):
        problems.append(("http.host", "an address off loopback needs http.keys or http.keys_file"))
    if config.engine.restart_delay_max_seconds < config.engine.restart_delay_seconds:
        problems.append(("engine.restart_delay_max_seconds", "must not be below engine.restart_delay_seconds"))
    if config.engine.kv_cells and config.engine.kv_cells < config.model.context:
        problems.append(("engine.kv_cells", "must not be below model.context"))
    residency = config.residency
    if residency.hot_set and residency.vram == "":
        problems.append(("residency.hot_set", "needs residency.vram: how much of the hot set goes into VRAM"))
    if not residency.hot_set:
        named = [one for one in budget.parse_all(residency.vram).values() if isinstance(one, budget.SizeOf)]
        problems += [("residency.vram", f"{one} is the name of a size, which needs residency.hot_set") for one in named]
        if residency.frozen and residency.vram != "":
            problems.append(("residency.frozen", "needs residency.hot_set: which experts are to stay in VRAM"))
    return problems


def _reason(item: dict[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "no such key"
    return str(item["msg"]).removeprefix("Value error, ")
