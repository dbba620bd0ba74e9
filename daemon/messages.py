"""Every type that crosses a process or a layer.

Service to engine: `Load` once, then `Submit`, `Cancel`, `Adjust`, `Record`, `Shutdown`. Engine to service: `Loading`,
`Ready`, `LoadFailed`, `Step`.
All are immutable pydantic models told apart by `kind`; `daemon.frames` carries them as length-prefixed JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

TokenId = int


class Message(BaseModel):
    """Base: immutable, no unknown fields, numbers finite. What is sent has every field, those with defaults too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, json_schema_serialization_defaults_required=True
    )


class Sampling(Message):
    """How the next token is chosen; names, defaults and order are llama.cpp's.

    `temperature` <= 0 is greedy. `seed` None means a random one. `logit_bias` pairs a token id with a value added to
    its logit; -inf is written as -1e30. `repeat_last_n` and `dry_penalty_last_n` count tokens, -1 is the whole context.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    logit_bias: tuple[tuple[TokenId, float], ...] = ()


Priority = Literal["interactive", "normal", "background"]
"""The class of a request, the first one goes first."""


class Submit(Message):
    """One answer to compute. `prompt` is never empty and shorter than the context; `max_tokens` >= 1 fits behind it."""

    kind: Literal["submit"] = "submit"
    id: str
    prompt: list[TokenId]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: none. N >= 0: the chosen token's log probability and the N most likely ones, before samplers."""
    priority: Priority = "normal"
    client: str = ""
    """Who asks; empty: nobody that is known."""


class ResidencySpec(Message):
    """[residency] of the config. `hot_set` is an absolute path or empty.

    `vram` holds budgets by device, "" for all, and `reserve` what stays free there; `upload` is in MiB per second.
    """

    enabled: bool = True
    hot_set: str = ""
    vram: dict[str, str] = {}
    reserve: dict[str, str] = {}
    frozen: bool = False
    upload: float = 0.0
    gate: bool = True
    remember: bool = True


class Scheduling(Message):
    """[scheduling] of the config: how prompts and answers share the steps, and how much is parked in RAM."""

    target_latency: float = 2.0
    decode_share: float = 0.5
    park_mib: int = 1024


class Load(Message):
    """The first command: what to load and how. Paths are absolute; 0 and -1 mean what they mean in config.toml."""

    kind: Literal["load"] = "load"
    model: str
    name: str
    context: int
    load_mode: Literal["auto", "mmap", "none"]
    device: str
    gpu_layers: int
    cpu_moe_layers: int
    threads: int
    threads_batch: int
    max_sequences: int
    kv_cells: int
    ubatch: int
    cache_type_k: str
    cache_type_v: str
    repack: bool
    residency: ResidencySpec = ResidencySpec()
    scheduling: Scheduling = Scheduling()


class Cancel(Message):
    """Give up a request, wherever it is; answered by a `Done` that says "cancelled", or not if it is over."""

    kind: Literal["cancel"] = "cancel"
    id: str


class Adjust(Message):
    """What is live of [residency] or [scheduling] has changed; nothing else of them is looked at. None: the same."""

    kind: Literal["adjust"] = "adjust"
    residency: ResidencySpec | None = None
    scheduling: Scheduling | None = None


class Record(Message):
    """Hand over what decode steps choose, as recording `number`; `wanted` False ends it. One at a time."""

    kind: Literal["record"] = "record"
    number: int
    wanted: bool = True


class Shutdown(Message):
    """End the engine process; running sequences are failed."""

    kind: Literal["shutdown"] = "shutdown"


Command = Annotated[Load | Submit | Cancel | Adjust | Record | Shutdown, Field(discriminator="kind")]
COMMAND: TypeAdapter[Load | Submit | Cancel | Adjust | Record | Shutdown] = TypeAdapter(Command)


class Candidate(Message):
    """A token with its natural-log probability; `bytes` is its piece, which need not be whole UTF-8."""

    token: TokenId
    bytes: list[int]
    logprob: float


