"""Record what llama-server makes of every chat template: `record_templates.py SERVER MODEL TEMPLATES [NAME...]`.

SERVER is a llama-server of the unpatched source that the project builds from, MODEL any GGUF (its BOS and EOS texts are
recorded with the prompts), TEMPLATES the directory of .jinja files of the same source. One file per template is written
beside this script. Templates outside `FAMILIES` are recorded as SHA-256 of each text, to keep the repository small;
with NAMEs only those are recorded, in full, to standard output.

Templates that print the date get the date of the recording. The only change made to what the server said: today's date,
in the formats that the template names, is replaced by `CLOCK`'s.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "templates"
CLOCK = datetime.datetime(2024, 3, 5, 14, 7, 9)
FAMILIES = (
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6",
    "LFM2-8B-A1B",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-4.0",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
)


def main(arguments: list[str]) -> None:
    """Record; see the module's text."""
    server, model, directory, *names = arguments
    cases = json.loads((HERE / "cases.json").read_text("utf-8"))
    sources = {path.stem: path for path in sorted(Path(directory).glob("*.jinja"))}
    if names:
        print(json.dumps({name: record(server, model, sources[name], cases) for name in names}, ensure_ascii=False))
        return
    OUT.mkdir(exist_ok=True)
    others: dict[str, Any] = {}
    for name, path in sources.items():
        vector = record(server, model, path, cases)
        if name in FAMILIES:
            write(OUT / f"{name}.json", vector)
        else:
            others[name] = vector | {"cases": {case: digest(answer) for case, answer in vector["cases"].items()}}
        print(name, file=sys.stderr)
    write(OUT / "embedded.json", record(server, model, None, cases))
    write(HERE / "other_templates.json", others)


def write(path: Path, value: object) -> None:
    """One JSON file, stable under repetition."""
    path.write_text(json.dumps(value, ensure_ascii=True, indent=1, sort_keys=True) + "\n", "utf-8")


def digest(answer: dict[str, str]) -> dict[str, str]:
    """A recorded text as its SHA-256; errors stay as they are."""
    if "text" not in answer:
        return answer
    return {"sha256": hashlib.sha256(answer["text"].encode()).hexdigest()}


def record(server: str, model: str, template: Path | None, cases: dict[str, Any]) -> dict[str, Any]:
    """What the server answers to every case, with what is needed to repeat it."""
    source = "" if template is None else template.read_text("utf-8")
    option = [] if template is None else ["--chat-template-file", str(template)]
    today = datetime.datetime.now()
    with running(server, model, option) as url:
        properties = post(f"{url}/props", None)
        answers = {name: prompt(url, case) for name, case in cases.items()}
    for answer in answers.values():
        if "text" in answer:
            answer["text"] = redate(answer["text"], source, today)
    return {
        "source_sha256": hashlib.sha256(source.encode()).hexdigest() if source else None,
        "bos_token": properties["bos_token"],
        "eos_token": properties["eos_token"],
        "cases": answers,
    }


def redate(text: str, source: str, today: datetime.datetime) -> str:
    """`text` with today's date replaced by `CLOCK`'s, in the formats that the source uses."""
    formats = re.findall(r"strftime_now\(\s*[\"'](.*?)[\"']", source)
    formats += [fmt for name, fmt in (("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")) if name in source]
    for fmt in sorted(formats, key=len, reverse=True):
        text = text.replace(today.strftime(fmt), CLOCK.strftime(fmt))
    return text


def prompt(url: str, case: dict[str, Any]) -> dict[str, str]:
    """One rendering, or the error that the server gave instead."""
    try:
        return {"text": post(f"{url}/apply-template", case)["prompt"]}
    except urllib.error.HTTPError as error:
        return {"error": json.load(error)["error"]["message"].strip().splitlines()[-1][:200]}


def post(url: str, body: object) -> Any:
    """JSON in (None: GET), JSON out."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextlib.contextmanager
def running(server: str, model: str, option: list[str]) -> Iterator[str]:
    """A llama-server that answers, as its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "-m", model, "--jinja", *option, "--port", str(port), "-c", "512", "-np", "1", "--no-warmup"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(Path(server).parent)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server is ready.

    Raises:
        RuntimeError: it ended, or took a minute.
    """
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            post(f"{url}/health", None)
            return
        time.sleep(0.1)
    raise RuntimeError("the server does not answer")


if __name__ == "__main__":
    main(sys.argv[1:])
