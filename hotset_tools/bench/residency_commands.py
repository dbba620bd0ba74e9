"""The subcommands of `hotset bench` about experts in VRAM: models for it, timing, tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from daemon.errors import HotsetError
from hotset_tools.options import device_name

Number = TypeVar("Number", int, float)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceOption = Annotated[
    str, typer.Option(callback=device_name, help="As engine.device: Vulkan0, CUDA0, rpc:HOST:PORT, ...")
]
SeedOption = Annotated[int, typer.Option(min=0, help="The same seed gives the same tokens.")]
LoadMode = Literal["none", "mmap", "auto"]
LoadOption = Annotated[LoadMode, typer.Option("--load", help="As model.load; none: pinned memory.")]
ThreadsOption = Annotated[str, typer.Option(help="Thread counts, each tried; the fastest counts.")]
BudgetsOption = Annotated[str, typer.Option(help="Shares of all expert bytes that may be in VRAM.")]
PeerOption = Annotated[Path | None, typer.Option(help="Directory of an unpatched library, the stock to compare with.")]
PeerDeviceOption = Annotated[str, typer.Option(help="Its device, if that has another name there.")]
MinutesOption = Annotated[float, typer.Option(min=0.1, help="Time that all of it should take.")]
RoundsOption = Annotated[int, typer.Option(min=1, max=100, help="Interleaved rounds.")]
StepsOption = Annotated[int, typer.Option(min=0, max=1000, help="Steps of a round; 0: as many as the time allows.")]
UbatchOption = Annotated[int, typer.Option(min=32, max=8192, help="Tokens of a prompt that are computed together.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file, written anew after each result.")]
SplitsOption = Annotated[int, typer.Option(min=0, help="Try every N-th static split that fits; 0: the largest only.")]
LearnOption = Annotated[int, typer.Option(min=64, help="Other tokens that the static hot set is learned from.")]
CommitOption = Annotated[str, typer.Option(help="For the rows; by default what git says.")]
PathArgument = Annotated[Path, typer.Argument(help="GGUF file.", show_default=False)]


def make_model(
    out: Annotated[Path | None, typer.Argument(help="File to write; by default one in the cache.")] = None,
    shape: Annotated[str, typer.Option(help="Sizes, as of `hotset make-model`.")] = "qwen3-30b-a3b",
    quant: Annotated[str, typer.Option(help="Type of the experts and of the layers' matrices.")] = "Q4_K",
    routing: Annotated[str, typer.Option(help="local, uniform or topics.")] = "local",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, max=512, help="Instead of the shape's.")] = None,
    vocab: Annotated[int | None, typer.Option(min=512, help="Instead of the shape's.")] = None,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
) -> None:
    """Generate a large model whose routing is as local in time as that of trained ones."""
    from hotset_tools.bench import moe_models

    try:
        path, seconds = moe_models.make(out, shape, quant, routing, seed, force=force, n_layer=layers, n_vocab=vocab)
    except (ValueError, OSError) as error:
        raise HotsetError(str(error)) from None
    typer.echo(f"{path}: {path.stat().st_size / 1e9:.2f} GB, routing {routing}, seed {seed}, {seconds:.0f} s")


def check_model(
    model: PathArgument,
    device: DeviceOption = "Vulkan0",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens to decode.")] = 1024,
    learn: LearnOption = 8192,
    seed: SeedOption = 1,
    load: LoadOption = "none",
    as_json: JsonOption = False,
) -> None:
    """Measure how local a model's routing is, and how far from what is published for trained models."""
    from hotset_tools.bench import check_model as bench
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    found = bench.run(model, device=device, n_tokens=tokens, n_learn=learn, seed=seed, load_mode=load)
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else bench.table(found))


def decode(
    model: PathArgument,
    device: DeviceOption = "Vulkan0",
    sequences: Annotated[str, typer.Option(help="How many sequences decode together.")] = "1,4,16",
    prefill: Annotated[str, typer.Option(help="Prompt lengths to measure in the same run.")] = "",
    budgets: BudgetsOption = "0.25,0.5,0.75",
    threads: ThreadsOption = "8,16",
    peer: PeerOption = None,
    peer_device: PeerDeviceOption = "",
    split_step: SplitsOption = 0,
    ubatch: UbatchOption = 512,
    rounds: RoundsOption = 7,
    minutes: MinutesOption = 8.0,
    steps: StepsOption = 0,
    learn: LearnOption = 8192,
    seed: SeedOption = 1,
    load: LoadOption = "none",
    out: OutOption = None,
    commit: CommitOption = "",
    as_json: JsonOption = False,
) -> None:
    """Decode with resident experts, against every static split of the same size in the same run."""
    _residency(
        as_json, model=model, device=device, sequences=numbers(sequences, int), prefill=numbers(prefill, int),
        budgets=numbers(budgets, float), threads=numbers(threads, int), peer=peer, peer_device=peer_device,
        split_step=split_step, ubatch=ubatch, rounds=rounds, minutes=minutes, steps=steps, seed=seed,
        load_mode=load, learn_tokens=learn, out=out, commit=commit,
    )  # fmt: skip


def prefill(
    model: PathArgument,
    device: DeviceOption = "Vulkan0",
    tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,4096",
    budgets: BudgetsOption = "0.25,0.5,0.75",
    threads: ThreadsOption = "8",
    peer: PeerOption = None,
    peer_device: PeerDeviceOption = "",
    split_step: SplitsOption = 0,
    ubatch: UbatchOption = 512,
    rounds: RoundsOption = 7,
    minutes: MinutesOption = 8.0,
    learn: LearnOption = 8192,
    seed: SeedOption = 1,
    load: LoadOption = "none",
    out: OutOption = None,
    commit: CommitOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read prompts with resident experts, against every static split of the same size in the same run."""
    _residency(
        as_json, model=model, device=device, prefill=numbers(tokens, int), budgets=numbers(budgets, float),
        threads=numbers(threads, int), peer=peer, peer_device=peer_device, split_step=split_step, ubatch=ubatch,
        rounds=rounds, minutes=minutes, seed=seed, load_mode=load, learn_tokens=learn, out=out, commit=commit,
    )  # fmt: skip


def tables(
    reports: Annotated[list[Path], typer.Argument(help="JSON files of decode, prefill and live.", show_default=False)],
    into: Annotated[Path | None, typer.Option(help="Page to put them into, between its markers.")] = None,
) -> None:
    """Turn the JSON of decode, prefill and live into Markdown tables."""
    from hotset_tools.bench import tables as bench

    text = bench.tables((path.name, bench.read(path)) for path in reports)
    if into is None:
        typer.echo(text)
    else:
        bench.put_into(into, text)


def _residency(as_json: bool, **settings: Any) -> None:
    from hotset_tools.bench import residency as bench
    from hotset_tools.bench.arms import Settings
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    report = bench.run(Settings(**settings))
    typer.echo(report.model_dump_json(indent=1) if as_json else "\n".join(row.line for row in report.rows))


def numbers(words: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Comma-separated numbers."""
    try:
        return tuple(kind(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise typer.BadParameter(f"{words!r} is no list of numbers") from None
