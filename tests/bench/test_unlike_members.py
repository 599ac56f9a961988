from hfusion.bench.unlike_members import measure


def test_every_way_is_measured() -> None:
    found = measure(members=2, inputs=4, samples=3, steps=1, repeats=1)
    assert list(found) == ["loop", "loop, a process for each core", "hf.Population, one process", "hf.Population"]
    assert all(milliseconds > 0 for milliseconds in found.values())
