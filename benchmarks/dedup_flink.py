"""Flink SQL on the same topic as `semel dedup`: the job of docs/howto/dedup.md, in one Java process.

Its jars come from Maven, named by `flink.xml`. The rate is that at which records reach the output, from a tenth of them
on, so that the start of the program and the warm-up of Java do not count.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import ENVIRONMENTS, HERE

__all__ = ["FlinkFigures", "class_path", "run_flink"]

VERSION = "2.2.0"
"""The release for which there is a connector; `flink.xml` names it too."""
OPENED = ("java.util", "java.lang", "java.lang.invoke", "java.util.concurrent", "java.nio", "java.time")
"""Packages that Flink looks into."""
LOOK_S = 0.2
LIMIT_S = 1800.0


class FlinkFigures(NamedTuple):
    """What Flink needed."""

    rate: float
    cpu_us: float
    """Processor time of the Java process for each event."""


def class_path() -> str:
    """Return where the jars are; Maven fetches them at first use. Raises `RuntimeError` with its reason."""
    file = ENVIRONMENTS / "flink" / "class-path"
    if not file.exists():
        mvn = shutil.which("mvn")
        if mvn is None:
            raise RuntimeError("Flink needs Maven, which is not installed")
        print("fetching Flink", file=sys.stderr, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        command = [
            mvn, "-q", "-B", "-f", str(HERE / "flink.xml"), "dependency:build-classpath", f"-Dmdep.outputFile={part}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Maven does not give Flink: {(done.stdout + done.stderr)[-1000:]}")
        part.rename(file)
    return file.read_text(encoding="utf-8").strip()


def run_flink(servers: str, topic: str, events: int, ids: int, folder: Path) -> FlinkFigures:
    """Run the job until the topic is at its end."""
    opened = [each for name in OPENED for each in ("--add-opens", f"java.base/{name}=ALL-UNNAMED")]
    command = [
        "java", "-Xmx1g", *opened, "-cp", class_path(), str(HERE / "FlinkDedup.java"), servers, topic, str(folder),
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            return _watch(process, servers, f"{topic}.flink", events, ids, log)
        finally:
            process.kill()
            process.wait()


def _watch(
    process: subprocess.Popen[bytes], servers: str, output: str, events: int, ids: int, log: Path
) -> FlinkFigures:
    """Look at the end of the output until the program ends."""
    from confluent_kafka import Consumer, TopicPartition

    looker = Consumer(
        {"bootstrap.servers": servers, "group.id": "look", "isolation.level": "read_uncommitted"}
    )
    number = len(looker.list_topics(output, 30).topics[output].partitions)
    begun: tuple[float, float, int] | None = None
    ended, written = (0.0, 0.0), -1
    give_up_at = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < give_up_at:
        ends = [looker.get_watermark_offsets(TopicPartition(output, at), 10)[1] for at in range(number)]
        now = (time.monotonic(), _cpu_s(process.pid))
        if begun is None and sum(ends) >= ids // 10:
            begun = (*now, sum(ends))
        if sum(ends) > written:
            ended, written = now, sum(ends)
        time.sleep(LOOK_S)
    looker.close()
    if process.poll() != 0 or begun is None or written < ids:
        raise RuntimeError(
            f"Flink ended with {process.poll()} after {written} of {ids}: {log.read_text()[-2000:]}"
        )
    read = events * (ids - begun[2]) / ids
    return FlinkFigures(read / (ended[0] - begun[0]), (ended[1] - begun[1]) / read * 1e6)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
