"""`hotset bench tables`: the JSON of residency benchmarks as tables for docs/benchmarks.md. Pure but for files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from daemon.errors import HotsetError
from hotset_tools.bench.rows import BudgetChanges, Report, Restart, Row
from hotset_tools.output import write

BEGIN, END = "<!-- begin: hotset bench tables -->", "<!-- end: hotset bench tables -->"
_WIDTH = 120

DECODE = ("budget", "sequences", "placement", "hits", "tok/s", "best static", "ratio (95 %)", "same scheduler",
          "model", "limit")  # fmt: skip
LIVE = ("budget", "sequences", "placement", "hits", "moves/token", "MiB/s", "tok/s", "best static", "ratio (95 %)",
        "vs frozen (95 %)", "upload cost (95 %)")  # fmt: skip
CHANGES = ("budget", "longest gap, ms", "slots after, s", "VRAM after, s", "VRAM, MiB", "tokens of each")
RESTART = ("topic", "before", "warm start", "no restart", "cold start")
PREFILL = ("budget", "prompt", "placement", "tok/s", "best static", "ratio (95 %)", "same scheduler")


def read(path: Path) -> Report:
    """A report.

    Raises:
        HotsetError: there is no such file, or it is no report.
    """
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise HotsetError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise HotsetError(f"{path} is no report of a residency benchmark: {error.errors()[0]['msg']}") from None


def tables(reports: Iterable[tuple[str, Report]]) -> str:
    """Markdown of named reports, one section each."""
    return "\n\n".join("\n".join(_section(name, report)) for name, report in reports)


def put_into(page: Path, text: str) -> None:
    """Replace what is between the markers of the page at this path.

    Raises:
        HotsetError: it cannot be read or written, or lacks them; it is as it was then.
    """
    try:
        before = page.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HotsetError(f"{page} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    write(page, replace_between(before, text))


def replace_between(page: str, text: str) -> str:
    """`page` with `text` between its two markers.

    Raises:
        HotsetError: the page lacks them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise HotsetError(f"the page lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}" if text else f"{before}{BEGIN}\n{END}{after}"


def _section(name: str, report: Report) -> Iterator[str]:
    head = report.head
    yield f"### {head['date']}: {_device(head)}, {head['model']['routing']} routing (`{name}`)"
    yield ""
    yield textwrap.fill(_circumstances(head), _WIDTH, break_on_hyphens=False, break_long_words=False)
    if any(row.mode == "live" for row in report.rows):
        yield ""
        yield from _table(LIVE, [_live_cells(row) for row in report.rows])
    else:
        yield from _by_phase(report)
    if report.budget_changes is not None:
        yield from _changes(report.budget_changes)
    if report.restart is not None:
        yield from _restart(report.restart)
    if report.prices:
        yield ""
        yield from _table(
            ("sequences", "threads", "g, us", "p, us", "hand-over, us", "GPU, GB/s", "CPU, GB/s"),
            [
                (str(price.sequences), str(price.threads), *(f"{1e6 * one:.0f}" for one in (price.fixed, price.partial,
                 price.cold)), _rate(price.gpu_bandwidth), _rate(price.cpu_bandwidth))
                for price in report.prices
            ],
        )  # fmt: skip
    if report.notes:
        yield ""
        yield from (f"- {note}" for note in report.notes)


def _by_phase(report: Report) -> Iterator[str]:
    for phase, columns in (("decode", DECODE), ("prefill", PREFILL)):
        rows = [row for row in report.rows if row.phase == phase]
        if rows:
            yield ""
            yield from _table(columns, [_cells(row) for row in rows])


def _live_cells(row: Row) -> tuple[str, ...]:
    static = row.best_static
    return (
        f"{row.budget:.0%}",
        str(row.sequences),
        _placement(row),
        _share(row.hit_rate),
        "-" if row.moves_per_token is None else f"{row.moves_per_token:.1f}",
        "-" if row.upload_mib_per_second is None else f"{row.upload_mib_per_second:.0f}",
        f"{row.tokens_per_second:.1f} (t {row.threads})",
        f"{static.tokens_per_second:.1f} (n {static.cpu_moe_layers}, t {static.threads})",
        _interval(row.ratio_vs_best_static, row.ci),
        _interval(row.ratio_vs_frozen, row.ci_vs_frozen),
        _interval(row.upload_cost, row.ci_upload_cost, ".1%"),
    )


def _changes(found: BudgetChanges) -> Iterator[str]:
    yield ""
    yield textwrap.fill(
        f"Budgets that change while {found.sequences} sequences decode with {found.threads} threads; without a change "
        f"the gap between two steps was {found.usual_gap_ms:.0f} ms, {found.quiet_gap_ms:.0f} ms at most:",
        _WIDTH,
    )
    yield ""
    yield from _table(
        CHANGES,
        [
            (
                f"{one.before} to {one.after}",
                f"{one.longest_gap_ms:.0f}",
                _share(one.seconds_to_slots),
                _share(one.seconds_to_memory),
                f"{(one.free_bytes[0] - one.free_bytes[1]) / 2**20:+.0f}",
                str(min(one.tokens)),
            )
            for one in found.changes
        ],
    )


def _restart(found: Restart) -> Iterator[str]:
    yield ""
    yield textwrap.fill(
        f"Hit rates of {found.tokens} tokens with {found.budget:.0%}, before a restart and of another prompt after it:",
        _WIDTH,
    )
    yield ""
    rates = zip(found.topics, found.before, found.warm, found.without, found.cold, strict=True)
    yield from _table(RESTART, [(str(topic), *map(_share, each)) for topic, *each in rates])


def _interval(value: float | None, ci: tuple[float, float] | None, form: str = ".2f") -> str:
    if value is None or ci is None:
        return "-"
    between = " to " if form.endswith("%") else "-"
    return f"{value:{form}} ({ci[0]:{form}}{between}{ci[1]:{form}})"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = _interval(row.ratio_vs_best_static, row.ci)
    static = row.best_static
    best = f"{static.tokens_per_second:.1f} (n {static.cpu_moe_layers}, t {static.threads})"
    same = _share(row.ratio_vs_same_scheduler)
    speed = f"{row.tokens_per_second:.1f} (t {row.threads})"
    if row.phase == "prefill":
        return f"{row.budget:.0%}", str(row.tokens), _placement(row), speed, best, ratio, same
    hits, model, limit = (_share(value) for value in (row.hit_rate, row.measured_over_model, row.measured_over_limit))
    return f"{row.budget:.0%}", str(row.sequences), _placement(row), hits, speed, best, ratio, same, model, limit


def _placement(row: Row) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in row.layers.items() if count)
    return f"off ({kinds})" if row.mode == "off" else f"{row.mode}, {row.plan} ({kinds})"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _device(head: dict[str, Any]) -> str:
    return ", ".join(device["description"] for device in head["hardware"]["devices"])


def _circumstances(head: dict[str, Any]) -> str:
    hardware, model, settings = head["hardware"], head["model"], head["settings"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['ram'] / 2**30:.0f} GiB"
    card = f"{settings['device']}, driver {hardware['driver'] or 'unknown'}"
    shape = f"{model['layers']} layers, {model['experts']} experts, top {model['top_k']}"
    sizes = f"{model['expert_bytes'] / 1e9:.1f} GB of experts and {model['other_bytes'] / 1e9:.1f} GB of other weights"
    threads = ", ".join(map(str, settings["threads"]))
    series = head["build"]["ours"].get("series", "unknown")
    visits = f" Visits of {head['traffic']['tokens_per_visit']} tokens to a topic." if "traffic" in head else ""
    return (
        f"{machine}; {card}. {model['name']}: {model['architecture']}, {shape}, {sizes}. Library: series {series}. "
        f"Stock: {head['stock']}. "
        f"{settings['rounds']} rounds, ubatch {settings['ubatch']}, threads {threads}, load {settings['load']}, "
        f"seed {settings['seed']}.{visits}"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.0f}"