class TokenLogprob(Candidate):
    """The chosen token, and the most likely ones at its position, best first."""

    top: list[Candidate] = []


class Tokens(Message):
    """New tokens of one request. `text` is what may be shown now: whole UTF-8, never part of a stop string."""

    kind: Literal["tokens"] = "tokens"
    id: str
    tokens: list[TokenId]
    text: str
    logprobs: list[TokenLogprob] | None = None


FinishReason = Literal["stop", "length", "cancelled"]


class Done(Message):
    """The end of a request. `text` is what was still held back; times are milliseconds of wall clock."""

    kind: Literal["done"] = "done"
    id: str
    finish_reason: FinishReason
    stop_word: str | None = None
    text: str = ""
    n_prompt: int
    n_cached: int
    """Tokens of the prompt whose cells were taken from another request instead of being computed."""
    n_predicted: int
    expert_hits: int = 0
    """Selections of experts in this answer's decode steps that were in VRAM, of `expert_selections`; 0 of 0 where none
    of that is known."""
    expert_selections: int = 0
    wait_ms: float
    """From the arrival in the engine to the first chunk of the prompt."""
    prompt_ms: float
    predicted_ms: float


class Failed(Message):
    """The request ended without an answer; `code` and `message` are those of `daemon.errors`."""

    kind: Literal["failed"] = "failed"
    id: str
    code: str
    message: str


RequestEvent = Tokens | Done | Failed
"""What a reader of one request sees."""

Event = Annotated[RequestEvent, Field(discriminator="kind")]


class SlotState(Message):
    """One sequence as `/slots` shows it. One that is parked has no id (-1); its state is in RAM until it goes on.

    "following": it waits for the prefix that another request computes.
    """

    seq_id: int
    request: str
    phase: Literal["prefill", "decode", "following", "parked"]
    priority: Priority = "normal"
    n_prompt: int
    n_past: int
    n_predicted: int


class StepTimes(Message):
    """Where the time of recent steps went, in milliseconds; `outside` is what was spent outside llama.cpp."""

    n_steps: int
    step_p50: float
    decode_p50: float
    sample_p50: float
    outside_p50: float
    outside_p99: float
    sample_per_token: float


class HeatSummary(Message):
    """How a layer's recent selections spread: heat is what `daemon.hotset.policy.Heat` keeps.

    `resident_share` is the part of all heat that lies in resident experts, 0-1; `for_half` and `for_ninety` are how
    many of the hottest experts hold half and nine tenths of it; `hottest` are the ids of the first few.
    """

    resident_share: float
    for_half: int
    for_ninety: int
    hottest: list[int]


class Allowance(Message):
    """A budget as it was asked for and as it is in force; `why` is empty where it is what was asked."""

    asked: str
    effective: str
    why: str = ""


GateState = Literal["none", "waiting", "open", "closed"]
"""Whether residency pays here: nothing to ask, not measured yet, it does, it does not."""


class Gate(Message):
    """Whether experts in VRAM make decoding faster; tokens per second with and without, where both are known."""

    state: GateState = "none"
    reason: str = ""
    on: float | None = None
    off: float | None = None


class ExpertLayer(Message):
    """One set of routed experts as it is placed. `layer` is the model's, `reason` why it has no slots, if so.

    `mode`: "full" (all experts in slots), "partial", "cold" (none), or "device" (wholly there, no copy in memory).
    """

    layer: int
    device: str
    mode: Literal["cold", "partial", "full", "device"]
    reason: str
    memory: Literal["", "pinned", "pageable", "mapped"]
    """What the weights lie in on the host; "" where the CPU has none of them."""
    experts: int
    slots: int
    resident: int
    hits: int
    misses: int
    hit_rate: float | None = None
    """Of recent decode steps, 0-1; None before the first."""
    heat: HeatSummary | None = None


