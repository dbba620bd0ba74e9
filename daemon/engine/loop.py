"""The engine's loop: commands in, one decode call a step, one message out.

One thread owns the llama.cpp context and every sequence; nothing here is locked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from daemon.engine import sampling
from daemon.engine.logprobs import token_logprob
from daemon.engine.ports import DECODED, NO_CELLS, ContextPort, IdlePort, PipePort, ResidencyPort, VocabPort
from daemon.engine.recorder import Recorder
from daemon.engine.roster import Limits, Roster
from daemon.engine.scheduler import Scheduler, StepPlan, Work
from daemon.engine.sequence import Sequence
from daemon.engine.stops import TextOut
from daemon.engine.times import TimeLog
from daemon.messages import (
    COMMAND,
    Adjust,
    Cancel,
    Event,
    Failed,
    FinishReason,
    Record,
    Residency,
    Scheduling,
    Shutdown,
    Snapshot,
    Step,
    Submit,
    Tokens,
)

SNAPSHOT_SECONDS = 0.5
IDLE_SECONDS = 1.0
REFUSALS = 4
"""Batches in a row that may find no cells before a request is given up."""

Part = tuple[Sequence, int]
"""A sequence and how many of its next tokens this step computes."""


class Loop:
    """Runs until `Shutdown`, or until the service closes its end of the pipe.

    `suppressed` are tokens that may never be chosen, `eog` those that end an answer unless a request ignores them.
    `idle` is done while there is no request.
    """

    def __init__(
        self,
        context: ContextPort,
        vocab: VocabPort,
        pipe: PipePort,
        limits: Limits,
        *,
        residency: ResidencyPort | None = None,
        idle: IdlePort | None = None,
        scheduling: Scheduling | None = None,
        suppressed: tuple[int, ...] = (),
        eog: tuple[int, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context, self._vocab, self._pipe, self._limits = context, vocab, pipe, limits
        self._residency, self._told = residency, Residency().model_dump_json()
        self._idle = idle
        self._recorder = Recorder(residency)
        self._suppressed, self._eog, self._clock = suppressed, eog, clock
        self._scheduler = Scheduler(limits.n_ubatch, scheduling)
        self._roster = Roster(context, limits, self._scheduler.settings.park_mib)
        self._planned: tuple[StepPlan, list[Work]] | None = None
        self._events: list[Event] = []
        self._stopping = False
        self._last_snapshot, self._was_busy = float("-inf"), False
        self._times = TimeLog()
        self._decode_seconds = self._sample_seconds = 0.0
        self._n_sampled = self._n_refused = self._n_accepted = self._n_prompt = 0

    def run(self) -> None:
        """Turn until told to stop; a peer that is gone counts as being told."""
        try:
            while not self._stopping:
                self.turn()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._stopping = True

    def turn(self) -> None:
        """Take commands (waiting for one when there is no work), compute one step, send what it gave."""
        at_once = self._roster.busy or (self._idle is not None and self._idle.pending)
        bodies = self._pipe.receive(0 if at_once else IDLE_SECONDS)
        started = self._clock()
        self._decode_seconds = self._sample_seconds = 0.0
        self._n_sampled = 0
        for body in bodies:
            self._obey(body)
        self._use_idle_time(bodies)
        self._start_waiting()
        self._was_busy = self._was_busy or self._roster.busy
        stepped = self._step()
        if not stepped and self._residency is not None:
            self._residency.synchronize()
        self._send()
        if stepped:
            self._end_of_step(started)

    def _end_of_step(self, started: float) -> None:
        if self._planned is not None:
            self._scheduler.computed(*self._planned, self._clock() - started)
        self._times.add(self._clock() - started, self._decode_seconds, self._sample_seconds, self._n_sampled)

    def _use_idle_time(self, bodies: list[bytes]) -> None:
        """A step of idle work if nobody wants anything; its end if a request does."""
        if self._idle is None:
            return
        if self._roster.busy or self._stopping:
            self._idle.interrupt()
        elif self._idle.pending and not bodies:
            self._idle.step()

    # -- commands

    def _obey(self, body: bytes) -> None:
        command = COMMAND.validate_json(body)
        if isinstance(command, Submit):
            self._accept(command)
        elif isinstance(command, Cancel):
            sequence = self._roster.find(command.id)
            if sequence is not None:
                self._finish(sequence, "cancelled")
        elif isinstance(command, Adjust):
            self._adjust(command)
        elif isinstance(command, Record):
            self._recorder.obey(command)
        elif isinstance(command, Shutdown):
            self._stopping = True
            self._recorder.end("the engine was told to end")
            for sequence in (*self._roster.running, *self._roster.waiting):
                self._fail(sequence, "engine_failed", "The engine is shutting down.")

    def _adjust(self, command: Adjust) -> None:
        """Idle work may hold what changes: it gives that back first, and begins anew."""
        if command.scheduling is not None:
            self._scheduler.settings = command.scheduling
            self._roster.lot.mib = command.scheduling.park_mib
        if command.residency is None:
            return
        if self._idle is not None:
            self._idle.interrupt()
        if self._residency is not None:
            self._residency.adjust(command.residency)

    def _accept(self, submit: Submit) -> None:
        problem = self._limits.problem(submit, self._vocab.n_tokens)
        if problem:
            self._events.append(Failed(id=submit.id, code="invalid_request", message=problem))
        else:
            self._n_accepted += 1
            text, number = TextOut(submit.stop), self._n_accepted
            self._roster.waiting.append(Sequence(submit, self._clock(), text, list(submit.prompt), number))

    # -- starting

    def _start_waiting(self) -> None:
        while (sequence := self._roster.start_next()) is not None:
            if sequence.sampler is None:
                self._guard(sequence, self._give_sampler)

    def _give_sampler(self, sequence: Sequence) -> None:
        wanted = sequence.submit.sampling
        seed = wanted.seed if wanted.seed is not None else secrets.randbits(32)
        barred = self._suppressed + (self._eog if wanted.ignore_eos else ())
        stages = sampling.chain(wanted, seed, barred, self._limits.n_ctx)
        sequence.sampler = self._context.new_sampler((stage.name, stage.args) for stage in stages)
        needed = sampling.history_needed(wanted, self._limits.n_ctx)
        if needed:
            sequence.sampler.accept(sequence.tokens[-needed:])

    # -- one step

    def _step(self) -> bool:
        parts = self._fitting_parts()
        if parts:
            self._compute(parts)
        return bool(parts)

    def _fitting_parts(self) -> list[Part]:
        """The next step, after sending back as many as it takes for its tokens to find cells."""
        roster = self._roster
        while True:
            roster.settle_followers()
            work = roster.work()
            plan = self._scheduler.plan(work)
            if plan.n_tokens <= roster.cells.free or len(roster.running) <= 1:
                self._planned = plan, work
                return [(roster.running[index], n) for index, n in plan.parts]
            roster.send_back(roster.last_in_line())

    def _compute(self, parts: list[Part]) -> None:
        code = self._decode(parts)
        if code == DECODED:
            self._n_refused = 0
            for sequence, n in parts:
                self._n_prompt += self._roster.computed(sequence, n)
            for sequence, _ in parts:
                if sequence.row >= 0:
                    self._guard(sequence, self._next_token)
            return
        self._planned = None  # what follows is no step as it was planned
        if code == NO_CELLS and len(self._roster.running) > 1:
            self._make_room()
        elif len(parts) > 1:
            # One of them is at fault, and llama.cpp does not say which: alone, only that one fails.
            for part in parts:
                if part[0].seq_id >= 0:  # not sent back for its cells meanwhile
                    self._compute([part])
        else:
            self._fail(parts[0][0], "engine_failed", f"The engine could not compute this request (code {code}).")

    def _make_room(self) -> None:
        """Llama.cpp found no cells where the count says there are: the last waits, or fails if that helps not."""
        last = self._roster.last_in_line()
        self._n_refused += 1
        if self._n_refused <= REFUSALS:
            self._roster.send_back(last)
        else:
            self._fail(last, "engine_failed", "The engine found no room for this request beside the others.")

    def _decode(self, parts: list[Part]) -> int:
        rows: list[tuple[int, int, int, bool]] = []
        for sequence, n in parts:
            start, end = sequence.n_past, sequence.n_past + n
            tokens, seq_id = sequence.tokens, sequence.seq_id
            wanted = end == len(tokens)
            rows.extend((tokens[at], at, seq_id, False) for at in range(start, end - 1))
            rows.append((tokens[end - 1], end - 1, seq_id, wanted))
            sequence.row = len(rows) - 1 if wanted else -1
        width = len(parts) if all(sequence.decoding for sequence, _ in parts) else 0
        if self._residency is not None:
            self._residency.prepare(width)
        before = self._clock()
        for sequence, _ in parts:
            sequence.started = sequence.started or before
        code = self._context.decode(rows)
        if not width:
            self._context.synchronize()  # what a step with prompts takes is what the next ones are planned by
        elif self._residency is not None:
            self._residency.synchronize()
        seconds = self._clock() - before
        self._decode_seconds += seconds
        if width and code == DECODED and self._residency is not None:
            self._learn(self._residency, parts, seconds)
        return code

    def _learn(self, residency: ResidencyPort, parts: list[Part], seconds: float) -> None:
        """What a step of generated tokens chose is what experts are placed by, and told at each answer's end."""
        found = residency.decoded(len(parts), seconds)
        if self._recorder.records:
            self._recorder.step([sequence.number for sequence, _ in parts])
        if found is not None:
            for (sequence, _), hits, selections in zip(parts, *found.tolist(), strict=True):
                sequence.expert_hits += hits
                sequence.expert_selections += selections

    def _next_token(self, sequence: Sequence) -> None:
        before = self._clock()
        token = self._context.sample(sequence.sampler, sequence.row)
        now = self._clock()
        self._sample_seconds += now - before
        self._n_sampled += 1
        sequence.first_token = sequence.first_token or now
        sequence.n_predicted += 1
        if self._vocab.is_eog(token):
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token)
        self._show(sequence, token)
        if sequence.out.stop_word is not None:
            self._finish(sequence, "stop")
        elif sequence.n_predicted >= sequence.submit.max_tokens:
            self._finish(sequence, "length")

    def _show(self, sequence: Sequence, token: int) -> None:
        wanted = sequence.submit.logprobs
        details = None
        if wanted is not None:
            details = [token_logprob(self._context.logits(sequence.row), token, wanted, self._vocab)]
        text = sequence.out.feed(self._vocab.piece(token))
        self._events.append(Tokens(id=sequence.id, tokens=[token], text=text, logprobs=details))

    # -- endings

    def _guard(self, sequence: Sequence, act: Callable[[Sequence], None]) -> None:
        """Do something for one sequence; if it goes wrong, only that sequence fails."""
        try:
            act(sequence)
        except Exception as error:  # noqa: BLE001 - the others must go on, whatever it was
            self._fail(sequence, "engine_failed", f"The engine could not go on with this request: {error}.")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._events.append(sequence.done(reason, self._clock()))
        self._roster.drop(sequence)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        self._roster.drop(sequence)
        self._events.append(Failed(id=sequence.id, code=code, message=message))

    # -- reports

    def _send(self) -> None:
        now = self._clock()
        came_to_rest = self._was_busy and not self._roster.busy
        due = came_to_rest or now - self._last_snapshot >= SNAPSHOT_SECONDS
        recorded = self._recorder.take(due)
        if not self._events and not due and recorded is None:
            return
        if due:
            self._last_snapshot, self._was_busy = now, self._roster.busy
        events, self._events = self._events, []
        self._pipe.send(Step(events=events, snapshot=self.snapshot() if due else None, recorded=recorded))

    def snapshot(self) -> Snapshot:
        """The state of this moment; when nothing runs, the cells are recounted first."""
        roster = self._roster
        if not roster.running and not (self._idle is not None and self._idle.underway):
            roster.recount()
        return Snapshot(
            waiting=len(roster.waiting),
            slots=[sequence.state() for sequence in (*roster.running, *roster.parked)],
            kv_cells_used=roster.cells.used,
            kv_cells=self._limits.kv_cells,
            n_steps=self._times.n_steps,
            n_preempted=roster.n_preempted,
            n_parked=roster.lot.n_parked,
            parked_bytes=roster.lot.bytes,
            prompt_tokens=self._n_prompt,
            shared_tokens=roster.n_shared,
            times=self._times.summary(),
            residency=self._news_of_residency(),
        )

    def _news_of_residency(self) -> Residency | None:
        """Its status if that is another than the last one sent."""
        if self._residency is None:
            return None
        status = self._residency.status()
        told, self._told = self._told, status.model_dump_json()  # a tenth of what comparing the objects takes
        return None if told == self._told else status
