"""The text pool with real workers: right answers, and nothing that a text or a template does harms the next request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.errors import BadRequest, ModelUnusable, QueueFull, TemplateFailed
from daemon.native import gguf_check
from daemon.prompt import pool as module
from daemon.prompt.pool import ChatPrompt, PoolClosed, TextPool

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tinymoe-41m-Q4_K_M.gguf"
HELLO = ChatPrompt(messages=[{"role": "user", "content": "hello"}])
Start = Callable[..., Awaitable[TextPool]]

pytestmark = pytest.mark.usefixtures("library_path")


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts pools, and closes them after the test."""
    pools: list[TextPool] = []

    async def begin(template: str | None = None, **options: Any) -> TextPool:
        file = None
        if template is not None:
            file = tmp_path / "template.jinja"
            file.write_text(template, "utf-8")
        sizes = {"workers": 1, "timeout": 20.0, "memory_mib": 256} | options
        pools.append(TextPool(MODEL, template_file=file, **sizes))
        await pools[-1].start()
        return pools[-1]

    yield begin
    for pool in pools:
        await pool.close()


def workers() -> list[psutil.Process]:
    """Children that are workers of a pool, not Python's own resource tracker."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "multiprocessing.spawn" in " ".join(_command(child))
    ]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def summary(ids: list[int]) -> dict[str, Any]:
    return {"n": len(ids), "sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()}


async def test_what_the_service_is_told_about_the_vocabulary(start: Start) -> None:
    info = (await start()).info
    assert (info.n_vocab, info.bos, info.eos, info.add_bos, info.add_eos) == (8192, 8189, 8191, False, False)
    assert (info.bos_token, info.eos_token, info.vocab_type) == ("<|endoftext|>", "<|im_end|>", "bpe")
    assert "<|im_start|>" in info.chat_template
    assert info.template_error == ""
    file = gguf_check.check(MODEL)
    assert (info.model, info.vocabulary) == (file.fingerprint, file.vocabulary)


async def test_ids_are_those_of_llama_server(start: Start) -> None:
    recorded = json.loads((ROOT / "tests" / "vectors" / "tokens.json").read_text("utf-8"))
    pool = await start()
    prompts = ROOT / "models" / "prompts"
    assert sorted(recorded["texts"]) == sorted(path.name for path in prompts.glob("*.txt"))
    for name, wanted in recorded["texts"].items():
        text = (prompts / name).read_bytes().decode("utf-8")
        ids = await pool.tokenize(text, add_special=False, parse_special=False)
        assert summary(ids) == wanted, name
        assert await pool.detokenize(ids) == text
    lines = (prompts / "chat.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == len(recorded["chats"]) > 0
    for line, wanted in zip(lines, recorded["chats"], strict=True):
        prompt = await pool.chat(ChatPrompt(messages=json.loads(line)["messages"]))
        assert summary(prompt.tokens) == wanted
        assert await pool.detokenize(prompt.tokens) == prompt.text


async def test_pieces_and_errors_come_back(start: Start) -> None:
    pool = await start()
    assert await pool.pieces([8190, 8191]) == [b"<|im_start|>", b"<|im_end|>"]
    assert await pool.render(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(BadRequest, match="no token 8192"):
        await pool.detokenize([8192])
    with pytest.raises(BadRequest, match="surrogate"):
        await pool.tokenize("\ud800", add_special=False, parse_special=False)
    with pytest.raises(BadRequest) as caught:
        await pool.chat(ChatPrompt(messages=[{"role": "nobody"}]))
    assert caught.value.param == "messages[0].role"


async def test_a_template_file_replaces_the_models(start: Start) -> None:
    pool = await start("[{{ messages[0].content }}]")
    assert (await pool.chat(HELLO)).text == "[hello]"
    assert pool.info.chat_template == "[{{ messages[0].content }}]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took longer"),
        ("{{ 7 ** (77777777 * messages|length) }}", "took longer"),
        ("{{ 'a' * (10 ** 10 * messages|length) }}", "memory"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ ('a' * 1000) | list | join('b' * 10 ** 6 * messages|length) }}", "memory"),
        ("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than"),
        ("{{ 'a' * (200_000_000 * messages|length) }}", "more than|memory"),
        ("{{ range(10 ** 12) | list }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
async def test_a_template_without_end_fails_its_request_only(start: Start, template: str, message: str) -> None:
    condition = f"{{% if messages[0].content == 'bomb' %}}{template}{{% else %}}fine{{% endif %}}"
    pool = await start(condition, timeout=1.0)
    before = [worker.pid for worker in workers()]
    if not pool.info.template_error:
        assert (await pool.chat(HELLO)).text == "fine"
    with pytest.raises(TemplateFailed, match=message):
        await pool.chat(ChatPrompt(messages=[{"role": "user", "content": "bomb"}]))
    assert await pool.tokenize("a", add_special=False, parse_special=False) == [64]
    assert [worker.pid for worker in workers()] == before


async def test_huge_texts_are_tokenised_or_refused_and_the_next_request_is_served(start: Start) -> None:
    pool = await start(memory_mib=256)
    huge = "x" * 64_000_000  # twice what a request's body may be
    with pytest.raises(TemplateFailed):
        await pool.chat(ChatPrompt(messages=[{"role": "user", "content": huge}]))
    assert (await pool.chat(HELLO)).tokens


async def test_c_code_that_does_not_return_is_killed_and_the_next_request_served(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    pool = await start(timeout=0.5)
    (before,) = workers()
    stuck = asyncio.ensure_future(pool._do(time.sleep, 1000.0))  # nobody set the alarm: only the parent can end it
    waiting = asyncio.ensure_future(pool.chat(HELLO))
    with pytest.raises(TemplateFailed, match="had to be killed"):
        await stuck
    assert (await waiting).tokens
    (after,) = workers()
    assert after.pid != before.pid


@pytest.mark.parametrize("idle", [True, False])
async def test_a_worker_killed_from_outside_costs_no_request(start: Start, idle: bool) -> None:
    pool = await start(workers=2)
    messages = [{"role": "user", "content": "word " * 50_000}]
    jobs = [asyncio.ensure_future(pool.chat(ChatPrompt(messages=messages))) for _ in range(0 if idle else 6)]
    await asyncio.sleep(0)
    for worker in workers():
        worker.kill()
        if idle:
            worker.wait()
    jobs += [asyncio.ensure_future(pool.chat(ChatPrompt(messages=messages))) for _ in range(6)]
    results = await asyncio.gather(*jobs)
    assert len({len(result.tokens) for result in results}) == 1
    assert len(workers()) <= 2


async def test_a_job_that_kills_its_worker_twice_fails_alone(start: Start) -> None:
    pool = await start()
    with pytest.raises(TemplateFailed, match="ended twice"):
        await pool._do(os.abort)
    assert (await pool.chat(HELLO)).tokens


async def test_a_worker_that_aborts_starts_no_debugger(start: Start) -> None:
    """One would hold the request up, and print its text."""
    assert await (await start())._do(os.getenv, "GGML_NO_BACKTRACE") == "1"


async def test_a_caller_that_leaves_disturbs_nobody(start: Start) -> None:
    pool = await start()
    for _ in range(20):
        leaving = asyncio.ensure_future(pool.chat(HELLO))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert (await pool.chat(HELLO)).tokens


async def test_the_job_of_a_caller_that_left_before_its_turn_is_never_begun(start: Start, tmp_path: Path) -> None:
    pool = await start()
    first = asyncio.ensure_future(pool._do(time.sleep, 0.2))
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(pool._do((tmp_path / "begun").touch))
    await asyncio.sleep(0)
    leaving.cancel()
    await first
    assert (await pool.chat(HELLO)).tokens
    assert not (tmp_path / "begun").exists()


async def test_the_event_loop_runs_while_workers_start_and_work(start: Start) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    heart = asyncio.ensure_future(beat())
    pool = await start()
    during_start, beats = beats, 0
    await pool.tokenize("many words " * 300_000, add_special=False, parse_special=False)
    heart.cancel()
    assert during_start > 5
    assert beats > 5


async def test_too_many_waiting_texts_are_refused_and_the_others_served(start: Start) -> None:
    pool = await start(max_waiting=2)
    running = asyncio.ensure_future(pool._do(time.sleep, 0.5))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(pool.tokenize("x", add_special=False, parse_special=False)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await pool.tokenize("x", add_special=False, parse_special=False)
    assert refused.value.retry_after == 20
    await running
    assert [await each for each in waiting] == [await pool.tokenize("x", add_special=False, parse_special=False)] * 2


async def test_closing_leaves_no_process_and_fails_what_waits(start: Start) -> None:
    pool = await start(workers=2)
    running = [asyncio.ensure_future(pool._do(time.sleep, 1000.0)) for _ in range(4)]
    await asyncio.sleep(0)
    await pool.close()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [PoolClosed] * 4
    assert workers() == []
    with pytest.raises(PoolClosed):
        await pool.chat(HELLO)
    await pool.close()


async def test_files_that_cannot_be_used_are_told_at_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_text("no model")
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"\xff\xfe")
    for model, template, message in (
        (broken, None, "not a GGUF file"),
        (tmp_path / "none.gguf", None, "No such file"),
        (MODEL, binary, "chat_template"),
        (MODEL, tmp_path / "none.jinja", "chat_template"),
    ):
        pool = TextPool(model, workers=2, timeout=5, memory_mib=256, template_file=template)
        with pytest.raises(ModelUnusable, match=message):
            await pool.start()
        await pool.close()
    assert workers() == []


async def test_a_broken_template_leaves_everything_but_chats(start: Start) -> None:
    pool = await start("{% if %}")
    assert "line 1" in pool.info.template_error
    with pytest.raises(TemplateFailed, match="line 1"):
        await pool.chat(HELLO)
    assert await pool.tokenize("a", add_special=False, parse_special=False) == [64]


PARENT = """
import asyncio, sys
from pathlib import Path
from daemon.prompt.pool import TextPool

async def main():
    pool = TextPool(Path(sys.argv[1]), workers=2, timeout=100, memory_mib=256, template_file=None)
    await pool.start()
    jobs = [asyncio.ensure_future(pool._do(pow, 7, 10 ** 9))]
    await asyncio.sleep(0)
    print("ready", flush=True)
    await asyncio.gather(*jobs)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workers_end_with_a_parent_that_is_killed_even_while_they_hold_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), str(MODEL)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        ours = [child for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]
        assert len(ours) == 2
        while all(child.cpu_percent(interval=0.1) < 50 for child in ours):
            pass  # the sum has not begun yet
        parent.kill()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert len(gone) == len(children)
    assert alive == []


async def test_workers_leave_an_interrupt_from_the_terminal_to_the_service(start: Start) -> None:
    pool = await start()
    (worker,) = workers()
    worker.send_signal(signal.SIGINT)
    assert (await pool.chat(HELLO)).tokens
    assert [w.pid for w in workers()] == [worker.pid]
