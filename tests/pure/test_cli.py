"""The command line is a shell: modules of subcommands are imported only when they run."""

from __future__ import annotations

import sys

import pytest
import typer
from rich import markup
from typer.testing import CliRunner

from daemon import __version__
from daemon.errors import HotsetError
from hotset_tools import cli


def test_help_lists_every_subcommand_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in cli.COMMANDS.values():
        monkeypatch.delitem(sys.modules, entry.module, raising=False)
    result = CliRunner().invoke(cli.make_app(None), ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in cli.COMMANDS)
    assert not [entry.module for entry in cli.COMMANDS.values() if entry.module in sys.modules]


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_subcommand_exists_and_has_help(name: str) -> None:
    result = CliRunner().invoke(cli.make_app(name), [name, "--help"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_is_shown_as_it_is_written(name: str) -> None:
    """What stands in brackets could be taken for markup, and vanish."""
    commands = [typer.main.get_command(cli.make_app(name)).commands[name]]  # type: ignore[attr-defined]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for text in [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]:
            assert markup.render(text).plain == text


@pytest.mark.parametrize("words", [["verify", "m.gguf"], ["hot-set", "m.gguf"], ["record", "m.gguf"],
                                   ["bench", "decode", "m.gguf"], ["bench", "check-model", "m.gguf"]])  # fmt: skip
def test_an_empty_device_is_a_usage_error(words: list[str]) -> None:
    result = CliRunner().invoke(cli.make_app(words[0]), [*words, "--device", ""])
    assert (result.exit_code, "no name" in result.output) == (2, True)


def test_an_unknown_subcommand_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli.make_app("nonsense"), ["nonsense"]).exit_code == 2


def test_our_own_errors_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise HotsetError("no disk")

    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Entry(__name__, "unused", "Fails."))
    monkeypatch.setattr(sys.modules[__name__], "unused", fail, raising=False)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["fail"])
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "hotset: no disk\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hotset {__version__}\n"
