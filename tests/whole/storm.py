"""A storm of the whole product in real processes: `python -m tests.whole.storm sqlite --seed 7 --seconds 20`.

The seed decides who lives when and who is killed or stopped; the operating system decides the rest. Exit code 0: every
promise was kept.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import os
import pkgutil
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

import semel
from semel.testing.worker_processes import die_with_parent
from tests.services.server import free_port
from tests.whole.actors import ROLES
from tests.whole.audit import Hit, audit, missing
from tests.whole.plan import Act, Plan, draw
from tests.whole.scene import LEASE_S, Scene, UserDatabase, pause

SHOWN_MAX = 50
TICK_S = 0.02
SLOW_S = LEASE_S / 6
"""A director that is kept from running for so long tells of a computer on which leases may run out by themselves."""
CROWDED = 8
"""Processes that want to run, per core: with so many, one may wait longer than a lease."""
END_S = 60.0
LOOK_S = 1.0
DRAIN_S = 240.0
"""The calm goes on while anything gets finished within so long: a busy computer is no failure."""


class Process:
    """One act on the stage: a process group of its own."""

    def __init__(self, scene: Scene, role: str, seed: str, life_s: float) -> None:
        self.role = role
        self.pid = os.fork()
        if self.pid == 0:
            _play(scene, role, seed, life_s)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)

    def has_ended(self) -> bool:
        """Whether it ended; its process is fetched then."""
        if self.pid:
            ended, _ = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid = 0
        return not self.pid

    def signal(self, number: signal.Signals) -> None:
        """To it and its forks."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """At once, and wait for it."""
        if not self.has_ended():
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _play(scene: Scene, role: str, seed: str, life_s: float) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        die_with_parent()
        log = os.open(Path(scene.folder) / f"{role}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGUSR2, _show_tasks)
        faulthandler.register(signal.SIGUSR1)  # the stacks of one that hangs go to its log
        os.chdir(scene.folder)
        ROLES[role](scene, seed, life_s)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the audit shows it
        scene.ledger.write("error", role, "", detail=repr(error))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _show_tasks(_number: int, _frame: object) -> None:
    """Write what each task of the running loop waits for to the log."""
    loop = asyncio._get_running_loop()
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


class Slot:
    """The processes of one slot, one after the other."""

    def __init__(self, stage: "Stage", acts: list[Act]) -> None:
        self._stage = stage
        self._acts = iter(acts)
        self._process: Process | None = None
        self._act: Act | None = None
        self._hit_at = 0.0
        self._resume_at = 0.0
        self._stopped_ns = 0

    def tick(self, now: float) -> None:
        """Do what is due."""
        process, act = self._process, self._act
        if process is None or act is None or process.has_ended():
            self._next(now)
        elif self._resume_at:
            if now >= self._resume_at:
                self._resume(process, act)
        elif now >= self._hit_at:
            self._hit(process, act, now)

    def _next(self, now: float) -> None:
        act = next(self._acts, None)
        self._act = act
        self._process = None
        self._resume_at = 0.0
        if act is not None:
            self._process = self._stage.start(act.role, act.seed, act.life_s)
            self._hit_at = now + act.life_s

    def _hit(self, process: Process, act: Act, now: float) -> None:
        self._hit_at = float("inf")
        if act.fate == "kill":
            self._stage.kill(process)
        elif act.fate == "stop":
            self._stopped_ns = time.monotonic_ns()
            process.signal(signal.SIGSTOP)
            self._resume_at = now + act.stopped_s
        else:
            self._stage.end(process)

    def _resume(self, process: Process, act: Act) -> None:
        process.signal(signal.SIGCONT)
        self._resume_at = 0.0
        self._stage.note(process, self._stopped_ns)
        if act.killed_after:
            self._stage.kill(process)
        else:
            self._stage.end(process)

    def finish(self) -> None:
        """Nothing more comes; what is stopped goes on."""
        self._acts = iter(())
        if self._process is not None and self._resume_at:
            self._process.signal(signal.SIGCONT)
            self._stage.note(self._process, self._stopped_ns)
            self._resume_at = 0.0


class Stage:
    """All processes, and who was hit when."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.hits: list[Hit] = []
        self._live: list[Process] = []
        self._last_tick = time.monotonic()
        self.crowded = False

    def start(self, role: str, seed: str, life_s: float) -> Process:
        """One more process."""
        process = Process(self.scene, role, seed, life_s)
        self._live.append(process)
        return process

    def note(self, process: Process, since_ns: int) -> None:
        """It was hit, from then until now."""
        self.hits.append(Hit(process.pid, process.role, since_ns, time.monotonic_ns()))

    def kill(self, process: Process) -> None:
        """With -9."""
        group, since_ns = process.pid, time.monotonic_ns()
        process.kill()
        self.hits.append(Hit(group, process.role, since_ns, time.monotonic_ns()))

    def end(self, process: Process) -> None:
        """By SIGTERM, as an operator would. Who of the user's own processes has no handler for it dies of it."""
        if process.role == "worker":
            return  # it ends by itself
        if process.role not in ("serve", "consume", "consume-inbox", "consume-chain", "relay", "listen"):
            self.kill(process)
            return
        process.signal(signal.SIGTERM)

    def tick(self) -> None:
        """Wait a moment, and notice when that took long."""
        pause(TICK_S)
        now = time.monotonic()
        if now - self._last_tick > SLOW_S:
            ended_ns = time.monotonic_ns()
            self.hits.append(Hit(0, "computer", ended_ns - int((now - self._last_tick) * 1e9), ended_ns))
        self._last_tick = now
        self.crowded = self.crowded or os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1)
        self._live = [process for process in self._live if not process.has_ended()]

    def wait_for(self, processes: list[Process], what: str) -> None:
        """Until they have ended; those that do not are noted as an error."""
        give_up_at = time.monotonic() + END_S
        while any(not process.has_ended() for process in processes):
            if time.monotonic() > give_up_at:
                left = sorted({process.role for process in processes if not process.has_ended()})
                self.scene.ledger.write("error", what, "", detail=f"did not end within {END_S:g} s: {left}")
                for process in processes:
                    process.signal(signal.SIGUSR1)
                    process.signal(signal.SIGUSR2)
                pause(1.0)
                return
            self.tick()

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self._live:
            process.signal(signal.SIGCONT)
            process.kill()


