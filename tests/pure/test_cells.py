"""Cells that sequences share, against sets that name every one of them; common beginnings."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine.cells import Cells
from daemon.engine.sharing import LEAST_SHARED, best_match, common_beginning

N_IDS = 5


@settings(deadline=None)
@given(st.data())
def test_counts_are_those_of_the_cells_themselves(data: st.DataObject) -> None:
    cells, held = Cells(1000), {seq_id: list[object]() for seq_id in range(N_IDS)}
    for _ in range(data.draw(st.integers(1, 30))):
        seq_id, act = data.draw(st.integers(0, N_IDS - 1)), data.draw(st.sampled_from(["grow", "share", "release"]))
        if act == "grow":
            n = data.draw(st.integers(1, 20))
            cells.grow(seq_id, n)
            held[seq_id] += [object() for _ in range(n)]
        elif act == "release":
            cells.release(seq_id)
            held[seq_id] = []
        else:
            source = data.draw(st.integers(0, N_IDS - 1))
            if source != seq_id and held[source] and not held[seq_id]:
                n = data.draw(st.integers(1, len(held[source])))
                cells.share(source, seq_id, n)
                held[seq_id] = held[source][:n]
        assert cells.used == 1000 - cells.free == len({id(cell) for one in held.values() for cell in one})
        assert [cells.length(one) for one in range(N_IDS)] == [len(one) for one in held.values()]
    gone = data.draw(st.sets(st.integers(0, N_IDS - 1)))
    stay = {id(cell) for one, cells_of in held.items() if one not in gone for cell in cells_of}
    everything = {id(cell) for cells_of in held.values() for cell in cells_of}
    assert cells.freed_by(gone) == len(everything - stay)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 40))
def test_common_beginnings(first: list[int], second: list[int], shared: int) -> None:
    second = first[:shared] + second
    n = common_beginning(first, second)
    assert first[:n] == second[:n]
    assert n == min(len(first), len(second)) or first[n] != second[n]


def test_the_longest_beginning_counts_and_the_last_token_is_left() -> None:
    prompt = list(range(200))
    others = [prompt[: LEAST_SHARED - 1], prompt[:100], [*prompt[:150], 7], prompt[:150]]
    assert best_match(prompt, others) == (2, 150)
    assert best_match(prompt, [prompt]) == (0, 199)
    assert best_match(prompt, others[:1]) is None
    assert best_match(prompt[: LEAST_SHARED + 1], [prompt]) == (0, LEAST_SHARED)
    assert best_match(prompt[:LEAST_SHARED], [prompt]) is None
    assert best_match(prompt, []) is None
