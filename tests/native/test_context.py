"""The real model, context and samplers under the real loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.config import Config
from daemon.engine import loading
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.roster import Limits
from daemon.engine.sampling import chain
from daemon.errors import ModelUnusable
from daemon.messages import Done, Failed, Load, Sampling, Submit
from daemon.model_files import EMBEDDED_MODEL, load_command
from daemon.native.model import Model
from tests.engine_fakes import FakePipe
from tests.minigguf import write_dense

PROMPT = "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"


GREEDY = json.loads((Path(__file__).parents[1] / "vectors" / "greedy.json").read_text("utf-8"))["cases"]


def spec(**engine: Any) -> Any:
    return load_command(Config.model_validate({"engine": {"device": "cpu"} | engine}))


@pytest.fixture(scope="module")
def loaded(library_path: Path) -> Iterator[Loaded]:
    with Loaded(spec(kv_cells=4096), lambda _: None) as model:
        yield model


@pytest.fixture
def bench(loaded: Loaded) -> Iterator[tuple[Loop, FakePipe]]:
    pipe = FakePipe()
    info = loaded.info
    limits = Limits(n_ubatch=info.n_ubatch, max_sequences=info.max_sequences, kv_cells=info.kv_cells, n_ctx=info.n_ctx)
    loop = Loop(loaded.context, loaded.vocab, pipe, limits)
    yield loop, pipe
    assert loop.snapshot().slots == []


def run(loop: Loop, pipe: FakePipe, *submits: Submit) -> None:
    pipe.put(*submits)
    loop.turn()
    while any(pipe.end(submit.id) is None for submit in submits):
        loop.turn()


def tokens(loaded: Loaded) -> list[int]:
    return loaded.vocab.tokenize(PROMPT, add_special=True, parse_special=True)


def test_the_embedded_model_is_described(loaded: Loaded) -> None:
    info = loaded.info
    assert (info.architecture, info.n_layer, info.n_expert, info.n_expert_used) == ("qwen3moe", 6, 32, 4)
    assert (info.n_ctx, info.kv_cells, info.n_vocab, info.n_ctx_train) == (4096, 4096, 8192, 4096)
    assert info.kv_bytes_per_token == 6 * 2 * 2 * 64 * 2
    assert (info.name, info.warnings) == ("tinymoe-41m-Q4_K_M", [])
    assert "backends" in info.build


NEAR = 0.1
"""Nats between two tokens of which rounding may prefer either; alone these answers are clear by half of that."""


def test_many_sequences_answer_as_each_would_alone(bench: tuple[Loop, FakePipe]) -> None:
    """What else is in the batch, and where a prompt is split, changes rounding at most."""
    loop, pipe = bench
    cases = [case for case in GREEDY if len(case["answer"]) == 96][:8]
    run(
        loop,
        pipe,
        *(
            Submit(id=str(i), prompt=case["prompt"], max_tokens=24, sampling=Sampling(temperature=0), logprobs=2)
            for i, case in enumerate(cases)
        ),
    )
    for i, case in enumerate(cases):
        entries = [entry for e in pipe.events(str(i)) if e.kind == "tokens" for entry in e.logprobs or ()]
        assert len(entries) == 24
        differing = [at for at, entry in enumerate(entries) if entry.token != case["answer"][at]]
        for at in differing[:1]:
            best, second = entries[at].top
            assert second.token == case["answer"][at], (i, at)
            assert best.logprob - second.logprob < NEAR, (i, at)


def test_a_seed_repeats_and_another_one_does_not(bench: tuple[Loop, FakePipe], loaded: Loaded) -> None:
    loop, pipe = bench
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        run(loop, pipe, Submit(id=name, prompt=tokens(loaded), max_tokens=40, sampling=Sampling(seed=seed)))
    assert pipe.text("a") == pipe.text("b") != pipe.text("c")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, logit_bias=((100, 5.0),)),
        Sampling(repeat_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5, repeat_last_n=-1),
        Sampling(dry_multiplier=0.8, dry_sequence_breakers=("\n", "é")),
        Sampling(top_n_sigma=1.0, typical_p=0.9, xtc_probability=0.5, min_keep=2),
        Sampling(dynatemp_range=0.3, dynatemp_exponent=2.0),
        Sampling(mirostat=1),
        Sampling(mirostat=2, ignore_eos=True),
        Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=5.0),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.model_dump(exclude_defaults=True).items())[:60],
)
def test_every_sampler_of_llama_cpp_can_be_used(
    sampling: Sampling, bench: tuple[Loop, FakePipe], loaded: Loaded
) -> None:
    loop, pipe = bench
    run(loop, pipe, Submit(id="x", prompt=tokens(loaded), max_tokens=10, sampling=sampling))
    done = pipe.end("x")
    assert isinstance(done, Done), done


def test_a_bias_decides(bench: tuple[Loop, FakePipe], loaded: Loaded) -> None:
    loop, pipe = bench
    (forced,) = loaded.vocab.tokenize("Q", add_special=False, parse_special=False)
    sampling = Sampling(temperature=0, logit_bias=((forced, 100.0),))
    run(loop, pipe, Submit(id="x", prompt=tokens(loaded), max_tokens=5, sampling=sampling))
    assert pipe.text("x") == "QQQQQ"


def test_logprobs_are_those_of_the_logits(bench: tuple[Loop, FakePipe], loaded: Loaded) -> None:
    loop, pipe = bench
    greedy = Sampling(temperature=0)
    run(loop, pipe, Submit(id="x", prompt=tokens(loaded), max_tokens=3, sampling=greedy, logprobs=5))
    entries = [e.logprobs[0] for e in pipe.events("x") if e.kind == "tokens" and e.logprobs]
    assert len(entries) == 3
    for entry in entries:
        assert entry.top[0].token == entry.token, "greedy takes the most likely"
        values = [candidate.logprob for candidate in entry.top]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) <= 1.0 + 1e-6


def test_cells_that_run_out_lose_nothing(loaded: Loaded, library_path: Path) -> None:
    pipe = FakePipe()
    small = Limits(n_ubatch=loaded.info.n_ubatch, max_sequences=4, kv_cells=200, n_ctx=190)
    loop = Loop(loaded.context, loaded.vocab, pipe, small)
    wanted = Sampling(temperature=0, ignore_eos=True)
    submits = [Submit(id=str(i), prompt=tokens(loaded), max_tokens=120, sampling=wanted) for i in range(4)]
    run(loop, pipe, *submits)
    assert loop.snapshot().n_preempted > 0
    for submit in submits:
        done = pipe.end(submit.id)
        assert isinstance(done, Done)
        assert (done.n_predicted, done.finish_reason) == (120, "length")


def test_samplers_are_built_for_every_stage(loaded: Loaded) -> None:
    for stage in chain(Sampling(repeat_penalty=1.1, dry_multiplier=1), 1, n_ctx=100):
        with loaded.context.new_sampler([(stage.name, stage.args)]) as sampler:
            assert sampler.pointer
        assert sampler.pointer is None


def test_a_context_that_cannot_be_is_one_message(library_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="context"):
        Loaded(spec(kv_cells=16_777_216, cache_type_k="f32"), lambda _: None)


def test_a_model_larger_than_memory_is_served_with_a_warning(
    library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 8 << 20

    monkeypatch.setattr(loading.psutil, "virtual_memory", Little)
    with Loaded(spec(), lambda _: None) as model:
        (warning,) = model.info.warnings
    assert "mapped file" in warning


@pytest.mark.parametrize("load", ["auto", "none"])
def test_a_model_larger_than_memory_stays_in_its_file(
    load: str, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rearranged weights are a copy in memory that cannot be dropped: the kernel would kill the engine."""

    class Little:
        available = 8 << 20

    used: list[Load] = []

    class Watched(Model):
        def __init__(self, spec: Load, progress: Callable[[float], None], **more: Any) -> None:
            used.append(spec)
            super().__init__(spec, progress, **more)

    monkeypatch.setattr(loading.psutil, "virtual_memory", Little)
    monkeypatch.setattr(loading, "Model", Watched)
    with Loaded(spec(repack=True).model_copy(update={"load_mode": load}), lambda _: None) as model:
        assert "engine.repack" in model.info.warnings[0]
    assert [(one.repack, one.load_mode) for one in used] == [(False, "mmap")]