class ExpertDevice(Message):
    """Experts on one device: what was asked, what it got and why; sizes in bytes, the rest are experts.

    `hits` and `misses` count selections since the engine started. The reserve is what stays free beside them, whatever
    was asked for; `shared_memory` says that the device's memory is the CPU's.
    """

    device: str
    asked: str
    asked_bytes: int
    effective_bytes: int
    why: str
    reserve_asked: str = ""
    reserve_bytes: int = 0
    reserve_why: str = ""
    shared_memory: bool = False
    bytes: int
    layers: int
    slots: int
    resident: int
    hits: int
    misses: int


SelfTestState = Literal["none", "waiting", "passed", "failed", "skipped"]
"""Of the comparison with and without experts in VRAM: none is due, it waits for an idle engine, how it ended."""


class Remembered(Message):
    """What is known of experts from before the start, and whether what is learned is kept for the next one.

    "warm": slots began with experts that were learned. `saved` is when the file was last written since (UTC), empty
    where it was not; `fault` why it cannot be read or written. All empty where residency is off.
    """

    start: Literal["cold", "warm"] = "cold"
    reason: str = ""
    saved: str = ""
    fault: str = ""


class Residency(Message):
    """What keeping experts in VRAM does now, and why; `filled` is the part of the planned experts that is there."""

    state: Literal["off", "filling", "on"] = "off"
    reason: str = ""
    filled: float = 0.0
    devices: list[ExpertDevice] = []
    layers: list[ExpertLayer] = []
    uploaded_bytes: int = 0
    published: int = 0
    placement: Literal["static", "live"] = "static"
    """Whether experts move with the traffic."""
    moves: int = 0
    """Experts that were brought in because of the traffic."""
    hit_rate: float | None = None
    """Of recent decode steps in all layers with slots, 0-1."""
    upload: Allowance | None = None
    """Bytes per second that moves may take."""
    remembered: Remembered = Remembered()
    gate: Gate = Gate()
    selftest: SelfTestState = "none"
    selftest_detail: str = ""


class Snapshot(Message):
    """The engine's state at one moment; also its sign of life. `residency` is None where nothing of it has changed."""

    kind: Literal["snapshot"] = "snapshot"
    waiting: int = 0
    slots: list[SlotState] = []
    kv_cells_used: int = 0
    kv_cells: int = 0
    n_steps: int = 0
    n_preempted: int = 0
    """How often a sequence had to give its cells back, parked or not."""
    n_parked: int = 0
    """How often the state of one was kept in RAM."""
    parked_bytes: int = 0
    """RAM that parked states take now."""
    prompt_tokens: int = 0
    """Tokens of prompts that were computed since the start."""
    shared_tokens: int = 0
    """Those that were taken from another request instead."""
    times: StepTimes | None = None
    residency: Residency | None = None


class RoutedLayer(Message):
    """A set of routed experts: the model's layer, which of its sets, how many experts it has."""

    layer: int
    set: int
    experts: int


class RecordingScope(Message):
    """What is recorded of a token: the `top_k` experts that each of `layers` chose, in ascending order of the layers.

    `left_out` are layers with experts whose routing is not read.
    """

    top_k: int
    layers: list[RoutedLayer]
    left_out: list[int] = []


class Recorded(Message):
    """A part of recording `number`: one token of an answer after the other, in the order in which they were decoded.

    `answers` tells the answer of each token by its number; `ids` are its experts, base64 of [tokens, layers, top_k] in
    the layout of a trace (`daemon.hotset.trace`), those of a layer in any order. `scope` is in the first part alone.
    """

    kind: Literal["recorded"] = "recorded"
    number: int
    scope: RecordingScope | None = None
    answers: list[int] = []
    ids: str = ""
    ended: str | None = None
    """None: more may come. Why it has ended or was refused; "" where that was ordered."""


class Step(Message):
    """Everything that one engine step produced, in one message; `snapshot` rides along a few times a second."""

    kind: Literal["step"] = "step"
    events: list[Event]
    snapshot: Snapshot | None = None
    recorded: Recorded | None = None


