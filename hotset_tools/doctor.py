"""`hotset doctor`: what this machine has, what it lacks, what would be used and why."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon import config
from daemon.errors import EXIT_FAILURE, ConfigError
from daemon.native.locate import cache_root
from hotset_tools import diagnosis, machine_facts
from hotset_tools.doctor_text import print_report


def command(
    config_file: Annotated[Path | None, typer.Option("--config", help="The daemon's config.toml.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell what this machine has, what it lacks, what would be used and why; exit code 1 if it cannot serve."""
    report = diagnose(config_file)
    if json:
        print(jsonlib.dumps(report, indent=2))
    else:
        print_report(report)
    if report["problems"]:
        raise typer.Exit(EXIT_FAILURE)


def diagnose(
    config_file: Path | None = None, child: Callable[[Path], dict[str, Any]] = machine_facts.ask_llama
) -> dict[str, Any]:
    """The whole report; "problems" lists what keeps the daemon from serving."""
    loaded, problems = _load(config_file)
    native = machine_facts.native_build(os.environ)
    seen = child(Path(native["directory"])) if native["directory"] else {}
    model = machine_facts.model(loaded) if loaded else {}
    memory = machine_facts.memory()
    seen |= {"devices": [diagnosis.device(one, loaded, memory) for one in seen.get("devices", [])]}
    problems += diagnosis.problems(native, seen, model)
    return {
        "native": native,
        "llama": seen,
        "backends": machine_facts.backends(native["backends"]),
        "glslc": machine_facts.glslc(),
        "memory": memory,
        "access": machine_facts.device_files(),
        "model": model,
        "cache": machine_facts.cache(cache_root()),
        "use": diagnosis.use(loaded, seen, model, memory) if loaded else [],
        "problems": problems,
    }


def _load(config_file: Path | None) -> tuple[config.Config | None, list[str]]:
    path = config_file or (Path("config.toml") if Path("config.toml").is_file() else None)
    try:
        return config.load(path), []
    except ConfigError as error:
        return None, [f"config: {where}: {what}" if where else f"config: {what}" for where, what in error.problems]
