"""The subcommand `hotset bench live`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotset_tools.bench.residency_commands import (
    BudgetsOption,
    CommitOption,
    DeviceOption,
    JsonOption,
    LearnOption,
    LoadOption,
    MinutesOption,
    OutOption,
    PathArgument,
    PeerDeviceOption,
    PeerOption,
    RoundsOption,
    SeedOption,
    SplitsOption,
    StepsOption,
    ThreadsOption,
    UbatchOption,
    numbers,
)


def live(
    model: PathArgument,
    device: DeviceOption = "Vulkan0",
    sequences: Annotated[str, typer.Option(help="How many sequences decode together.")] = "1",
    budgets: BudgetsOption = "0.25,0.5",
    threads: ThreadsOption = "8,16",
    peer: PeerOption = None,
    peer_device: PeerDeviceOption = "",
    topic_tokens: Annotated[
        int, typer.Option(min=2, max=100_000, help="Tokens of a visit to a topic, on average.")
    ] = 200,
    budget_change: Annotated[bool, typer.Option(help="Change budgets while four sequences decode, too.")] = False,
    budget_seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long each of these is kept.")] = 3.0,
    restart: Annotated[bool, typer.Option(help="Compare hit rates after a warm and a cold start, too.")] = False,
    split_step: SplitsOption = 0,
    ubatch: UbatchOption = 512,
    rounds: RoundsOption = 7,
    minutes: MinutesOption = 3.0,
    steps: StepsOption = 0,
    learn: LearnOption = 8192,
    seed: SeedOption = 1,
    load: LoadOption = "none",
    out: OutOption = None,
    commit: CommitOption = "",
    as_json: JsonOption = False,
) -> None:
    """Decode what switches topics, with experts that follow it, a frozen set of other topics, and the best split."""
    from hotset_tools.bench import live as bench
    from hotset_tools.bench.arms import Settings
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    settings = Settings(
        model=model, device=device, sequences=numbers(sequences, int), budgets=numbers(budgets, float),
        threads=numbers(threads, int), peer=peer, peer_device=peer_device, split_step=split_step, ubatch=ubatch,
        rounds=rounds, minutes=minutes, steps=steps, seed=seed, load_mode=load, learn_tokens=learn, out=out,
        commit=commit,
    )  # fmt: skip
    traffic = bench.Traffic(topic_tokens, budget_seconds=budget_seconds if budget_change else 0, restart=restart)
    report = bench.run(settings, traffic)
    lines = [row.line for row in report.rows]
    lines += [change.line for change in report.budget_changes.changes] if report.budget_changes else []
    lines += [report.restart.line] if report.restart else []
    typer.echo(report.model_dump_json(indent=1) if as_json else "\n".join(lines))