def import_everything() -> None:
    """Leave nothing to import: what a thread imports while its process forks stays locked in the child for ever."""
    for module in pkgutil.walk_packages(semel.__path__, "semel."):
        if not module.name.endswith("__main__") and "django" not in module.name:  # needs a Django project
            importlib.import_module(module.name)


def prepare(scene: Scene, plan: Plan) -> None:
    """Make the file as the plan wants it, the store, and the user's table. Runs in a process of its own."""
    if scene.kind == "sqlite" and plan.file_kind != "own":
        with contextlib.closing(sqlite3.connect(scene.file)) as file:
            file.execute(f"PRAGMA journal_mode = {plan.file_kind.split()[-1]}")
            file.execute("CREATE TABLE customers (name TEXT)")
            file.commit()
    adopt = "&adopt=true" if scene.kind == "sqlite" else ""
    with semel.open(scene.store + adopt, consumer="anchor") as once:
        once.run("prepare", lambda: 1)
    if scene.is_sql:
        UserDatabase(scene).prepare()


def watch_opens(scene: Scene) -> None:
    """Note whoever opens the database by another way than through SQLite. Forks inherit it."""
    names = {str(scene.file) + suffix for suffix in ("", "-wal", "-shm", "-journal")}

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[0] in names:
            scene.ledger.write("broken", "locks", "", detail=f"{arguments[0]} was opened beside SQLite")

    sys.addaudithook(on_event)


