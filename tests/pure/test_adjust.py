"""What a running engine is told when the configuration changes."""

from __future__ import annotations

from daemon.app import adjuster
from daemon.config import Config
from daemon.messages import Adjust, ResidencySpec, Scheduling


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


def test_an_engine_is_told_of_the_sections_that_changed_and_of_no_others() -> None:
    sent: list[Adjust] = []
    adjust = adjuster(sent.append, config(scheduling={"decode_share": 0.4}))
    adjust(config(scheduling={"decode_share": 0.4}, queue={"max_waiting": 1}))
    assert sent == []
    adjust(config(scheduling={"decode_share": 0.3}))
    assert sent == [Adjust(scheduling=Scheduling(decode_share=0.3))]
    adjust(config(scheduling={"decode_share": 0.3}, residency={"upload": 7.0}))
    assert isinstance(sent[1].residency, ResidencySpec)
    assert (sent[1].residency.upload, sent[1].scheduling) == (7.0, None)


def test_what_was_told_is_what_the_next_change_is_compared_with() -> None:
    sent: list[Adjust] = []
    adjust = adjuster(sent.append, config())
    for share in (0.3, 0.3, 0.5):
        adjust(config(scheduling={"decode_share": share}))
    assert [one.scheduling.decode_share for one in sent if one.scheduling] == [0.3, 0.5]
