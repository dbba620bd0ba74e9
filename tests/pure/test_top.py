"""What `hotset top` makes of what it reads: rates, JSON, pictures of any width, and how it goes on."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from daemon.messages import Allowance, Gate, Residency
from hotset_tools import cli, top
from hotset_tools.top.drawing import Drawing, ranges
from hotset_tools.top.picture import GENERATED, MOVES, UPLOADED, Picture
from hotset_tools.top.polling import Reading, Scrape, State, base_url
from tests.fakes import MOVING

URL = "http://box:8117"
MIB = 1 << 20


def scrape(generated: float = 0, moves: float = 0, uploaded: float = 0, name: str = "tiny-moe") -> Scrape:
    model = {"name": name, "architecture": "qwen3moe", "build": "b1"}
    values = {GENERATED: generated, MOVES: moves, UPLOADED: uploaded, "hotset_running": 2}
    info = {"hotset_model_info": [(model, 1.0)], "hotset_waiting": [({"class": "normal"}, 1.0)]}
    return Scrape({**{key: [({}, float(value))] for key, value in values.items()}, **info})


def reading(at: float = 0.0, state: State = "ready", **changes: Any) -> Reading:
    fields = {"metrics": scrape(), "residency": MOVING, "slots": (True, False)}
    return Reading(at, state, **(fields | changes))


def drawn(shown: Picture, width: int = 100, height: int = 50, *, whole: bool = False, encoding: str = "utf-8") -> str:
    """As text on a terminal of this size."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    Console(file=file, width=width, height=height).print(Drawing(shown, whole=whole))
    return raw.getvalue().decode(encoding)


# -- rates


def test_rates_are_differences_by_the_second() -> None:
    before = reading(10.0, metrics=scrape(100, 4, 3 * MIB))
    shown = Picture(URL, reading(12.0, metrics=scrape(190, 9, 4 * MIB)), before)
    assert [shown.rate(name) for name in (GENERATED, MOVES, UPLOADED)] == [45.0, 2.5, MIB / 2]


@pytest.mark.parametrize(
    "before",
    [
        None,
        reading(2.0, metrics=scrape(5)),
        reading(1.0, metrics=scrape(50)),
        reading(1.0, "away", metrics=Scrape()),
    ],
    ids=["one look", "the same moment", "another service in its place", "nothing was read"],
)
def test_there_is_no_rate_without_two_looks_at_one_counter(before: Reading | None) -> None:
    shown = Picture(URL, reading(2.0, metrics=scrape(10)), before)
    assert shown.rate(GENERATED) is None
    assert "tokens/s" not in drawn(shown).partition("gate")[0]


def test_json_has_every_number_of_the_picture() -> None:
    shown = Picture(URL, reading(2.0, metrics=scrape(30, 8)), reading(1.0, metrics=scrape(10, 5)))
    said = json.loads(json.dumps(shown.as_json()))
    assert (said["url"], said["state"], said["model"]["name"]) == (URL, "ready", "tiny-moe")
    assert (said["running"], said["waiting"], said["sequences"]) == (2, 1, {"busy": 1, "total": 2})
    assert (said["tokens_per_second"], said["moves_per_second"], said["upload_bytes_per_second"]) == (20, 3, 0)
    assert said["counted"] == {
        "generated_tokens": 30, "hits": None, "misses": None, "moves": 8, "uploaded_bytes": 0,
    }  # fmt: skip
    assert Residency.model_validate(said["residency"]) == MOVING


def test_json_of_a_service_that_is_away_has_the_same_keys() -> None:
    away = Picture(URL, Reading(1.0, "away", "nobody answers")).as_json()
    assert away.keys() == Picture(URL, reading()).as_json().keys()
    assert (away["state"], away["reason"], away["residency"], away["model"]) == ("away", "nobody answers", None, None)


# -- pictures


def test_a_picture_says_everything() -> None:
    shown = drawn(Picture(URL, reading(2.0, metrics=scrape(90, 2, MIB)), reading(1.0)))
    for words in (
        URL,
        "ready",
        "tiny-moe (qwen3moe)",
        "2 running   1 waiting   1/2 sequences busy   90.0 tokens/s   hit rate 75%   2.0 moves/s\n",
        "1.00 MiB/s uploaded\n",
        "experts on: 8 of 32 experts",
        "live placement   9 moves",
        "50% filled   self-test passed",
        "gate open: it pays, 20.0 tokens/s with them, 11.5 tokens/s without",
        "upload budget: asked 64 MiB/s, effective 60 MiB/s: the bus is slow",
        "Vulkan0: asked 50%",
        "7/8 slots filled",
        "hit rate since the start 75.0%",
        "Vulkan0: so much is free",
        "    0 ████░·····      7/8     -     -",
        "    1 ████░·····      7/8   75%   80%",
    ):
        assert words in shown


