"""Which files the config names: the model (the embedded one by default) and the chat template."""

from __future__ import annotations

from pathlib import Path

from daemon.config import Config
from daemon.errors import ConfigError
from daemon.hotset import budget, reserve
from daemon.messages import Load, ResidencySpec, Scheduling

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "models" / "tinymoe-41m-Q4_K_M.gguf"


def model_path(config: Config) -> Path:
    """The file to serve."""
    return Path(config.model.path) if config.model.path else EMBEDDED_MODEL


def template_path(config: Config) -> Path | None:
    """The operator's chat template, None when the model's own is used."""
    return Path(config.model.chat_template) if config.model.chat_template else None


def hot_set_path(config: Config) -> Path | None:
    """The list of experts for VRAM, None when there is none."""
    return Path(config.residency.hot_set) if config.residency.hot_set else None


def check_files(config: Config) -> None:
    """Whether the files that `config` names are there.

    Raises:
        ConfigError: lists every one that is not.
    """
    files = {
        "model.path": model_path(config),
        "model.chat_template": template_path(config),
        "residency.hot_set": hot_set_path(config),
    }
    problems = [(key, fault) for key, path in files.items() if path is not None and (fault := _fault(path))]
    if problems:
        raise ConfigError(problems)


def _fault(path: Path) -> str | None:
    try:
        return None if path.is_file() else f"there is no file {path}"
    except OSError as error:  # a directory that may not be searched, a name that is too long
        return f"{path} cannot be reached: {error.strerror}"


def load_command(config: Config) -> Load:
    """What the engine is told to load."""
    model, engine = config.model, config.engine
    return Load(
        model=str(model_path(config)),
        name=model.name,
        context=model.context,
        load_mode=model.load,
        device=engine.device,
        gpu_layers=engine.gpu_layers,
        cpu_moe_layers=engine.cpu_moe_layers,
        threads=engine.threads,
        threads_batch=engine.threads_batch,
        max_sequences=engine.max_sequences,
        kv_cells=engine.kv_cells,
        ubatch=engine.ubatch,
        cache_type_k=engine.cache_type_k,
        cache_type_v=engine.cache_type_v,
        repack=engine.repack,
        residency=residency_spec(config),
        scheduling=scheduling(config),
    )


def scheduling(config: Config) -> Scheduling:
    """[scheduling] as the engine is told it, at the load and when it changes."""
    return Scheduling(**config.scheduling.model_dump())


def residency_spec(config: Config) -> ResidencySpec:
    """[residency] as the engine is told it, at the load and when something live of it changes."""
    residency = config.residency
    return ResidencySpec(
        enabled=residency.enabled,
        hot_set=str(hot_set_path(config) or ""),
        vram={name: str(asked) for name, asked in budget.parse_all(residency.vram).items()},
        reserve={name: str(asked) for name, asked in reserve.parse_all(residency.reserve).items()},
        frozen=residency.frozen,
        upload=residency.upload,
        gate=residency.gate,
        remember=residency.remember,
    )
