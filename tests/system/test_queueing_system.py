"""Classes, newest wins, and limits of a client through the real service and the real engine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.system.daemon_process import Daemon, eventually, running

CHATS = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Tell a long story."}], "ignore_eos": True}
TYPED = {"prompt": "Once upon", "max_tokens": 200, "prompt_cache_key": "a.txt", "ignore_eos": True}


class Asking(threading.Thread):
    """One request that waits for its whole answer."""

    def __init__(self, daemon: Daemon, path: str = CHATS, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.body = daemon.url + path, fields
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.reply = httpx.post(self.url, json=self.body, timeout=120)

    def json(self) -> Any:
        self.join(120)
        assert self.reply is not None
        return self.reply.json()


def waiting(daemon: Daemon) -> list[Any]:
    return [slot for slot in daemon.client.get("/slots").json() if slot.get("phase") == "waiting"]


def runs(daemon: Daemon) -> bool:
    """Whether the engine has got one."""
    return "hotset_running 1.0" in daemon.client.get("/metrics").text.splitlines()


def test_an_interactive_answer_is_given_while_background_ones_take_every_place(
    tmp_path: Path, library_path: Path
) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1") as daemon:
        slow = Asking(daemon, **CHAT, max_tokens=400, service_tier="flex")
        eventually(lambda: runs(daemon), "the background one runs")
        quick = Asking(daemon, **CHAT, max_tokens=5, service_tier="priority").json()
        assert (quick["usage"]["completion_tokens"], quick["timings"]["priority"]) == (5, "interactive")
        assert slow.reply is None, "it goes on afterwards"
        assert slow.json()["usage"]["completion_tokens"] == 400


def test_what_waits_survives_an_engine_and_starts_in_the_order_of_classes(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1", ENGINE_RESTART_DELAY_SECONDS="0.2") as daemon:
        lost = Asking(daemon, **CHAT, max_tokens=3000)
        eventually(lambda: runs(daemon), "the first one runs")
        queued = []
        for number, tier in enumerate(("flex", "default", "priority")):
            queued.append(Asking(daemon, **CHAT, max_tokens=20, service_tier=tier))
            eventually(lambda n=number: len(waiting(daemon)) == n + 1, "it is queued")  # type: ignore[misc]
        queue = waiting(daemon)
        assert [slot["priority"] for slot in queue] == ["interactive", "normal", "background"]
        assert [slot["position"] for slot in queue] == [1, 2, 3]
        daemon.engine().send_signal(signal.SIGKILL)
        assert lost.json()["error"]["code"] == "engine_failed"
        times = [asking.json()["timings"] for asking in queued]
        assert [one["predicted_n"] for one in times] == [20] * 3
        background, normal, interactive = [one["queue_ms"] for one in times]
        assert interactive < normal < background


def test_a_newer_autocompletion_ends_the_older_one_and_a_limit_that_is_lowered_refuses(
    tmp_path: Path, library_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[engine]\nmax_sequences = 1\n")
    with running(tmp_path, str(config)) as daemon:
        older = Asking(daemon, "/v1/completions", **TYPED | {"max_tokens": 256})
        eventually(lambda: runs(daemon), "the older one runs")
        newer = Asking(daemon, "/v1/completions", **TYPED | {"max_tokens": 10}).json()
        ended = older.json()
        assert (ended["timings"]["cancelled"], newer["timings"]["cancelled"]) == (True, False)
        assert newer["usage"]["completion_tokens"] == 10

        with httpx.stream("POST", daemon.url + CHATS, json=CHAT | {"max_tokens": 3500, "stream": True}):
            eventually(lambda: runs(daemon), "one runs")
            second = Asking(daemon, **CHAT, max_tokens=5)
            eventually(lambda: bool(waiting(daemon)), "one waits")
            config.write_text("[engine]\nmax_sequences = 1\n[queue]\nclient_waiting = 1\n")
            eventually(lambda: "queue.client_waiting" in daemon.output(), "the new limit is in force")
            refused = daemon.client.post(CHATS, json=CHAT | {"max_tokens": 5})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert second.json()["usage"]["completion_tokens"] == 5
