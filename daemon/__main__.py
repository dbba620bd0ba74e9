"""`hotsetd`: read the config, find the native library, serve until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from daemon import __version__, config, descriptors, settings
from daemon.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK, ConfigError, HotsetError, ModelUnusable
from daemon.hotset import budget
from daemon.hotset.hot_set import HotSetUnusable
from daemon.model_files import hot_set_path, model_path
from daemon.settings import Settings

DEFAULT_CONFIG = Path("config.toml")


def main() -> int:
    """Entry point of the `hotsetd` command; returns the exit code."""
    arguments = _parse(sys.argv[1:])
    path = _config_path(arguments.check or arguments.config)
    try:
        loaded = settings.read(path)
    except ConfigError as error:
        return _explain(error)
    if arguments.check:
        try:
            _check_hot_set(loaded.config)
        except ConfigError as error:
            return _explain(error)
        print(f"{arguments.check}: good")
        return EXIT_OK
    return _run(path, loaded)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hotsetd", description="Serve a Mixture-of-Experts model over HTTP.")
    parser.add_argument("config", nargs="?", type=Path, help="configuration file (default: config.toml if it is there)")
    parser.add_argument("--check", metavar="FILE", type=Path, help="list the faults of FILE and exit")
    parser.add_argument("--version", action="version", version=f"hotsetd {__version__}")
    return parser.parse_args(argv)


def _config_path(path: Path | None) -> Path | None:
    """Absolute, but with its symbolic links: where they point may change."""
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return path.absolute() if path is not None else None


def _check_hot_set(loaded: config.Config) -> None:
    """Only for --check: a service that starts goes on without a hot set that is faulty.

    Raises:
        ConfigError: lists every fault of the file, those beside the model too.
    """
    path = hot_set_path(loaded)
    if path is None:
        return
    from daemon.engine import wanted
    from daemon.native import gguf_check

    try:
        file = gguf_check.check(model_path(loaded))
        wanted.read_hot_set(path, budget.parse_all(loaded.residency.vram), file)
    except HotSetUnusable as error:
        raise ConfigError([("residency.hot_set", fault) for fault in error.faults]) from None
    except ModelUnusable as error:
        raise ConfigError([("model.path", error.message)]) from None


def _explain(error: ConfigError) -> int:
    for path, what in error.problems:
        print(f"hotsetd: {path}: {what}" if path else f"hotsetd: {what}", file=sys.stderr)
    return EXIT_CONFIG


def _run(path: Path | None, loaded: Settings) -> int:
    # Heavy imports come after the config is known to be good.
    from daemon import log
    from daemon.native import locate

    log.setup(loaded.config.log)
    descriptors.raise_limit()
    try:
        os.environ[locate.OVERRIDE] = str(locate.require_build().directory)
        asyncio.run(_serve(path, loaded))
    except ModelUnusable as error:
        print(f"hotsetd: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except HotsetError as error:
        print(f"hotsetd: {error.message}", file=sys.stderr)
        return EXIT_FAILURE
    except asyncio.CancelledError:
        print("hotsetd: stopped without waiting for running answers", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


async def _serve(path: Path | None, loaded: Settings) -> None:
    from daemon.app import serve

    stop, hangup = asyncio.Event(), asyncio.Event()
    ends_with_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup ignores it
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(descriptors.LoopFaults(loop.time))
    main_task = asyncio.current_task()
    assert main_task is not None

    def end() -> None:
        """The first signal drains, the second does not wait."""
        if stop.is_set():
            main_task.cancel()
        stop.set()

    def hang_up() -> None:
        """To read the configuration again; but a closed terminal sends it too, and means the end."""
        closed = ends_with_terminal and not _has_terminal()
        (stop if closed else hangup).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    await serve(path, loaded, stop, hangup)


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
