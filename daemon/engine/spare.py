"""What experts may take of the devices as they are now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import psutil

from daemon.hotset import budget, reserve
from daemon.hotset.budget import Budget
from daemon.hotset.reserve import Memory, Pool, Ram, Reserved, Spare
from daemon.messages import Device

NOTHING: Mapping[str, int] = MappingProxyType({})


def by_device(
    devices: Sequence[Device],
    budgets: Mapping[str, Budget],
    reserves: Mapping[str, Reserved],
    held: Mapping[str, int] = NOTHING,
) -> dict[str, Spare]:
    """What each device has to spare; the bytes `held` by slots there already are part of it.

    This process's own limits do not matter: the memory is a driver's or an RPC server's.
    """
    found = psutil.virtual_memory()
    ram = Ram(found.total, found.available)
    return {
        one.name: reserve.spare(
            one.name,
            budget.of_device(budgets, one.name),
            reserve.of_device(reserves, one.name),
            facts(one),
            ram,
            held.get(one.name, 0),
        )
        for one in devices
    }


def facts(device: Device) -> Memory:
    """What is known of a device's memory."""
    card = device.card
    return Memory(
        free=device.memory_free,
        total=device.memory_total,
        integrated=device.kind == "igpu",
        remote=device.remote,
        display=card.display if card else "unknown",
        vram=_pool(card.vram_used, card.vram_total) if card else None,
        gtt=_pool(card.gtt_used, card.gtt_total) if card else None,
    )


def _pool(used: int | None, total: int | None) -> Pool | None:
    return None if used is None or total is None else Pool(used, total)
