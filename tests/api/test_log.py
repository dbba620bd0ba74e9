"""Log lines: their form, their level, and what must never be in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from daemon import log
from daemon.config import LogSection
from tests.api.conftest import Daemon, Start

UNDER_SYSTEMD = {"JOURNAL_STREAM": "8:1234"}


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """Leave logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(form: str, stream: io.StringIO, environ: dict[str, str]) -> str:
    log.setup(LogSection.model_validate({"format": form}), stream, environ)
    structlog.get_logger("x").warning("hello", number=1, text="Grüße")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("form", "stream", "environ", "as_json"),
    [
        ("json", Terminal(), {}, True),
        ("auto", io.StringIO(), UNDER_SYSTEMD, True),
        ("auto", io.StringIO(), {"INVOCATION_ID": "f00"}, True),
        ("auto", io.StringIO(), {}, False),
        ("auto", Terminal(), UNDER_SYSTEMD, False),
        ("console", io.StringIO(), UNDER_SYSTEMD, False),
    ],
)
def test_form(form: str, stream: io.StringIO, environ: dict[str, str], as_json: bool) -> None:
    line = written(form, stream, environ)
    if not as_json:
        assert "hello" in line
        assert not line.startswith("<")
        return
    assert line.startswith("<4>{")
    value = json.loads(line[3:])
    assert (value["event"], value["level"], value["number"], value["text"]) == ("hello", "warning", 1, "Grüße")
    assert value["timestamp"].endswith("Z")


@pytest.mark.parametrize(
    ("method", "prefix"), [("debug", "<7>"), ("info", "<6>"), ("warning", "<4>"), ("error", "<3>")]
)
def test_levels_for_the_journal(method: str, prefix: str) -> None:
    stream = io.StringIO()
    log.setup(LogSection(level="debug", format="json"), stream, {})
    getattr(structlog.get_logger("x"), method)("hello")
    assert stream.getvalue().startswith(prefix)


def test_level_changes_at_once() -> None:
    stream = io.StringIO()
    log.setup(LogSection(level="warning", format="json"), stream, {})
    logger, plain = structlog.get_logger("x"), logging.getLogger("hotset.test")
    logger.info("one")
    plain.info("two")
    log.set_level("info")
    logger.info("three")
    plain.info("four")
    log.set_level("error")
    logger.warning("five")
    assert [json.loads(line[3:])["event"] for line in stream.getvalue().splitlines()] == ["three", "four"]


def test_standard_logging_goes_the_same_way() -> None:
    stream = io.StringIO()
    log.setup(LogSection(format="json"), stream, {})
    log.setup(LogSection(format="json"), stream, {})
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("hotset.test").exception("failed %d times", 3)
    [line] = stream.getvalue().splitlines()
    value = json.loads(line[3:])
    assert (value["event"], value["logger"]) == ("failed 3 times", "hotset.test")
    assert "ValueError: broken" in value["exception"]


def test_tracebacks_show_no_variables() -> None:
    stream = io.StringIO()
    log.setup(LogSection(format="console"), stream, {})
    prompt = "a secret prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        structlog.get_logger("x").exception("failed")
    assert "ValueError" in stream.getvalue()
    assert "secret" not in stream.getvalue()


async def test_one_line_a_request_without_texts_and_keys(start: Start) -> None:
    daemon: Daemon = await start(http={"keys": ["secret-key-1"]})
    stream = io.StringIO()
    log.setup(LogSection(format="json"), stream, {})
    body = {"messages": [{"role": "user", "content": "secret prompt"}], "user": "secret user"}
    headers = {"Authorization": "Bearer secret-key-1"}
    reply = await daemon.post("/v1/chat/completions", body, headers=headers)
    await daemon.get("/v1/secret", headers=headers)
    chat, missing = (json.loads(line[3:]) for line in stream.getvalue().splitlines() if '"request"' in line)
    assert chat["method"] == "POST"
    assert chat["path"] == "/v1/chat/completions"
    assert (chat["status"], chat["outcome"]) == (200, "ok")
    assert chat["id"] == reply.headers["x-request-id"]
    assert chat["n_prompt"] == reply.json()["usage"]["prompt_tokens"]
    assert chat["n_predicted"] > 0
    assert {"queue_ms", "ttft_ms", "total_ms", "client"} <= chat.keys()
    assert (missing["status"], missing["code"], missing["path"]) == (404, "not_found", "unknown")
    assert "secret" not in stream.getvalue()
    assert "Once upon" not in stream.getvalue()


async def test_polling_is_not_worth_a_line(start: Start) -> None:
    stream = io.StringIO()
    daemon = await start()
    log.setup(LogSection(format="json"), stream, {})
    await daemon.get("/health")
    await daemon.get("/nowhere")
    paths = [json.loads(line[3:])["path"] for line in stream.getvalue().splitlines()]
    assert paths == ["unknown"]
    log.set_level("debug")
    await daemon.get("/health")
    assert '"/health"' in stream.getvalue()
