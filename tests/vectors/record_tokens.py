"""Record the token ids of the embedded model's prompts: `record_tokens.py SERVER MODEL PROMPTS`.

SERVER is a llama-server of the unpatched source that the project builds from, PROMPTS the directory beside the model.
For every text the number of ids and the SHA-256 of their decimal, comma-separated list are written to `tokens.json`:
of each .txt file as plain text, and of each chat of chat.jsonl rendered by the server and tokenised as it does.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from record_templates import HERE, post, running, write


def main(arguments: list[str]) -> None:
    """Record; see the module's text."""
    server, model, prompts = arguments
    with running(server, model, []) as url:
        texts = {path.name: plain(url, path) for path in sorted(Path(prompts).glob("*.txt"))}
        lines = Path(prompts, "chat.jsonl").read_text("utf-8").splitlines()
        chats = [chat(url, json.loads(line)["messages"]) for line in lines]
    write(HERE / "tokens.json", {"texts": texts, "chats": chats})


def plain(url: str, path: Path) -> dict[str, Any]:
    """A file's ids, nothing added and nothing special."""
    content = path.read_bytes().decode("utf-8")
    return summary(post(f"{url}/tokenize", {"content": content, "add_special": False, "parse_special": False}))


def chat(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The ids of a chat's prompt."""
    text = post(f"{url}/apply-template", {"messages": messages})["prompt"]
    return summary(post(f"{url}/tokenize", {"content": text, "add_special": True, "parse_special": True}))


def summary(answer: dict[str, Any]) -> dict[str, Any]:
    """Number and hash of the ids."""
    ids = answer["tokens"]
    return {"n": len(ids), "sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()}


if __name__ == "__main__":
    main(sys.argv[1:])
