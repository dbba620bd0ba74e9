"""What the demo changes of a configuration, and where its service is found."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon import config
from daemon.errors import HotsetError
from hotset_tools.bench.servers import free_port

_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


class PortTaken(HotsetError):
    """The service cannot listen where it is told to."""

    code = "address_unusable"


@dataclass(frozen=True)
class Settings:
    """How the service is started: the variables of its environment, and its address with a key, if it wants one."""

    environment: dict[str, str]
    url: str
    key: str


def overrides(device: str, vram: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that go before the file: experts move on `device`; the embedded model, unless `environ` names one."""
    keys = {
        "engine.device": device,
        "engine.gpu_layers": "-1",
        "engine.cpu_moe_layers": "-1",
        "residency.enabled": "true",
        "residency.hot_set": "",
        "residency.frozen": "false",
        "residency.gate": "false",
        "residency.vram": vram,
    }
    if _variable("model.path") not in environ:
        keys |= {"model.path": "", "model.name": "", "model.chat_template": ""}
    return {_variable(key): value for key, value in keys.items()}


def read(file: Path | None, device: str, vram: str, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings for `file`, None: defaults only.

    Raises:
        ConfigError: lists every fault.
        PortTaken: something else listens there, or nothing can.
    """
    changed = {**environ, **overrides(device, vram, environ)}
    loaded = config.load(file, changed)
    keys = config.api_keys(loaded)
    host, port = loaded.http.host, loaded.http.port
    check_address(host, port)
    if port == 0:
        port = free_port()
        changed[_variable("http.port")] = str(port)
    return Settings(changed, address(host, port), config.split_key(keys[0])[1] if keys else "")


def address(host: str, port: int) -> str:
    """Where a client on this machine finds a service that listens on `host`."""
    name = _ANY.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check_address(host: str, port: int) -> None:
    """Whether it can be listened on now.

    Raises:
        PortTaken: it cannot.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        hint = (
            "; is hotsetd running? HOTSET_HTTP_PORT=9000 takes another port" if error.errno == errno.EADDRINUSE else ""
        )
        raise PortTaken(f"{host}:{port} cannot be listened on: {error.strerror}{hint}") from None


def _variable(key: str) -> str:
    return f"{config.ENV_PREFIX}{key.replace('.', '_').upper()}"
