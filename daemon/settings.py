"""Everything that the operator set: the configuration with the API keys that its files hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from daemon import config
from daemon.errors import ConfigError
from daemon.model_files import check_files


class Settings(NamedTuple):
    """A valid configuration, and the keys that clients may send; those of `http.keys` come first."""

    config: config.Config
    api_keys: tuple[str, ...] = ()

    @property
    def keys_of_file(self) -> tuple[str, ...]:
        """The keys that come from `http.keys_file`."""
        return self.api_keys[len(self.config.http.keys) :]


def read(path: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the file (None: defaults only) and what it names.

    Raises:
        ConfigError: lists every fault.
    """
    loaded = config.load(path, environ)
    keys: tuple[str, ...] = ()
    problems: list[tuple[str, str]] = []
    try:
        keys = config.api_keys(loaded)
    except ConfigError as error:
        problems += error.problems
    try:
        check_files(loaded)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Settings(loaded, keys)
