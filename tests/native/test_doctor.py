"""`hotset doctor` on the real library, and with a child that crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotset_tools import cli, doctor, machine_facts


def test_it_lists_the_devices_and_finds_nothing_wrong(library_path: Path) -> None:
    result = CliRunner().invoke(cli.make_app("doctor"), ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["problems"]) == (0, [])
    assert report["native"]["directory"] == str(library_path)
    assert {"CPU", "RPC"} <= set(report["llama"]["backends"])
    (cpu,) = (device for device in report["llama"]["devices"] if device["kind"] == "cpu")
    assert cpu["memory_total"] > 0
    assert report["llama"]["build_info"]["series"] == report["native"]["series"]
    assert report["model"]["embedded"]
    assert any(line.startswith("device: ") for line in report["use"])


def test_the_text_form_has_the_same_facts(library_path: Path) -> None:
    result = CliRunner().invoke(cli.make_app("doctor"), ["doctor"])
    assert result.exit_code == 0, result.output
    assert "nothing keeps the daemon from serving" in result.output
    assert str(library_path) in result.output


def test_a_crashing_driver_does_not_take_the_doctor_down(
    library_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.chdir(tmp_path)
    report = doctor.diagnose(child=lambda directory: machine_facts.ask_llama(directory, "crash"))
    assert any("SIGSEGV" in problem for problem in report["problems"])
    assert report["memory"]["total"] > 0


def test_a_missing_model_and_a_bad_config_are_problems(library_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[model]\npath = "/no/such.gguf"\n')
    result = CliRunner().invoke(cli.make_app("doctor"), ["doctor", "--json", "--config", str(config)])
    assert result.exit_code == 1
    assert "there is no file /no/such.gguf; set model.path" in json.loads(result.stdout)["problems"]
    config.write_text("[engine]\nubatch = 1\n")
    result = CliRunner().invoke(cli.make_app("doctor"), ["doctor", "--json", "--config", str(config)])
    assert json.loads(result.stdout)["problems"][0].startswith("config: engine.ubatch: ")