class Loading(Message):
    """Progress of the model load, 0 to 1."""

    kind: Literal["loading"] = "loading"
    progress: float


class Card(Message):
    """What the kernel says of a graphics card, memory in bytes, None where it does not.

    `display`: a screen is connected, none is, or the card starts the machine's ("boot") and its connectors are unknown.
    """

    display: Literal["connected", "boot", "none"]
    vram_used: int | None = None
    vram_total: int | None = None
    gtt_used: int | None = None
    gtt_total: int | None = None


class Device(Message):
    """A compute device as llama.cpp sees it; memory in bytes.

    `pci` is its address on the bus, empty where the backend does not tell; `remote` ones belong to RPC servers. `card`
    is what the kernel said of it at the same moment.
    """

    name: str
    description: str
    kind: Literal["cpu", "gpu", "igpu", "accel"]
    memory_free: int
    memory_total: int
    pci: str = ""
    remote: bool = False
    card: Card | None = None


class ModelInfo(Message):
    """What was loaded. Sizes in bytes; `n_ctx` is the limit of one sequence, `kv_cells` what all share."""

    name: str
    architecture: str
    description: str
    fingerprint: str
    n_params: int
    size: int
    n_vocab: int
    n_ctx_train: int
    n_ctx: int
    kv_cells: int
    kv_bytes_per_token: int
    n_layer: int
    n_expert: int
    n_expert_used: int
    max_sequences: int
    n_ubatch: int
    bos: TokenId | None
    eos: TokenId | None
    devices: list[Device]
    build: str
    residency: str
    """Why residency is on, off or not applicable at load, in words."""
    warnings: list[str] = []


class Ready(Message):
    """The engine accepts commands."""

    kind: Literal["ready"] = "ready"
    info: ModelInfo
    residency: Residency = Residency()


class LoadFailed(Message):
    """The engine could not load; `fatal` when trying again with the same files and config cannot help."""

    kind: Literal["load_failed"] = "load_failed"
    message: str
    fatal: bool


class Change(Message):
    """A key whose value in the file is not the one that was in force; `old` and `new` are for people, without keys."""

    key: str
    effect: Literal["live", "next load", "restart"]
    old: str
    new: str


class LoadStep(Message):
    """Where an order to load anew is: `running` answers are finished first while it drains; `progress` is that of the
    engine that loads, 0 to 1."""

    stage: Literal["text", "draining", "loading", "returning"]
    running: int
    waiting: int
    progress: float


class LoadResult(Message):
    """What came of an order to load anew.

    "nothing": no changed key needs it; "refused": not now; "failed": `reason` says why, and whether the engine of
    before serves again. `cut_off` answers were ended because their time was up.
    """

    result: Literal["loaded", "nothing", "refused", "failed"]
    reason: str = ""
    loaded: list[Change] = []
    cut_off: int = 0
    seconds: float = 0.0


class Recording(Message):
    """A recording has begun: of which model, and what of each token. Parts follow, `Recorded`."""

    kind: Literal["recording"] = "recording"
    fingerprint: str
    name: str
    architecture: str
    scope: RecordingScope


class Reload(Message):
    """What came of reading the configuration again; `at` in seconds since 1970."""

    result: Literal["applied", "unchanged", "rejected"]
    at: float
    applied: list[Change] = []
    pending: list[Change] = []
    """What the file says and the running service does not follow before it loads anew or starts again."""
    shadowed: list[str] = []
    """Keys of the file that the environment overrides."""
    faults: list[tuple[str, str]] = []
    """Why it was rejected, as (key or empty, what is wrong)."""
    load: LoadResult | None = None
    """None where no new load was ordered, or where the file was rejected."""


Report = Annotated[Loading | Ready | LoadFailed | Step | Snapshot, Field(discriminator="kind")]
REPORT: TypeAdapter[Loading | Ready | LoadFailed | Step | Snapshot] = TypeAdapter(Report)
