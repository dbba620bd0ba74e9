"""How much context, and how many cells and threads; pure."""

from __future__ import annotations

DEFAULT_CONTEXT = 32_768
KV_BYTES_FOR_ALL = 1 << 30


def context_length(asked: int, n_ctx_train: int) -> int:
    """Tokens that one sequence may have: what was asked for, else the model's own length up to `DEFAULT_CONTEXT`."""
    return asked or min(n_ctx_train, DEFAULT_CONTEXT) or DEFAULT_CONTEXT


def kv_cells(asked: int, n_ctx: int, max_sequences: int, bytes_per_token: int) -> int:
    """Cells of the unified buffer: what was asked for, else a context for each sequence within `KV_BYTES_FOR_ALL`.

    Never less than `n_ctx`: one sequence may always use its whole context.
    """
    if asked:
        return max(asked, n_ctx)
    affordable = KV_BYTES_FOR_ALL // bytes_per_token if bytes_per_token else n_ctx * max_sequences
    return max(n_ctx, min(n_ctx * max_sequences, affordable))


def bytes_on_devices(free: int, share_of_layers: float, other_bytes: int, expert_bytes: int) -> int:
    """Bytes of weights that devices with `free` bytes take off the host: `share_of_layers` of what goes to them."""
    return min(free, round(min(1.0, share_of_layers) * (other_bytes + expert_bytes)))


def threads(asked: int, n_physical: int | None, n_allowed: int) -> int:
    """Threads to compute with: what was asked for, else one per physical core that this process may run on."""
    return asked or max(1, min(n_physical or n_allowed, n_allowed))