@pytest.mark.parametrize("width", [10, 20, 33, 40, 79, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    layers = [layer.model_copy(update={"layer": number}) for number in range(30) for layer in MOVING.layers[:1]]
    shown = Picture(URL, reading(residency=MOVING.model_copy(update={"layers": layers})))
    lines = drawn(shown, width, whole=True).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("███") for line in lines) == 30


@pytest.mark.parametrize(("height", "n_left"), [(60, 0), (30, 27), (5, 39)])
def test_layers_that_do_not_fit_are_said_to_be_there(height: int, n_left: int) -> None:
    layers = [MOVING.layers[0].model_copy(update={"layer": number}) for number in range(40)]
    shown = Picture(URL, reading(residency=MOVING.model_copy(update={"layers": layers})))
    text = drawn(shown, 60, height)
    assert (f"{n_left} more layers do not fit" in text) == (n_left > 0)
    assert text.count("7/8     -") == 40 - n_left
    assert height == 5 or len(text.splitlines()) <= height
    assert "do not fit" not in drawn(shown, 60, height, whole=True)


def test_a_terminal_that_knows_ascii_alone() -> None:
    text = drawn(Picture(URL, reading()), encoding="ascii")
    assert "    0 ####-.....      7/8" in text


def test_layers_of_every_mode_and_why_some_have_no_slots() -> None:
    cold = MOVING.layers[0].model_copy(update={"mode": "cold", "slots": 0, "resident": 0, "reason": "it is odd"})
    whole = MOVING.layers[0].model_copy(update={"mode": "device", "slots": 0, "resident": 0, "layer": 9})
    full = MOVING.layers[0].model_copy(update={"mode": "full", "slots": 16, "resident": 16, "layer": 10})
    odd = [cold.model_copy(update={"layer": number}) for number in (0, 1, 2, 5)]
    text = drawn(Picture(URL, reading(residency=MOVING.model_copy(update={"layers": [*odd, whole, full]}))))
    assert "    0 ··········     cold" in text
    assert "    9 ██████████      all" in text
    assert "   10 ██████████    16/16" in text
    assert "layers 0-2, 5: it is odd" in text


def test_ranges() -> None:
    assert (ranges([]), ranges([4]), ranges([3, 1, 2, 2, 7])) == ("", "4", "1-3, 7")


def test_residency_that_is_off_and_dense_models_are_told_by_their_reason() -> None:
    dense = Residency(reason="off: not applicable: the model is dense")
    text = drawn(Picture(URL, reading(residency=dense)))
    assert "experts off: not applicable: the model is dense" in text
    assert "hit rate -" in text
    for word in ("placement", "slots", "gate", "budget", "layer"):
        assert word not in text


def test_a_gate_says_why_even_without_a_reason() -> None:
    closed = MOVING.model_copy(update={"gate": Gate(state="closed"), "upload": Allowance(asked="auto", effective="9")})
    text = drawn(Picture(URL, reading(residency=closed)))
    assert "gate closed: they do not pay and are not used\n" in text
    assert "upload budget: asked auto, effective 9\n" in text


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "stopped", "away", "refused", "unknown"])
def test_a_service_that_is_not_ready(state: State) -> None:
    shown = drawn(Picture(URL, Reading(0.0, state, "because", 0.25)))
    assert state in shown
    assert ("because (25%)" if state == "loading" else "because\n") in shown


def test_nothing_that_a_terminal_obeys_is_passed_on() -> None:
    evil = "[red]\x1b[2J\r\x07"
    residency = MOVING.model_copy(update={"reason": evil})
    text = drawn(Picture(URL, reading(metrics=scrape(name=evil), residency=residency, reason=evil)))
    assert not {"\x1b", "\r", "\x07"} & set(text)
    assert text.count("[red]?[2J") == 3, "nor taken for markup"


# -- going on