def rage(stage: Stage, plan: Plan) -> None:
    """The storm itself."""
    scene = stage.scene
    chance = random.Random(f"{scene.seed}:fixed")
    staying = [stage.start(role, str(chance.random()), scene.seconds) for role in ("anchor", "visitor")]
    slots = [Slot(stage, acts) for acts in plan.slots]
    over_at = time.monotonic() + scene.seconds
    while time.monotonic() < over_at:
        for slot in slots:
            slot.tick(time.monotonic())
        stage.tick()
    for slot in slots:
        slot.finish()
    everybody = [slot._process for slot in slots if slot._process is not None]
    for process in everybody:
        if process.pid:
            stage.end(process)
    stage.wait_for([*everybody, *staying], "the end of the storm")


def calm(stage: Stage) -> None:
    """Nobody is hit any more; whatever was accepted comes to its end."""
    services = ["serve", "consume", "listen"]
    if stage.scene.is_sql:
        services += ["consume-inbox", "relay", "consume-chain"]
    running = [stage.start(role, "calm", DRAIN_S) for role in services]
    finishing = [stage.start(role, "calm", DRAIN_S) for role in ("drain", "repeat")]
    give_up_at = time.monotonic() + DRAIN_S
    left, look_at = len(missing(stage.scene)), 0.0
    while time.monotonic() < give_up_at:
        stage.tick()
        if time.monotonic() < look_at:
            continue
        before, left = left, len(missing(stage.scene))
        if left < before:
            give_up_at = time.monotonic() + DRAIN_S
        if not left and all(process.has_ended() for process in finishing):
            break
        look_at = time.monotonic() + LOOK_S
    for process in running:
        if process.has_ended():
            stage.scene.ledger.write("error", process.role, "", detail="ended by itself; see its log")
        process.signal(signal.SIGTERM)
    stage.wait_for(running, "the end of the calm")


def run(scene: Scene) -> list[str]:
    """The whole storm; what was broken."""
    plan = draw(scene.kind, scene.seed, scene.seconds)
    import_everything()
    if scene.kind == "sqlite":
        watch_opens(scene)
    first = os.fork()
    if first == 0:
        prepare(scene, plan)
        os._exit(0)
    if os.waitpid(first, 0)[1]:
        return ["the store could not be prepared"]
    scene = replace(scene, began_ns=time.monotonic_ns())
    scene.enter()
    stage = Stage(scene)
    try:
        stage.start("feed", "feed", scene.seconds)
        rage(stage, plan)
        say(f"{plan.file_kind} file; {_told(stage)}")
        calm(stage)
    finally:
        stage.close()
    return audit(scene, stage.hits, crowded=stage.crowded)


def _told(stage: Stage) -> str:
    entries = stage.scene.ledger.read()
    effects = [entry for entry in entries if entry.what == "effect"]
    hits = len([hit for hit in stage.hits if hit.group])
    ends = [entry.detail for entry in entries if entry.what == "end"]
    words = ", ".join(f"{ends.count(word)} {word}" for word in sorted(set(ends)))
    return f"{hits} hits, {len(effects)} effects; runs: {words}"


def main() -> int:
    """Run one storm, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sqlite", "redis", "postgres"))
    parser.add_argument("--store", default="")
    parser.add_argument("--broker", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    scene = Scene(
        kind=given.kind,
        store=given.store or f"sqlite:///{given.folder}/shop.db?synchronous=normal",
        broker=given.broker,
        mark=f"w{os.urandom(4).hex()}",
        folder=given.folder,
        seed=given.seed,
        seconds=given.seconds,
        port=free_port(),
        feed_port=free_port(),
    )
    broken = run(scene)
    for each, times in Counter(broken).most_common(SHOWN_MAX):
        say(f"{times} times: {each}" if times > 1 else each)
    say(f"seed {given.seed}: " + (f"{len(broken)} promises broken" if broken else "every promise was kept"))
    return 1 if broken else 0


def say(line: str) -> None:
    """One line to whoever started the storm."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
