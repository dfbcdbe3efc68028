"""`semel serve` and `semel token`: how it starts, whom it lets in, and what it refuses to be."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from semel.errors import PolicyInvalid
from semel.server.limits import Buckets, LiveClaims
from semel.server.settings import Limits, ServeSettings, is_loopback
from tests.cli.processes import ROOT, WITHIN_S, semel, start, warm
from tests.server.tools import Running, process, serving
from tests.services import redis
from tests.services.programs import program

pytestmark = pytest.mark.usefixtures("warm")
__all__ = ["warm"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "localhost.example.org", ""])
def test_it_refuses_to_be_open_to_everybody(host: str) -> None:
    with pytest.raises(PolicyInvalid, match="without authentication"):
        ServeSettings(host=host, auth="none")
    assert ServeSettings(host=host).auth == "tokens"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_is_open_only_by_choice(host: str) -> None:
    assert is_loopback(host)
    assert ServeSettings(host=host).auth == "tokens"
    assert ServeSettings(host=host, auth="none").auth == "none"


def test_the_command_refuses_too(tmp_path: Path) -> None:
    ended = semel("serve", "--host", "0.0.0.0", "--auth", "none", cwd=tmp_path)
    assert ended.returncode == 78
    assert b"refusing to listen on 0.0.0.0 without authentication" in ended.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--auth", "maybe"], 2, b"--auth: it should be 'tokens' or 'none'"),
        (["--tls-cert", "x.pem"], 78, b"both a certificate and its key"),
        (["--handler", "a:b", "--sink", "stdout:"], 78, b"not both"),
        (["--value-max", "2000000"], 78, b"value_bytes_max"),
        (["--store", "redis://127.0.0.1:1/0"], 69, b"redis://127.0.0.1:1"),
        (["--handler", "nothing:here"], 78, b"no module named 'nothing'"),
        (["--handler", "json"], 78, b"names no handler"),
        (["--handler", "json:__doc__"], 78, b"is not a function"),
        (["--handler", "operator:add"], 78, b"it is given the event alone"),
        (["--persist", "mysql://x/"], 78, b"postgresql://"),
        (["--drain", "soon"], 2, b"--drain: "),
        (["--events-lease", "1us"], 78, b"out of bounds"),
        (["--store", "memory:", "--handler", "json:loads"], 78, b"does not outlive its process"),
    ],
)
def test_a_wrong_set_up_is_told_in_a_line(tmp_path: Path, options: list[str], code: int, said: bytes) -> None:
    ended = semel("serve", "--port", "0", *options, cwd=tmp_path)
    assert ended.returncode == code
    assert said in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_misspelt_variable_is_an_error(tmp_path: Path) -> None:
    ended = semel("serve", cwd=tmp_path, SEMEL_SERVE_PROT="1")
    assert ended.returncode == 78
    assert b"SEMEL_SERVE_PROT is not a setting of semel; did you mean SEMEL_SERVE_PORT?" in ended.stderr


def test_the_table_of_the_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text(
        'store = "sqlite:///there.db"\n[serve]\nport = 0\nbatch_max = 2\nauth = "none"\n'
    )
    running = start("serve", cwd=tmp_path, SEMEL_SERVE_RATE="0")
    assert running.stderr is not None
    line = running.stderr.readline().decode()
    try:
        assert line.startswith("Serving sqlite:///there.db at "), line
        served = Running(line.partition(" at ")[2].partition(" ")[0])
        assert served.port != 8787
        assert served.post("/v1/events", [{"id": "1"}, {"id": "2"}, {"id": "3"}]).status_code == 413
        served.client.close()
    finally:
        running.terminate()
        running.communicate(timeout=WITHIN_S)


def test_a_store_that_forgets_is_warned_of(tmp_path: Path) -> None:
    running = start("serve", "--store", "memory:", "--port", "0", "--auth", "none", cwd=tmp_path)
    assert running.stderr is not None
    try:
        said = [running.stderr.readline().decode() for _ in range(4)]
        assert said[3].startswith("warning: memory: forgets all when its process ends"), said
        assert "Change: a store that lasts" in said[3]
    finally:
        running.terminate()
        running.communicate(timeout=WITHIN_S)


def test_tokens_are_made_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    made = semel("token", "create", "shop", "--tenant", "acme", "--role", "read", cwd=tmp_path)
    text = made.stdout.decode().strip()
    assert re.fullmatch(r"semel_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", text)
    listed = semel("token", "list", "--json", cwd=tmp_path)
    (token,) = json.loads(listed.stdout)["tokens"]
    assert (token["name"], token["role"], token["tenant"], token["all_tenants"]) == (
        "shop",
        "read",
        "acme",
        False,
    )
    assert text.split("_")[2].encode() not in listed.stdout
    assert semel("token", "revoke", token["id"], cwd=tmp_path).returncode == 2  # nobody is there to say yes
    assert semel("token", "revoke", token["id"], "--yes", cwd=tmp_path).returncode == 0
    assert semel("token", "revoke", token["id"], "--yes", cwd=tmp_path).returncode == 5
    assert json.loads(semel("token", "list", "--json", cwd=tmp_path).stdout) == {"tokens": []}


@pytest.mark.parametrize(
    "options",
    [
        ["--tenant", "a", "--all-tenants"],
        ["--tenant", "semel.tokens"],
        ["--tenant", "semel.rollups"],
        ["--role", "king"],
    ],
)
def test_tokens_that_cannot_be(tmp_path: Path, options: list[str]) -> None:
    assert semel("token", "create", "x", *options, cwd=tmp_path).returncode == 2


def test_the_real_program_serves_with_a_token_and_environment(tmp_path: Path) -> None:
    text = semel("token", "create", "shop", cwd=tmp_path).stdout.decode().strip()
    with process(tmp_path, "--auth", "tokens", SEMEL_SERVE_RATE="0") as (_, address):
        stranger, known = Running(address), Running(address, text)
        assert stranger.client.get("/v1/store").status_code == 401
        assert known.claim("k")["outcome"] == "claimed"
        stranger.client.close()
        known.client.close()


def test_tls(tmp_path: Path) -> None:
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    settings = ServeSettings(
        auth="none",
        store=f"sqlite:///{tmp_path}/semel.db",
        port=0,
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )
    import semel as library

    with serving(settings) as running:
        assert running.address.startswith("https://")
        with library.open(f"{running.address}?ca_file={tmp_path}/cert.pem", consumer="c") as once:
            assert once.run("k", lambda: 1) == library.Done(1)
        with pytest.raises(library.errors.StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            library.open(running.address, consumer="c").run("k", lambda: 1)


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    program("curl")
    page = (ROOT / "docs/reference/http-api.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in re.split(r"(?m)^(?=curl )", block) if line.strip()]
    assert len(commands) == 9
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        held = ""
        for command in commands:
            script = f"J='content-type: application/json' U={running.address}\n{command.replace('l6diaWxs...', held)}"
            said = subprocess.run(
                ["/bin/sh", "-c", script], capture_output=True, check=True, timeout=60
            ).stdout
            answer = json.loads(said)
            assert "status" not in answer, (command, answer)
            held = answer["outcomes"][0].get("claim", held) if "outcomes" in answer else held


def test_limits_are_checked_on_birth() -> None:
    with pytest.raises(PolicyInvalid, match="rate_per_s is -1"):
        Limits(rate_per_s=-1)
    with pytest.raises(PolicyInvalid, match="lease_max_us"):
        Limits(lease_max_us=1)


def test_a_bucket_fills_with_time() -> None:
    now = [0.0]
    buckets = Buckets(2.0, lambda: now[0])
    assert [buckets.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert buckets.take("b") == 0
    now[0] = 0.5
    assert [buckets.take("a"), buckets.take("a")] == [0, 0.5]


def test_claims_count_until_their_leases_end() -> None:
    now = [0.0]
    live = LiveClaims(2, lambda: now[0])
    live.hold("a", ("", "c", "1"), 10**6)
    live.hold("a", ("", "c", "2"), 5 * 10**6)
    assert (live.room("a"), live.room("b")) == (0, 2)
    live.hold("a", ("", "c", "1"), 3 * 10**6)  # renewed
    now[0] = 2
    assert live.room("a") == 0
    now[0] = 4
    assert live.room("a") == 1
    live.drop("a", ("", "c", "2"))
    assert live.room("a") == 2


def test_a_redis_without_a_log_is_refused_with_the_setting(tmp_path: Path) -> None:
    with redis.own(tmp_path, appendonly="no", save="") as own:
        ended = semel("serve", "--port", "0", "--store", own.url, "--handler", "json:loads", cwd=tmp_path)
        heard = semel("listen", "ws://127.0.0.1:1/", "json:loads", "--store", own.url, cwd=tmp_path)
    for each in (ended, heard):
        assert each.returncode == 78
        assert b"appendonly yes" in each.stderr
