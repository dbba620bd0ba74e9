"""Records what llama-server answers greedily: `record_greedy.py LLAMA_SERVER > tests/vectors/greedy.json`.

llama-server of the same source, unpatched, one sequence, CPU, ubatch 512. An answer is kept up to the first token that
was not clearly the best (less than `MARGIN` nats ahead of the second): beyond it another processor's rounding may
choose differently, and the vector would test the processor. Answers shorter than `SHORTEST` are left out.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tinymoe-41m-Q4_K_M.gguf"
MARGIN = 0.05
SHORTEST = 8
LENGTH = 96


def prompts() -> list[str]:
    """Beginnings of every domain's text, of several lengths, one longer than an ubatch."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "models" / "prompts").glob("*.txt"))]
    return [text[: (120, 400, 900, 3500)[i % 4]] for i, text in enumerate(texts)]


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def clear_part(probabilities: list[dict[str, Any]]) -> list[int]:
    """Token ids up to the first that was not clearly the best."""
    ids = []
    for entry in probabilities:
        first, second = entry["top_logprobs"][:2]
        if first["logprob"] - second["logprob"] < MARGIN or entry["id"] != first["id"]:
            break
        ids.append(entry["id"])
    return ids


def record(port: int) -> list[dict[str, Any]]:
    cases = []
    for prompt in prompts():
        tokens = post(port, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
        body = {"prompt": tokens, "temperature": 0, "n_predict": LENGTH, "n_probs": 2, "cache_prompt": False}
        ids = clear_part(post(port, "/completion", body)["completion_probabilities"])
        if len(ids) >= SHORTEST:
            cases.append({"prompt": tokens, "answer": ids})
    return cases


def main(server: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "-m", str(MODEL), "--port", str(port), "-np", "1", "-c", "4096", "-ub", "512", "-dev", "none"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(3)
        cases = record(port)
    finally:
        process.kill()
    print(json.dumps({"margin_nats": MARGIN, "model": MODEL.name, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
