"""Small linearised programs in numbers, and what their shards need by definition."""

from __future__ import annotations

from hypothesis import strategies as st

from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight

SIZES = st.integers(0, 9)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Any small line: storages that skip steps, inputs, results, weights used again."""
    count = draw(st.integers(1, 6))
    steps = [OperatorCost(f"s{k}", 1.0, 2.0, draw(SIZES), draw(SIZES), draw(SIZES)) for k in range(count)]
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


def peak(plain: Line, first: int, last: int) -> int:
    """The most bytes alive while the backward of a shard runs, beside what is loaded and at its cuts, by definition."""
    end, inside = len(plain.steps), range(first, last)
    own = [s for s in plain.storages if s.born in inside]
    cut = [] if last == end else [s for s in own if s.last >= last]
    local = [s for s in plain.storages if not (s.born < first and s.last >= last)]
    found = []
    for step in inside:
        values = sum(s.size for s in local if s.born <= step <= s.last or (s in cut and s.born > step))
        saved = sum(s.size for s in own if s not in cut and s.saved is not None and s.saved <= step)
        saved += sum(plain.steps[k].saved for k in range(first, step + 1))
        earned = [w for w in plain.weights if w.trained and any(use in inside and use >= step for use in w.uses)]
        own_bytes = plain.steps[step].workspace + plain.steps[step].summed
        found.append(own_bytes + values + saved + sum(w.size for w in earned))
    owed = [w for w in plain.weights if w.trained and w.uses[0] < last <= w.uses[-1]]
    return max(found) + sum(w.size for w in owed)


def need(plain: Line, first: int, last: int, state: float, carried: bool = False) -> int:
    """Bytes of a shard, by definition."""
    used = [w for w in plain.weights if any(use in range(first, last) for use in w.uses)]
    trained = sum(w.size for w in used if w.trained)
    kept = round(trained * state) + trained * carried
    forward = workspace(plain, first, last)
    if last == len(plain.steps):
        forward += kept + activations(plain, first, last)
    cuts = crossing(plain, first) + crossing(plain, last)
    return sum(w.size for w in used) + cuts + max(kept + peak(plain, first, last), forward)


def activations(plain: Line, first: int, last: int) -> int:
    """Bytes that a shard saves for its backward beside its cuts, by definition."""
    own = [s for s in plain.storages if first <= s.born < last and s.saved is not None]
    inside = sum(s.size for s in own if s.last < last or last == len(plain.steps))
    return inside + sum(step.saved for step in plain.steps[first:last])


def workspace(plain: Line, first: int, last: int) -> int:
    """The most bytes alive while the forward of a shard runs, beside its cuts; of the last, beside what it saves."""
    end = len(plain.steps)
    own = [s for s in plain.storages if first <= s.born < last and (s.last < last or last == end)]
    beside = [s for s in own if s.saved is None] if last == end else own
    found = (sum(s.size for s in beside if s.born <= step <= s.last) for step in range(first, last))
    return max(plain.steps[step].workspace + size for step, size in zip(range(first, last), found, strict=True))
