"""A failover loses what `explain` says, with `WAIT` and without it, behind sentinels and in a cluster."""

import os
from pathlib import Path

import msgspec
import pytest

from tests.stores.redis.failover import FILE, PLACES, KeptFailovers, measure

SOAK = bool(os.environ.get("SEMEL_SOAK"))


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.parametrize("cut", [True, False] if SOAK else [True])
@pytest.mark.parametrize("name", PLACES)
def test_a_failover_loses_what_explain_says(name: str, tmp_path: Path, *, cut: bool) -> None:
    without, waiting = measure(name, tmp_path, cut=cut)
    assert without.as_explained, without
    assert waiting.as_explained, waiting
    if cut:  # something was lost, and only one of the two knew
        assert without.behind > 0
        assert waiting.behind > 0
        assert waiting.reported >= waiting.lost


def test_the_figures_that_are_kept_are_what_explain_says() -> None:
    kept = msgspec.json.decode(FILE.read_bytes(), type=KeptFailovers)
    assert [(row.place, row.replica) for row in kept.rows] == [
        (name, replica) for name in PLACES for replica in ("follows", "cut off") for _ in range(2)
    ]
    assert all(row.as_explained for row in kept.rows)
