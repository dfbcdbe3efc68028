"""A guarded activity of Temporal, in a real worker on Temporal's test server: tried twice, one effect."""

import os
from pathlib import Path

import pytest

from tests.integrations.elsewhere import ledger, run_in
from tests.services import temporal

if "SEMEL_SOAK" in os.environ:  # its installation takes minutes

    @pytest.mark.timeout(600)
    @pytest.mark.slow
    @pytest.mark.service
    def test_an_activity_that_is_tried_again_has_one_effect(tmp_path: Path) -> None:
        ran = run_in(
            "temporalio", "-m", "tests.integrations.temporal_shop", temporal.address(), folder=tmp_path
        )
        paid = [
            line for line in ran.stdout.splitlines() if line.startswith("paid")
        ]  # Temporal's log is there too
        assert paid == ["paid o-1 in attempt 2", "paid o-2 in attempt 2"], ran.stderr[-3000:]
        assert ledger(tmp_path) == ["o-1", "o-2"]
