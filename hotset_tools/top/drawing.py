"""A picture for people: text that wraps, and a grid of layers that fits the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from daemon.hotset.budget import MIB
from daemon.messages import Allowance, ExpertDevice, ExpertLayer, Gate, Residency
from hotset_tools.top import picture
from hotset_tools.top.picture import Picture

_GAP = 3
_BAR, _SMALL_BAR = 10, len("experts")
_STYLES = {"ready": "bold green", "loading": "bold yellow", "restarting": "bold yellow"}
_GATES = {
    "waiting": "not measured yet whether they pay",
    "open": "they pay",
    "closed": "they do not pay and are not used",
}


@dataclass(frozen=True)
class Drawing:
    """One picture. `whole`: all layers, however many lines they take; otherwise what the terminal has room for."""

    picture: Picture
    whole: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = list(_head(self.picture, options.max_width))
        yield from head
        residency = self.picture.now.residency
        if residency is None or not residency.layers:
            return
        used = sum(len(console.render_lines(line, options, pad=False)) for line in head)
        rows = None if self.whole else max(1, (options.height or options.size.height) - used - 1)
        yield from _layers(residency.layers, options.max_width, rows, plain=options.ascii_only)


def _head(shown: Picture, width: int) -> Iterator[Text]:
    now = shown.now
    yield Text.assemble("hotset top  ", f"{shown.url}  ", (now.state, _STYLES.get(now.state, "bold red")))
    if now.reason:
        share = "" if now.progress is None or now.state != "loading" else f" ({now.progress:.0%})"
        yield _line(f"{now.reason}{share}")
    model = now.metrics.labels("hotset_model_info")
    if model:
        yield _line(f"{model.get('name')} ({model.get('architecture')})")
    yield from _flow(_numbers(shown), width)
    if now.residency is not None:
        yield from _residency(now.residency, width)


def _numbers(shown: Picture) -> Iterator[str]:
    """What is going on, each in a few words that stay together."""
    metrics, slots = shown.now.metrics, shown.now.slots
    for name, word in (("hotset_running", "running"), ("hotset_waiting", "waiting")):
        if (count := metrics.total(name)) is not None:
            yield f"{count:.0f} {word}"
    if slots is not None:
        yield f"{sum(slots)}/{len(slots)} sequences busy"
    if (speed := shown.rate(picture.GENERATED)) is not None:
        yield f"{speed:.1f} tokens/s"
    if shown.now.residency is not None:
        yield f"hit rate {_percent(shown.now.residency.hit_rate)}"
    if (moves := shown.rate(picture.MOVES)) is not None:
        yield f"{moves:.1f} moves/s"
    if (upload := shown.rate(picture.UPLOADED)) is not None:
        yield f"{upload / MIB:.2f} MiB/s uploaded"


def _residency(residency: Residency, width: int) -> Iterator[Text]:
    yield _line(f"experts {residency.reason}" if residency.reason else f"experts are {residency.state}")
    yield from _flow(_placement(residency), width)
    if residency.gate.state != "none":
        yield _line(_gate(residency.gate))
    if residency.upload is not None:
        yield _line(f"upload budget: {_allowance(residency.upload)}")
    for device in residency.devices:
        yield from _device(device, width)


def _placement(residency: Residency) -> Iterator[str]:
    if residency.state == "off" and not residency.devices:
        return
    yield f"{residency.placement} placement"
    yield f"{residency.moves} moves"
    yield f"{residency.uploaded_bytes / MIB:.1f} MiB uploaded"
    yield f"{residency.filled:.0%} filled"
    if residency.selftest != "none":
        yield f"self-test {residency.selftest}"


def _gate(gate: Gate) -> str:
    words = [gate.reason or _GATES[gate.state]]
    if gate.on is not None:
        words.append(f"{gate.on:.1f} tokens/s with them")
    if gate.off is not None:
        words.append(f"{gate.off:.1f} tokens/s without")
    return f"gate {gate.state}: {', '.join(words)}"


def _allowance(asked: Allowance) -> str:
    return f"asked {asked.asked}, effective {asked.effective}" + (f": {asked.why}" if asked.why else "")


def _device(device: ExpertDevice, width: int) -> Iterator[Text]:
    words = [
        f"{device.device}: asked {device.asked} ({device.asked_bytes / MIB:.1f} MiB)",
        f"effective {device.effective_bytes / MIB:.1f} MiB",
        f"{device.bytes / MIB:.1f} MiB allocated",
        f"{device.resident}/{device.slots} slots filled",
        f"{device.layers} layers",
        f"hit rate since the start {_share(device.hits, device.hits + device.misses)}",
    ]
    yield from _flow(words, width)
    if device.why:
        yield _line(f"  {device.device}: {device.why}")


def _layers(layers: Sequence[ExpertLayer], width: int, rows: int | None, *, plain: bool) -> Iterator[Text]:
    """As many columns of layers as fit, filled from top to bottom; and why some have no slots."""
    bar = _BAR if width >= len(_title(_BAR)) else _SMALL_BAR
    title, gap = _title(bar), " " * _GAP
    n_columns = min(len(layers), max(1, (width + _GAP) // (len(title) + _GAP)))
    cells = [_cell(layer, bar, plain=plain) for layer in layers]
    n_rows = -(-len(cells) // n_columns)
    reasons = list(_reasons(layers))
    room = n_rows if rows is None else rows - 1 - len(reasons)
    n_shown = n_rows if n_rows <= room else max(1, room - 1)
    yield Text(gap.join([title] * n_columns), style="bold", no_wrap=True, overflow="crop")
    for row in range(n_shown):
        yield Text(gap, no_wrap=True, overflow="crop").join(cells[row::n_rows])
    if n_shown < n_rows:
        left = sum(len(cells[row::n_rows]) for row in range(n_shown, n_rows))
        yield Text(f"{left} more layers do not fit", style="italic")
    yield from reasons


def _title(bar: int) -> str:
    return f"{'layer':>5} {'experts':<{bar}} {'in/slots':>8} {'hits':>5} {'heat':>5}"


def _cell(layer: ExpertLayer, bar: int, *, plain: bool) -> Text:
    """One layer: a bar over its experts, how many slots are in use, recent hit rate, share of the heat in slots."""
    n_in = bar * layer.resident // max(layer.experts, 1)
    n_slots = max(bar * layer.slots // max(layer.experts, 1), n_in)
    if layer.mode == "device":
        n_in = n_slots = bar
    full, empty, rest = "#-." if plain else "█░·"
    drawn = full * n_in + empty * (n_slots - n_in) + rest * (bar - n_slots)
    use = {"cold": "cold", "device": "all"}.get(layer.mode, f"{layer.resident}/{layer.slots}")
    rate = (f"{_percent(layer.hit_rate):>5}", _style(layer.hit_rate))
    heat = _percent(layer.heat.resident_share if layer.heat else None)
    return Text.assemble(f"{layer.layer:>5} ", (drawn, "cyan"), f" {use:>8} ", rate, f" {heat:>5}")


def _style(rate: float | None) -> str:
    if rate is None:
        return ""
    return "green" if rate >= 0.8 else "yellow" if rate >= 0.5 else "red"


def _reasons(layers: Sequence[ExpertLayer]) -> Iterator[Text]:
    by_reason: dict[str, list[int]] = {}
    for layer in layers:
        if layer.reason:
            by_reason.setdefault(layer.reason, []).append(layer.layer)
    for reason, numbers in by_reason.items():
        yield _line(f"layers {ranges(numbers)}: {reason}")


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 5 from 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _flow(words: Iterable[str], width: int) -> Iterator[Text]:
    """Words of several parts side by side; a line breaks between two words."""
    line = ""
    for word in words:
        if line and len(line) + _GAP + len(word) > width:
            yield _line(line)
            line = word
        else:
            line += f"{' ' * _GAP}{word}" if line else word
    if line:
        yield _line(line)


def _line(text: str) -> Text:
    """Names and reasons come from elsewhere: nothing that a terminal would obey."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
