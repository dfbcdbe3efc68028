"""The wheel and the sdist hold the whole program, and it runs from the wheel in clean environments."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES, expected
from tests.test_extras import NEEDS_ONLY

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {".pyc"}


def built(folder: Path) -> tuple[Path, Path]:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_release_is_whole(tmp_path: Path) -> None:
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


@pytest.mark.timeout(1800)  # `all` is more than a hundred packages
@pytest.mark.slow
@pytest.mark.service
@pytest.mark.parametrize("extra", [*NEEDS_ONLY, "all"] if "SEMEL_SOAK" in os.environ else ["", "cli"])
def test_the_wheel_runs_in_a_clean_environment(extra: str, tmp_path: Path) -> None:
    """With one extra and what pip takes for it from a registry; the core and `all` run the examples too."""
    wheel, _ = built(tmp_path)
    python = make_environment(tmp_path / "clean", f"{wheel}[{extra}]" if extra else str(wheel))
    modules = NEEDS_ONLY.get(extra) or sorted({each for needed in NEEDS_ONLY.values() for each in needed})
    program = f"import importlib, semel; [importlib.import_module(each) for each in {modules}]; print(semel.__file__)"
    answer = run([python, "-I", "-c", program], tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(str(tmp_path / "clean"))
    for example in {"": EXAMPLES[:2], "all": EXAMPLES}.get(extra, []):
        folder = tmp_path / example.stem
        folder.mkdir()
        ran = run([python, str(example)], folder)
        assert (ran.stdout, ran.stderr) == (expected(example), ""), example


def make_environment(place: Path, wheel: str) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = str(place / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    installed = run([*pip, "--constraint", str(ROOT / "constraints.txt"), wheel], place)
    assert installed.returncode == 0, installed.stderr
    return python


def run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
