"""Guarded tools of LangChain and of OpenAI agents: called again with another id, one effect in a run."""

import os
from pathlib import Path

import pytest

from tests.integrations.elsewhere import ledger, run_in

if "SEMEL_SOAK" in os.environ:  # its installation takes minutes

    @pytest.mark.timeout(600)
    @pytest.mark.slow
    @pytest.mark.service
    def test_a_tool_that_is_called_again_has_one_effect_in_its_run(tmp_path: Path) -> None:
        tracing_off = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
        ran = run_in("openai-agents", "-m", "tests.integrations.agents_shop", folder=tmp_path, **tracing_off)
        assert ran.stdout.splitlines() == [
            "call-1: refunded chain:o-1:500",
            "call-2: refunded chain:o-1:500",
            "call-1: refunded chain:o-1:500",
            "call-2: refunded chain:o-1:500",
            "refunded agent:o-1:500; refunded agent:o-1:500",
        ], ran.stderr[-3000:]
        assert ledger(tmp_path) == ["agent:o-1:500", "chain:o-1:500", "chain:o-1:500"]
