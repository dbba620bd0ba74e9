"""The child that counts: `python -m hotset_tools.hot_set.counting` reads a `Job` and writes reports, one a line.

Where the job names a file for them it also keeps every selection, in the order of the texts.

Texts are decoded as if the model had written them: each step computes the next token of up to eight texts. A prompt
would be read in wide steps, which take other paths and never wait for an expert; how often the model uses an expert
while it writes is what a hot set is for. Answers of the model itself would do as well, but cost the same steps and
show only what it writes from these prompts.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.errors import HotsetError
from daemon.model_files import load_command
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Reason, Residency, State

N_SEQUENCES = 8
"""Steps up to this width are decode steps for every backend."""

_REPORT_STEPS = 16

Place = tuple[int, int]
"""Which text, and which of its tokens."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Job(_Message):
    """What to count: at most `tokens` of each text. `ids` is a file for every selection, "": they are only counted."""

    model: str
    texts: list[str]
    tokens: int
    device: str
    threads: int
    ids: str = ""


class Progress(_Message):
    """Tokens."""

    kind: Literal["progress"] = "progress"
    done: int
    total: int


class LayerCounts(_Message):
    """How often each expert was selected; `set` tells the sets of one layer apart."""

    layer: int
    set: int
    counts: list[int]


class Counted(_Message):
    """The end. `tokens` of all texts, `lengths` those of each.

    The file of the job, if it names one, is an array of numpy's (.npy): uint16 [tokens, layers, top_k].
    """

    kind: Literal["counted"] = "counted"
    tokens: int
    lengths: list[int]
    layers: list[LayerCounts]


class NoDevice(_Message):
    """`device` gives the CPU only, where nothing can be counted."""

    kind: Literal["no_device"] = "no_device"


class Refused(_Message):
    """Nothing can be counted."""

    kind: Literal["refused"] = "refused"
    message: str


REPORT: TypeAdapter[Progress | Counted | NoDevice | Refused] = TypeAdapter(
    Annotated[Progress | Counted | NoDevice | Refused, Field(discriminator="kind")]
)


def main() -> None:
    """Do the job of standard input. What the library prints goes to stderr: stdout is for reports alone."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(report: BaseModel) -> None:
        print(report.model_dump_json(), file=reports, flush=True)

    try:
        say(run(Job.model_validate_json(sys.stdin.buffer.read()), say))
    except HotsetError as error:
        say(Refused(message=error.message))


def run(job: Job, tell: Callable[[Progress], None]) -> Counted | NoDevice | Refused:
    """Count over all texts."""
    context = min(job.tokens, 4096)
    engine = {"device": job.device, "threads": job.threads, "max_sequences": N_SEQUENCES, "ubatch": 32, "repack": False}
    engine["kv_cells"] = N_SEQUENCES * context
    sections = {"model": {"path": job.model, "context": context}, "engine": engine, "residency": {"enabled": False}}
    config = Config.model_validate(sections)
    with Loaded(load_command(config), lambda _: None) as loaded:
        if not loaded.model.devices:
            return NoDevice()
        with Residency(loaded.context.pointer) as residency:
            residency.set_state(State.COUNT)
            declined = [layer for layer in residency.layers() if layer.reason != Reason.MANAGED]
            if declined:
                numbers = ", ".join(str(layer.il) for layer in declined)
                return Refused(message=f"layers {numbers} cannot be counted: {declined[0].reason.name.lower()}")
            vocab = loaded.vocab
            whole = (vocab.tokenize(text, add_special=True, parse_special=True) for text in job.texts)
            texts = [tokens[: job.tokens] for tokens in whole]
            pieces = [piece for tokens in texts for piece in _pieces(tokens, context)]
            recorder = Recorder(residency, list(map(len, pieces))) if job.ids else None
            n_tokens = decode(loaded.context, pieces, tell, recorder or _forget)
            if recorder is not None:
                np.save(job.ids, recorder.ids)
            return Counted(tokens=n_tokens, lengths=list(map(len, texts)), layers=list(_layers(residency)))


class Recorder:
    """Keeps what the router chose: `ids` is [tokens, layers, top_k], tokens in the order of the texts.

    Raises:
        HotsetError: layers select different numbers of experts.
    """

    def __init__(self, residency: Residency, lengths: Sequence[int]) -> None:
        self._residency = residency
        self._starts = np.cumsum([0, *lengths])
        used = {layer.n_expert_used for layer in residency.layers()}
        if len(used) != 1:
            raise HotsetError(f"layers that select {sorted(used)} experts cannot stand in one recording")
        self.ids: npt.NDArray[np.uint16] = np.zeros((self._starts[-1], residency.n_layers, *used), np.uint16)

    def __call__(self, places: Sequence[Place]) -> None:
        """A step of these tokens was computed."""
        rows = [self._starts[text] + position for text, position in places]
        for index in range(self._residency.n_layers):
            self.ids[rows, index] = self._residency.router_ids(index, len(rows))


def _forget(_: Sequence[Place]) -> None:
    """Counting alone needs no places."""


def _pieces(tokens: list[int], length: int) -> Iterator[list[int]]:
    return (tokens[start : start + length] for start in range(0, len(tokens), length))


def decode(
    context: Context,
    texts: Iterable[list[int]],
    tell: Callable[[Progress], None],
    computed: Callable[[Sequence[Place]], None] = _forget,
) -> int:
    """Decode all texts, one token of each of up to `N_SEQUENCES` a step; the number of tokens.

    `computed` is called after each step. Every row asks for logits: what no output needs is not computed in the last
    layer, nor counted.

    Raises:
        HotsetError: llama.cpp could not compute a step.
    """
    waiting = deque((number, text) for number, text in enumerate(texts) if text)
    total = sum(len(text) for _, text in waiting)
    running: dict[int, tuple[int, list[int], int]] = {}
    done = n_steps = 0
    while waiting or running:
        for seq_id in range(N_SEQUENCES):
            if seq_id not in running and waiting:
                running[seq_id] = (*waiting.popleft(), 0)
        rows = [(text[at], at, seq_id, True) for seq_id, (_, text, at) in running.items()]
        code = context.decode(rows)
        if code != DECODED:
            raise HotsetError(f"llama.cpp could not compute a step (code {code})")
        context.synchronize()
        computed([(number, at) for number, _, at in running.values()])
        done += len(rows)
        for seq_id, (number, text, at) in list(running.items()):
            running[seq_id] = (number, text, at + 1)
            if at + 1 == len(text):
                del running[seq_id]
                context.remove(seq_id)
        n_steps += 1
        if n_steps % _REPORT_STEPS == 0:
            tell(Progress(done=done, total=total))
    tell(Progress(done=done, total=total))
    return done


def _layers(residency: Residency) -> Iterator[LayerCounts]:
    seen: Counter[int] = Counter()
    for layer in residency.layers():
        counts = [int(count) for count in residency.counts(layer.index)]
        yield LayerCounts(layer=layer.il, set=seen[layer.il], counts=counts)
        seen[layer.il] += 1


if __name__ == "__main__":
    main()