def test_a_gpu_that_is_not_there_is_told(library_path: Path) -> None:
    with Loaded(spec(device="auto"), lambda _: None) as model:
        gpu = any(device.kind != "cpu" for device in model.info.devices)
        assert any("sees no GPU" in warning for warning in model.info.warnings) is not gpu


def test_a_dense_model_is_served_and_says_that_there_is_nothing_to_place(tmp_path: Path, library_path: Path) -> None:
    path = write_dense(tmp_path / "dense.gguf")
    command = load_command(Config.model_validate({"model": {"path": str(path)}, "engine": {"device": "cpu"}}))
    with Loaded(command, lambda _: None) as model:
        assert model.info.n_expert == 0
        assert model.info.residency.startswith("not applicable")


def test_progress_comes_in_order(library_path: Path) -> None:
    seen: list[float] = []
    with Loaded(spec(), seen.append) as model:
        assert model.info.size > EMBEDDED_MODEL.stat().st_size * 0.9
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_request_outside_the_vocabulary_fails_alone(bench: tuple[Loop, FakePipe], loaded: Loaded) -> None:
    loop, pipe = bench
    bad = Submit(id="bad", prompt=[8192], max_tokens=1)
    good = Submit(id="good", prompt=tokens(loaded), max_tokens=3, sampling=Sampling(temperature=0))
    run(loop, pipe, bad, good)
    assert isinstance(pipe.end("bad"), Failed)
    assert isinstance(pipe.end("good"), Done)
