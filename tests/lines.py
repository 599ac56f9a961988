"""Small linearised programs in numbers, and what their shards need by definition."""

from __future__ import annotations

from hypothesis import strategies as st

from hfusion.passes.cost import Line, Step, Storage, Weight

SIZES = st.integers(0, 9)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Any small line: storages that skip steps, inputs, results, weights used again."""
    count = draw(st.integers(1, 6))
    steps = [Step(f"s{k}", 1.0, 2.0, draw(SIZES), draw(SIZES)) for k in range(count)]
    storages = []
    for _ in range(draw(st.integers(0, 8))):
        born = draw(st.integers(0, count - 1))
        last = draw(st.integers(born, count))
        saved = draw(st.none() | st.integers(born, min(last, count - 1)))
        storages.append(Storage(draw(SIZES), born, last, saved))
    uses = st.sets(st.integers(0, count - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    weights = draw(st.lists(st.builds(Weight, SIZES, uses, st.booleans()), max_size=4))
    return Line(tuple(steps), tuple(storages), tuple(weights))


def crossing(plain: Line, place: int) -> int:
    """Bytes alive at a cut, by definition."""
    if place in (0, len(plain.steps)):
        return 0
    return sum(s.size for s in plain.storages if s.born < place <= s.last)


def need(plain: Line, first: int, last: int, state: float, carried: bool = False) -> int:
    """Bytes of a shard, by definition."""
    inside = range(first, last)
    used = [w for w in plain.weights if any(use in inside for use in w.uses)]
    trained = sum(w.size for w in used if w.trained)
    end = len(plain.steps)
    own = [s for s in plain.storages if s.born in inside]
    # What is saved and used later on is in the cut.
    saved = sum(s.size for s in own if s.saved in inside and (s.last < last or s.last == last == end))
    saved += sum(plain.steps[k].saved for k in inside)
    local = [s for s in plain.storages if not (s.born < first and s.last >= last)]
    peaks = [plain.steps[k].workspace + sum(s.size for s in local if s.born <= k <= s.last) for k in inside]
    # The gradients that a backward begins with stay.
    given = 0 if last == end else sum(s.size for s in own if s.last >= last)
    peaks = [peak + given for peak in peaks[:-1]] + peaks[-1:]
    state_bytes = sum(w.size for w in used) + trained * (1 + carried) + round(trained * state)
    return state_bytes + saved + max(peaks) + crossing(plain, first) + crossing(plain, last)
