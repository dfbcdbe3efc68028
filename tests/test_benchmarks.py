"""The stored figures: the pages show them, and the check reports losses beyond the noise, and nothing else."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import growth, page, peers, suite

ROOT = Path(__file__).resolve().parents[1]


def stored() -> page.Report:
    return msgspec.json.decode(
        (ROOT / "benchmarks" / "results" / "suite.json").read_bytes(), type=page.Report
    )


def test_the_page_shows_the_stored_figures() -> None:
    shown = (ROOT / "docs" / "explain" / "benchmarks.md").read_text(encoding="utf-8")
    assert shown == page.page_text(stored()), "python -m benchmarks.suite --render"


def test_the_readme_shows_the_stored_figures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == page.readme_text(stored(), readme), "python -m benchmarks.suite --render"


def row(ratio: float, least: float, noise: float = 0.0) -> page.Row:
    return page.Row(
        store="redis", shape="one by one", contender="semel", phase="first", rate=1, client_us=1, server_us=1,
        ratio=ratio, ratio_least=least, noise=noise,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kept", "now", "lost"),
    [
        (row(1.0, 1.0), row(1.2, 1.15), True),
        (row(1.0, 1.0), row(1.2, 1.05), False),  # one round was as before: other work disturbed the rest
        (row(1.0, 1.0), row(1.05, 1.05), False),
        (row(1.0, 1.0, noise=0.3), row(1.3, 1.25), False),
        (row(1.0, 1.0, noise=0.3), row(1.5, 1.4), True),
    ],
)
def test_a_loss_is_beyond_the_noise_in_every_round(kept: page.Row, now: page.Row, *, lost: bool) -> None:
    assert bool(peers.losses([kept], [now])) is lost


def point(kept: float, store: str = "sqlite") -> growth.Point:
    return growth.Point(store=store, held=10_000, rate=1, client_us=1, server_us=0, bytes_each=1, kept=kept)


def test_growth_is_lost_if_the_best_round_keeps_less() -> None:
    assert not growth.losses([point(0.8)], growth.best([[point(0.4)], [point(0.7)]]))
    assert growth.losses([point(0.8)], growth.best([[point(0.4)], [point(0.5)]]))


def test_a_curve_that_is_measured_again_replaces_that_curve_only(tmp_path: Path) -> None:
    kept = stored()
    kept.growth, kept.loads, kept.growth_loads = [point(1.0), point(0.9, "redis")], (0.1, 1.0), (0.1, 1.0)
    (tmp_path / "suite.json").write_bytes(msgspec.json.encode(kept))
    now = page.Report(versions={}, quick=False, rounds=3, cores=2, loads=(20.0, 30.0))
    now.growth, now.growth_loads = [point(0.5, "redis")], (20.0, 30.0)
    suite.keep_other_parts(now, ["growth"], tmp_path / "suite.json")
    assert now.growth == [point(1.0), point(0.5, "redis")]
    assert (now.loads, now.growth_loads, now.rows) == (kept.loads, (0.1, 30.0), kept.rows)
