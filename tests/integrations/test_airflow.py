"""A guarded task of Airflow, run by Airflow on its own database: tried twice, one effect."""

import os
from pathlib import Path

import pytest

from tests.integrations.elsewhere import ROOT, ledger, run_in

if "SEMEL_SOAK" in os.environ:  # its installation takes minutes

    @pytest.mark.timeout(600)
    @pytest.mark.slow
    @pytest.mark.service
    def test_a_task_that_is_tried_again_has_one_effect(tmp_path: Path) -> None:
        folder = str(ROOT / "tests" / "integrations")
        home = {
            "AIRFLOW_HOME": str(tmp_path),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": folder,
        }
        made = run_in("apache-airflow", "-m", "airflow", "db", "migrate", folder=tmp_path, **home)
        assert made.returncode == 0, made.stdout + made.stderr
        ran = run_in("apache-airflow", f"{folder}/airflow_shop.py", folder=tmp_path, **home)
        assert "state success" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-3000:]
        assert ran.stdout.count("the reply was lost") >= 2, "each order failed once"
        assert ledger(tmp_path) == ["o-1", "o-2"]