class Story:
    """Readings one after the other; the last wait is an interrupt."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = iter(readings)
        self._left = len(readings)
        self.n_waits = 0

    def read(self) -> Reading:
        self._left -= 1
        return next(self._readings)

    def wait(self) -> None:
        self.n_waits += 1
        if not self._left:
            raise KeyboardInterrupt


def watched(console: Console | None, *readings: Reading, as_json: bool = False) -> Story:
    story = Story(*readings)
    with pytest.raises(KeyboardInterrupt):
        top.watch(URL, story.read, story.wait, as_json=as_json, console=console)
    return story


def test_it_keeps_trying_while_the_service_is_away() -> None:
    out = io.StringIO()
    watched(
        Console(file=out, width=100),
        Reading(0, "away", "nobody answers"),
        reading(1),
        Reading(2, "restarting", "it died"),
    )
    shown = out.getvalue()
    assert [shown.index(word) for word in ("nobody answers", "tiny-moe", "it died")] == sorted(
        shown.index(word) for word in ("nobody answers", "tiny-moe", "it died")
    )


def test_without_a_terminal_pictures_follow_each_other_in_plain_text() -> None:
    out = io.StringIO()
    watched(Console(file=out, width=100), reading(0, metrics=scrape(5)), reading(1, metrics=scrape(12)))
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("hotset top") == 2
    assert "7.0 tokens/s" in out.getvalue()


def test_a_terminal_is_used_in_place_and_given_back() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=True, _environ={"TERM": "xterm"})
    watched(console, reading(0), Reading(1, "away", "nobody answers"))
    assert out.getvalue().startswith("\x1b[?1049h")
    assert "nobody answers" in out.getvalue()
    assert "\x1b[?1049l" in out.getvalue(), "the screen as it was"
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l"), "with its cursor"


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    watched(None, reading(0, metrics=scrape(5)), Reading(1, "away"), reading(2, metrics=scrape(9)), as_json=True)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["state"] for one in said] == ["ready", "away", "ready"]
    assert said[2]["tokens_per_second"] is None, "it was away in between"


@pytest.mark.parametrize("as_json", [False, True])
def test_once_looks_twice_at_a_service_that_is_ready(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    story = Story(reading(0, metrics=scrape(5)), reading(2, metrics=scrape(9)), reading(3))
    assert top.show_once(URL, story.read, story.wait, as_json=as_json)
    assert story.n_waits == 1
    text = capsys.readouterr().out
    assert (json.loads(text)["tokens_per_second"] == 2.0) if as_json else ("2.0 tokens/s" in text)


@pytest.mark.parametrize(
    "readings",
    [
        [Reading(0, "away", "nobody answers")],
        [reading(0), Reading(1, "away", "nobody answers")],
        [Reading(0, "ready", "nobody answers"), reading(1)],
    ],
    ids=["away", "lost between the looks", "ready, but not all of it"],
)
def test_once_tells_a_service_that_is_not_ready(capsys: pytest.CaptureFixture[str], readings: list[Reading]) -> None:
    story = Story(*readings, reading(9))
    assert not top.show_once(URL, story.read, story.wait, as_json=False)
    assert "nobody answers" in capsys.readouterr().out


# -- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`hotset top` with a service of one reading; calls it with words and gives the result."""
    asked: list[tuple[str, str]] = []

    class FakeService:
        reading = Reading(0, "away", "nobody answers")

        def __init__(self, url: str, key: str) -> None:
            self.url = url
            asked.append((url, key))

        def read(self) -> Reading:
            return self.reading

    def run(*words: str, ready: bool = False, **options: Any) -> Any:
        FakeService.reading = reading() if ready else Reading(0, "away", "nobody answers")
        result = CliRunner().invoke(cli.make_app("top"), ["top", *words], **options)
        return result, asked[-1] if asked else None

    monkeypatch.setattr(top, "Service", FakeService)
    monkeypatch.setattr(top, "time", type("Time", (), {"sleep": staticmethod(_sleep(itertools.count()))}))
    return run


def _sleep(numbers: Iterator[int]) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        if next(numbers) >= 3:
            raise KeyboardInterrupt

    return sleep


def test_exit_codes(command: Callable[..., Any]) -> None:
    assert command("--once")[0].exit_code == 1
    assert command("--once", ready=True)[0].exit_code == 0
    result, _ = command()
    assert (result.exit_code, result.output.count("nobody answers")) == (0, 3), "Ctrl-C is how it is left"


def test_where_the_key_comes_from(command: Callable[..., Any]) -> None:
    assert command("--once")[1] == ("http://127.0.0.1:8117", "")
    assert command("--once", env={"HOTSET_KEY": "from-the-environment"})[1][1] == "from-the-environment"
    assert command("--once", "--key", "given", env={"HOTSET_KEY": "other"})[1][1] == "given"


@pytest.mark.parametrize(
    "words",
    [["--url", "box:8117"], ["--url", ""], ["--url", "http://"], ["--url", "http://box:port"], ["--url", "ftp://box"],
     ["--url", "http://box/?a=1"], ["--url", "http://a:b@box"], ["--url", "http://b x"], ["--url", "http://bóx"],
     ["--key", "two words"], ["--key", "schlüssel"], ["--key", "a\nb"], ["--interval", "0"], ["--interval", "4000"],
     ["--interval", "nan"]],
)  # fmt: skip
def test_what_cannot_be_used_is_a_usage_error(command: Callable[..., Any], words: list[str]) -> None:
    result, asked = command(*words, "--once")
    assert (result.exit_code, asked) == (2, None)


@pytest.mark.parametrize("text", ["http://box:80", "http://box:80/", "http://box:80/v1", "http://box:80/v1/"])
def test_an_address_as_people_have_it_at_hand(text: str) -> None:
    assert base_url(text) == "http://box:80"


def test_an_address_with_a_path_and_ipv6() -> None:
    assert base_url("https://box/llm/v1") == "https://box/llm"
    assert base_url("http://[::1]:8117") == "http://[::1]:8117"
