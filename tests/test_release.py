"""The wheel and the sdist hold the whole program, and it runs from the wheel alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {".pyc"}


def built(folder: Path) -> tuple[Path, Path]:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_release_is_whole_and_runs_without_the_clone(tmp_path: Path) -> None:
    wheel, sdist = built(tmp_path)
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "semel").rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }
    with zipfile.ZipFile(wheel) as opened:
        shipped = {name for name in opened.namelist() if ".dist-info/" not in name}
        licences = [name for name in opened.namelist() if name.endswith("licenses/LICENSE")]
    assert shipped == files
    assert len(licences) == 1
    with tarfile.open(sdist) as opened_sdist:
        inside = {name.partition("/")[2] for name in opened_sdist.getnames()}
    assert {f"src/{name}" for name in files} <= inside
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "constraints.txt"} <= inside

    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(place)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(place)}
    where = [sys.executable, "-c", "import semel; print(semel.__file__)"]
    answer = subprocess.run(where, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert answer.stdout.startswith(str(place))
    example = [sys.executable, str(ROOT / "examples" / "05_inbox.py")]
    subprocess.run(example, cwd=tmp_path, env=env, check=True, capture_output=True)
