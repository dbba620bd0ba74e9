"""What [residency] came to in one engine."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.hotset.placement import Plan
from daemon.messages import Allowance, ResidencySpec


@dataclass(frozen=True)
class Placed:
    """`plan` says who has slots; the experts in them are those of the hot set `file` where one is named.

    `spec` is what is in force; `note` says what else was asked for and cannot be.
    """

    plan: Plan
    file: str
    spec: ResidencySpec
    note: str = ""

    @property
    def gated(self) -> bool:
        """Whether what does not pay is switched off."""
        return self.spec.gate

    @property
    def frozen(self) -> bool:
        """Whether experts stay where they are."""
        return self.spec.frozen

    def upload(self) -> Allowance:
        """Bytes per second that moves may take."""
        asked = f"{self.spec.upload:g} MiB/s"
        if self.frozen:
            return Allowance(asked=asked, effective="0 MiB/s", why="residency.frozen is true")
        return Allowance(asked=asked, effective=asked)
