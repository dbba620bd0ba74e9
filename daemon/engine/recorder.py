"""Hands over what decode steps choose while somebody records it; `hotset record --daemon` does."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence

from daemon.engine.ports import ResidencyPort, Source
from daemon.hotset.trace import id_type
from daemon.messages import Record, Recorded, RecordingScope, RoutedLayer
from daemon.native.hotset import Layer, Reason

MAX_BYTES = 1 << 16
"""So many bytes of ids are sent at once, whether a part is due or not."""


def source(layers: Sequence[Layer]) -> Source | str:
    """What can be recorded of ids of these layers, in ascending order; why nothing, where a trace cannot hold it.

    Layers whose routing is not read are left out.
    """
    seen: Counter[int] = Counter()
    keys = []
    for layer in layers:
        keys.append((layer.il, seen[layer.il]))
        seen[layer.il] += 1
    counted = [layer.index for layer in layers if layer.reason == Reason.MANAGED]
    if not counted:
        return "the routing of no layer is read"
    top_k = {layers[at].n_expert_used for at in counted}
    if len(top_k) > 1:
        return f"layers that select {sorted(top_k)} experts cannot stand in one recording"
    columns = sorted(counted, key=keys.__getitem__)
    routed = [RoutedLayer(layer=keys[at][0], set=keys[at][1], experts=layers[at].n_expert) for at in columns]
    left_out = sorted({layer.il for layer in layers if layer.index not in counted})
    return Source(RecordingScope(top_k=top_k.pop(), layers=routed, left_out=left_out), columns)


class Recorder:
    """At most one recording at a time; another order to begin takes its place. Belongs to the engine thread."""

    def __init__(self, residency: ResidencyPort | None) -> None:
        self._residency = residency
        self._source: Source | None = None
        self._number = 0
        self._part = Recorded(number=0)
        self._news = False
        self._answers: list[int] = []
        self._ids = bytearray()

    @property
    def records(self) -> bool:
        """Whether steps are to be told."""
        return self._source is not None

    def obey(self, order: Record) -> None:
        """Begin, or end what was begun with this number."""
        if order.wanted:
            self._begin(order.number)
        elif order.number == self._number:
            self.end("")

    def _begin(self, number: int) -> None:
        self._drop()
        self._number = number
        found = "this engine has nothing to record" if self._residency is None else self._residency.recordable()
        if isinstance(found, str):
            self._tell(ended=found)
            return
        self._source = found
        self._type = id_type(layer.experts for layer in found.scope.layers)
        self._tell(scope=found.scope)

    def step(self, answers: Sequence[int]) -> None:
        """A decode step of one token for each of these answers is over; `ResidencyPort.chosen` has what it chose.

        One of which that is not known is left out, and ends the recording where residency has been switched off.
        """
        assert self._source is not None
        assert self._residency is not None
        ids = self._residency.chosen
        if ids is not None:
            self._answers += answers
            self._ids += ids[:, self._source.columns].astype(self._type).tobytes()
        elif isinstance(found := self._residency.recordable(), str):
            self.end(found)

    def end(self, why: str) -> None:
        """Nothing more is recorded."""
        if self._source is not None:
            self._source = None
            self._tell(ended=why)

    def take(self, due: bool) -> Recorded | None:
        """What is to be sent now; all that there is if a part is `due`."""
        if not (self._news or (due and self._answers) or len(self._ids) >= MAX_BYTES):
            return None
        ids = base64.b64encode(self._ids).decode()
        part = self._part.model_copy(update={"number": self._number, "answers": self._answers, "ids": ids})
        self._drop()
        return part

    def _tell(self, scope: RecordingScope | None = None, ended: str | None = None) -> None:
        """With the next part, which does not wait."""
        values = {"scope": scope} if scope is not None else {"ended": ended}
        self._part, self._news = self._part.model_copy(update=values), True

    def _drop(self) -> None:
        self._part, self._news = Recorded(number=0), False
        self._answers, self._ids = [], bytearray()
