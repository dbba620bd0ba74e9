"""The benchmarks' plumbing: what they report is there and adds up; how fast it is, is for them to say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from daemon.errors import EngineFailed, ModelUnusable
from daemon.model_files import EMBEDDED_MODEL
from hotset_tools.bench import engine, servers, share, streams
from hotset_tools.bench.clients import Answer, stream_together
from hotset_tools.bench.load import contest
from hotset_tools.bench.load.arms import Workload
from hotset_tools.bench.load.plan import sources
from hotset_tools.bench.load.runner import Patience
from hotset_tools.bench.walks import Walks
from hotset_tools.cli import main
from tests.system.daemon_process import Daemon


def test_engine_reports_overhead_and_sampling(library_path: Path) -> None:
    result = json.loads(json.dumps(engine.run(EMBEDDED_MODEL, n_sequences=3, n_tokens=12).as_json()))
    assert 0 < result["overhead_ms"]["p50"] <= result["overhead_ms"]["p99"]
    assert result["sampling_ms"] > 0
    assert result["n_steps"] >= 11, "the last step is counted after its report"
    assert result["step_ms"]["p50"] >= result["decode_ms"]["p50"] > 0
    assert result["settings"]["n_vocab"] == 8192


def test_engine_command_prints_json(library_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", "--model", str(EMBEDDED_MODEL), "--tokens", "4", "--sequences", "2", "--json"])
    assert ended.value.code == 0
    assert {"overhead_ms", "sampling_ms"} <= json.loads(capsys.readouterr().out).keys()


def test_engine_that_cannot_load_is_an_error(library_path: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnusable, match="cut off"):
        engine.run(tmp_path / "broken.gguf")


def test_a_failed_request_ends_the_benchmark(library_path: Path) -> None:
    with pytest.raises(EngineFailed, match="context"):
        engine.run(EMBEDDED_MODEL, n_sequences=1, n_tokens=5000)


def test_share_keeps_a_real_engine_busy_and_ends_all_of_it(library_path: Path) -> None:
    load = share.Load(n_chats=2, n_prompt=256, seconds=3.0)
    with engine.started(share.configured(EMBEDDED_MODEL, "cpu", "auto", 0, load)) as (pipe, info):
        driver = share.Driver(pipe, Walks(EMBEDDED_MODEL, info.n_vocab, 1), load)
        driver.phase(chats=True, prompts=True)
        assert driver.snapshot is not None
        assert driver.snapshot.prompt_tokens > 0
        assert driver.phase(chats=True, prompts=False).n_prompts == 0, "no prompt of the phase before is left"


def test_clients_count_what_the_server_counted(daemon: Daemon) -> None:
    answers = asyncio.run(stream_together(daemon.port, 3, 7, 0))
    assert [answer.n_tokens for answer in answers] == [7, 7, 7]
    assert all(0 < answer.first <= answer.last for answer in answers)


def test_clients_report_an_error_of_the_server(daemon: Daemon) -> None:
    with pytest.raises(RuntimeError, match="400"):
        asyncio.run(stream_together(daemon.port, 1, -5, 0))


def test_rounds_are_paired() -> None:
    ours = streams._arm("a", [[Answer(10, 0.1, 1.0), Answer(10, 0.2, 2.0)], [Answer(10, 0.1, 1.0)]])
    peer = streams._arm("b", [[Answer(20, 0.1, 1.0)], [Answer(5, 0.3, 1.0)]])
    assert ours.rates == (10.0, 10.0)
    run = streams.StreamsRun("m", 2, 10, ours, peer)
    assert run.ratios == (0.5, 2.0)
    assert run.ratio == 1.25
    result = run.as_json()
    assert (result["ratio"], result["ratios"]) == (1.25, [0.5, 2.0])
    assert "1.250 (0.500-2.000, rounds: 2)" in streams.table(run)


def test_a_missing_peer_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_CACHE", str(tmp_path))
    peer = servers.llama_server(EMBEDDED_MODEL, 1, 100, tmp_path / "server.log")
    with pytest.raises(servers.PeerMissing, match="--peer"), peer:
        pass


def test_load_compares_servers_of_its_own(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-server is not built where tests run: a second hotsetd stands in for it."""

    def stand_in(model: Path, n_sequences: int, n_ctx: int, log: Path, *, batch: int, ubatch: int) -> contest.Making:
        return servers.hotsetd(model, n_sequences, n_ctx, log)

    monkeypatch.setattr(servers, "llama_server", stand_in)
    monkeypatch.setattr(servers, "peer_directory", Path)
    monkeypatch.setattr(contest, "PEER_SIZES", ((64, 32),))
    workload = Workload(sources("office", 4), 2, n_rounds=2, speed=4.0, burst_seconds=1.0)
    run = contest.run(EMBEDDED_MODEL, workload, Patience(), lambda _: None)
    result = json.loads(json.dumps(run.as_json()))
    ours, peer = result["ours"], result["peers"][0]
    assert (peer["name"], peer["settings"]["ub"]) == ("llama-server 64/32", 32)
    assert result["notes"] == [] or all("others used" in note or "late" in note for note in result["notes"])
    assert ours["prompt_tokens"] == peer["prompt_tokens"] > 4000 * 0.97
    assert ours["output_tokens"] == peer["output_tokens"]
    assert all(kind["whole"] == kind["sent"] for one in (ours, peer) for kind in one["kinds"].values())
    assert ours["others_cpu"] is not None
    assert result["ratios"]["throughput"] > 0


def test_load_says_that_the_peer_is_missing_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_CACHE", str(tmp_path))
    monkeypatch.setattr(servers, "hotsetd", None)
    with pytest.raises(servers.PeerMissing, match="--peer"):
        contest.run(EMBEDDED_MODEL, Workload(sources("chats", 1), 1), Patience(), lambda _: None)


def test_a_server_that_does_not_start_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(servers.HotsetError, match="no such thing"):
        with servers._running(["sh", "-c", "echo no such thing; exit 3"], {}, 1, tmp_path / "server.log", tmp_path):
            pass
