"""Benchmarks: each measures one thing, against its baseline in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hotset_tools.bench import live_commands, residency_commands, soak_command
from hotset_tools.bench.load import command as load_command

app = typer.Typer(no_args_is_help=True)

TokensOption = Annotated[int, typer.Option(min=1, max=4000, help="Tokens that each of them generates.")]
JsonOption = residency_commands.JsonOption


app.command("make-model")(residency_commands.make_model)
app.command("check-model")(residency_commands.check_model)
app.command("decode")(residency_commands.decode)
app.command("prefill")(residency_commands.prefill)
app.command("live")(live_commands.live)
app.command("load")(load_command.load)
app.command("soak")(soak_command.soak)
app.command("tables")(residency_commands.tables)


@app.command("engine")
def engine_command(
    model: Annotated[Path | None, typer.Option(help="Measure with this model instead of a generated one.")] = None,
    sequences: Annotated[int, typer.Option(min=1, max=64, help="Sequences that decode together.")] = 8,
    tokens: TokensOption = 256,
    as_json: JsonOption = False,
) -> None:
    """Time that a step takes outside llama.cpp, over a generated model with 150k tokens of vocabulary."""
    from hotset_tools.bench import engine as bench
    from hotset_tools.bench.models import generated, use_native_build

    use_native_build()
    result = bench.run(model or generated("overhead"), n_sequences=sequences, n_tokens=tokens)
    typer.echo(json.dumps(result.as_json(), indent=2) if as_json else bench.table(result))


@app.command("share")
def share_command(
    model: Annotated[Path, typer.Argument(help="GGUF file.")],
    device: Annotated[str, typer.Option(help="As engine.device.")] = "auto",
    vram: Annotated[str, typer.Option(help="As residency.vram.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, max=1024, help="As engine.threads.")] = 0,
    chats: Annotated[int, typer.Option(min=1, max=32, help="Answers that are decoded all the time.")] = 4,
    prompt: Annotated[int, typer.Option(min=64, max=65_536, help="Tokens of each long prompt.")] = 4096,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long each of seven phases takes.")] = 15.0,
    out: Annotated[Path | None, typer.Option(help="JSON file, written anew.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What a stream of long prompts and chats leave each other of the speed that each has alone."""
    from hotset_tools.bench import share as bench
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    load = bench.Load(chats, prompt, seconds)
    result = bench.run(bench.configured(model, device, vram, threads, load), load)
    text = json.dumps(result, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text if as_json else bench.table(result))


@app.command("streams")
def streams_command(
    model: Annotated[Path | None, typer.Option(help="Measure with this model instead of the embedded one.")] = None,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Clients that stream at once.")] = 8,
    tokens: TokensOption = 256,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each server is measured.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of streaming clients, hotsetd and llama-server in turn (needs `hotset build --peer`)."""
    from hotset_tools.bench import streams as bench
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    result = bench.run(model, n_clients=clients, n_tokens=tokens, n_rounds=rounds)
    typer.echo(json.dumps(result.as_json(), indent=2) if as_json else bench.table(result))
