"""Servers in Java for tests: their jars come from Maven, named by a small file in `maven/`."""

from tests.services.programs import find_or_install


def command(name: str, heap_mb: int) -> list[str]:
    """How to start a program of these jars: the class and its arguments follow."""
    java = find_or_install("java")
    find_or_install("mvn")
    path = find_or_install(name)
    return [java, f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", path]
