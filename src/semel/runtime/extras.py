"""Build the command that installs an extra of semel, as semel itself was installed."""

from pathlib import Path

__all__ = ["install_command"]

_SOURCE = Path(__file__).resolve().parents[2]


def install_command(extra: str) -> str:
    """Return the command that adds an extra: from the clone or file of this semel, else from the registry."""
    clone = _SOURCE.parent
    if _SOURCE.name == "src" and (clone / "pyproject.toml").is_file():
        return f'pip install -e "{clone}[{extra}]"'
    return f'pip install "{_origin() or "semel"}[{extra}]"'


def _origin() -> str | None:
    """Return the folder or file that pip installed semel from; `None` for a registry, or if it is gone."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    import msgspec

    try:
        noted = distribution("semel").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(msgspec.json.decode(noted)["url"] if noted else "")
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else None
