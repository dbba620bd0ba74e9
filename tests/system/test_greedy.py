"""Greedy answers are llama.cpp's own: the daemon against what llama-server of the same source answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.daemon_process import Daemon

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "greedy.json").read_text("utf-8"))
EOS = 8191


@pytest.mark.parametrize("case", VECTOR["cases"], ids=lambda case: f"{len(case['prompt'])}-{len(case['answer'])}")
def test_greedy_answers_equal_llama_servers(case: dict[str, list[int]], daemon: Daemon) -> None:
    body = {"prompt": case["prompt"], "temperature": 0, "n_predict": len(case["answer"]), "return_tokens": True}
    answer = daemon.client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    ended = case["answer"][-1] == EOS
    assert answer.json()["tokens"] == case["answer"][: -1 if ended else None]
    assert answer.json()["stop_type"] == ("eos" if ended else "limit")
