"""Requests that change their topic, so that experts have a reason to move."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import HotsetError
from hotset_tools.hot_set import PROMPTS

ANSWERS_PER_TOPIC = 6
ANSWER_TOKENS = 192
PROMPT_CHARACTERS = 300
PAUSE_SECONDS = 1.0
_SILENCE_SECONDS = 120.0


class NoTopics(HotsetError):
    """There are no texts to take prompts from."""

    code = "no_topics"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text that the model goes on with."""

    topic: str
    text: str


def topics(directory: Path = PROMPTS) -> dict[str, str]:
    """The texts of a directory by topic, in an order that changes much from one to the next.

    Raises:
        NoTopics: there is none.
    """
    names = sorted(directory.glob("*.txt"))
    texts = {path.stem: path.read_text("utf-8") for path in [*names[::3], *names[1::3], *names[2::3]]}
    if not texts:
        raise NoTopics(f"there are no texts in {directory}")
    return texts


def prompts(texts: dict[str, str]) -> Iterator[Prompt]:
    """For ever: some of one topic, from other places each time, then some of the next."""
    for number in itertools.count():
        for topic, text in texts.items():
            for part in range(ANSWERS_PER_TOPIC):
                start = (number * ANSWERS_PER_TOPIC + part) * PROMPT_CHARACTERS % max(1, len(text) - PROMPT_CHARACTERS)
                yield Prompt(topic, text[start : start + PROMPT_CHARACTERS])


class Traffic:
    """One client in a thread of its own, until `stop`."""

    def __init__(self, url: str, key: str, asked: Iterable[Prompt], say: Callable[[str], None]) -> None:
        self._url, self._key, self._prompts, self._say = f"{url}/v1/completions", key, asked, say
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask nothing more, and give up what is being answered; does not wait, and may be called by signal handlers."""
        self._stopping = True

    def _run(self) -> None:
        topic = ""
        for prompt in self._prompts:
            if prompt.topic != topic:
                topic = prompt.topic
                self._say(f"traffic: {topic}")
            if not self._answered(prompt):
                return

    def _answered(self, prompt: Prompt) -> bool:
        """Ask until there is an answer; False to ask nothing more."""
        while not self._stopping:
            try:
                self._ask(prompt)
                return not self._stopping
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (429, 503):
                        self._say(f"traffic ended: the service answers {error.code} {error.reason}")
                        return False
            except (OSError, http.client.HTTPException):
                pass  # the service is away: it is started again, or about to end
            time.sleep(PAUSE_SECONDS)
        return False

    def _ask(self, prompt: Prompt) -> None:
        """Read the answer as it comes; leaving cancels it."""
        body = {"prompt": prompt.text, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with self._opener.open(request, timeout=_SILENCE_SECONDS) as answer:
            for _ in answer:
                if self._stopping:
                    return
