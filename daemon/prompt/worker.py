"""What runs in the processes of the text pool: one vocabulary, one template, one job at a time.

A job may raise any `HotsetError`; it is stopped after its time with `TemplateFailed`, and asks in vain for more memory
than it may have. What neither stops (C code that does not return) is ended by the parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from daemon.errors import TemplateFailed
from daemon.messages import Message
from daemon.native import gguf_check
from daemon.native.vocab import Vocab
from daemon.prompt.template import ChatPrompt, Template
from daemon.prompt.tokens import PromptTokens

T = TypeVar("T")
NO_TEMPLATE = "The model has no chat template; set model.chat_template to a file with one."


class Prompt(Message):
    """A prompt, ready to be computed."""

    tokens: list[int]
    text: str


class VocabInfo(Message):
    """What the service needs to know about the vocabulary; `template_error` says why chats cannot work, if so."""

    n_vocab: int
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    bos_token: str
    eos_token: str
    chat_template: str
    vocab_type: str
    template_error: str = ""
    model: str = ""
    """Fingerprint of the model that it is from."""
    vocabulary: str = ""
    """The same where token ids mean the same."""


class _TimeUp(BaseException):
    """The alarm of a job; no `except Exception` of a library stops it."""


class Desk:
    """Everything a worker keeps between jobs."""

    def __init__(self, vocab: Vocab, template_source: str | None, timeout: float) -> None:
        self.vocab = vocab
        self.timeout = timeout
        self.tokens = PromptTokens(vocab)
        self.source = template_source if template_source is not None else (vocab.chat_template() or "")
        named = None if template_source is not None else vocab.chat_template("tool_use")
        self._sources = {False: self.source, True: named or self.source}
        self._templates: dict[str, Template] = {}

    def template(self, with_tools: bool) -> Template:
        """The compiled template, the one for tools where the model has two.

        Raises:
            TemplateFailed: there is none, or it is broken.
        """
        source = self._sources[with_tools]
        if not source:
            raise TemplateFailed(NO_TEMPLATE)
        if source not in self._templates:
            self._templates[source] = Template(
                source,
                bos_token=self.token_text(self.vocab.bos),
                eos_token=self.token_text(self.vocab.eos),
                add_bos=self.vocab.add_bos,
                add_eos=self.vocab.add_eos,
            )
        return self._templates[source]

    def token_text(self, token: int | None) -> str:
        """How a token is written in templates; "" for none."""
        return "" if token is None else self.vocab.piece(token, special=True).decode("utf-8", "replace")


_desk: Desk | None = None
_open = contextlib.ExitStack()


def begin() -> None:
    """First thing in a new process: leave signals and core dumps to others, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _alarm)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml would start a debugger, which prints what is on the stack
    _end_with_parent()


def open_vocab(model: Path, template_source: str | None, timeout: float, memory_mib: int) -> VocabInfo:
    """Check the file, load its vocabulary, limit memory to `memory_mib` more than that took, try the template.

    Raises:
        ModelUnusable: as `gguf_check.check` and `Vocab.open`.
    """
    global _desk
    file = gguf_check.check(model)
    vocab = _open.enter_context(Vocab.open(model))
    _desk = Desk(vocab, template_source, timeout)
    ceiling = _address_space() + memory_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    return VocabInfo(
        n_vocab=vocab.n_tokens,
        bos=vocab.bos,
        eos=vocab.eos,
        add_bos=vocab.add_bos,
        add_eos=vocab.add_eos,
        bos_token=_desk.token_text(vocab.bos),
        eos_token=_desk.token_text(vocab.eos),
        chat_template=_desk.source,
        vocab_type=vocab.type,
        template_error=_template_error(),
        model=file.fingerprint,
        vocabulary=file.vocabulary,
    )


def chat(prompt: ChatPrompt) -> Prompt:
    """Render and tokenise; the text is without marks."""

    def job(desk: Desk) -> Prompt:
        text, mark = desk.template(bool(prompt.tools)).render_marked(prompt, desk.tokens.guard)
        return Prompt(tokens=desk.tokens.of(text, mark), text=text.replace(mark, ""))

    return _timed(job)


def render(prompt: ChatPrompt) -> str:
    """Render only."""

    def job(desk: Desk) -> str:
        text, mark = desk.template(bool(prompt.tools)).render_marked(prompt, desk.tokens.guard)
        return text.replace(mark, "")

    return _timed(job)


def tokenize(text: str, add_special: bool, parse_special: bool) -> list[int]:
    """As `Vocab.tokenize`."""
    return _timed(lambda desk: desk.vocab.tokenize(text, add_special=add_special, parse_special=parse_special))


def pieces(ids: list[int]) -> list[bytes]:
    """As `Vocab.pieces`."""
    return _timed(lambda desk: desk.vocab.pieces(ids))


def detokenize(ids: list[int]) -> str:
    """As `Vocab.detokenize`."""
    return _timed(lambda desk: desk.vocab.detokenize(ids))


def _timed(job: Callable[[Desk], T]) -> T:
    assert _desk is not None
    try:
        with _alarm_after(_desk.timeout):
            return job(_desk)
    except _TimeUp:
        raise TemplateFailed(f"The text took longer than text.timeout_seconds ({_desk.timeout:g} s).") from None
    except MemoryError:
        raise TemplateFailed("The text took more memory than text.memory_mib allows.") from None


@contextlib.contextmanager
def _alarm_after(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TimeUp


def _template_error() -> str:
    """Why no chat can be rendered, "" when one can.

    A template that fails here may still serve other chats, so only what is wrong with the template itself counts.
    """
    try:
        _timed(lambda desk: desk.template(False))
    except TemplateFailed as error:
        return error.message
    return ""


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _end_with_parent() -> None:
    """Let the kernel end this process when the parent's end of its pipe closes, whatever runs here then.

    A thread that watches would need the interpreter lock, which a template's arithmetic can hold for hours.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("a worker has a parent")
    pipe: Any = parent.sentinel
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os._exit(0)
