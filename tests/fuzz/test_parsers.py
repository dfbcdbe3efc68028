"""Whatever bytes a parser is given, it reads or refuses them: no other error, on any of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

GUIDED_S = 60
"""How long atheris looks for bytes for each parser, in the long form only."""
CUTS = st.tuples(st.integers(0, 200), st.integers(0, 200), st.binary(max_size=8))


@st.composite
def spoiled(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Almost right: a part of a good input is replaced, so that it gets far."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 3))):
        start, length, new = draw(CUTS)
        data = data[:start] + new + data[start + length % 9 :]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_read_or_refused(name: str) -> None:
    target, seeds = TARGETS[name]
    for seed in seeds:
        target(seed)

    @given(
        st.one_of(
            st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass")), spoiled(seeds)
        )
    )
    def parse(data: bytes) -> None:
        target(data)

    parse()


if os.environ.get("SEMEL_SOAK") and importlib.util.find_spec("atheris"):

    @pytest.mark.parametrize("name", TARGETS)
    def test_bytes_chosen_by_coverage_are_read_or_refused(name: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tests.fuzz.guided", name, f"-max_total_time={GUIDED_S}"]
        done = subprocess.run(
            [*command, f"-artifact_prefix={tmp_path}/"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
