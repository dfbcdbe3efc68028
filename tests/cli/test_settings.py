"""Where settings come from, which one wins, and what is said when one is wrong."""

from pathlib import Path

import pytest

from semel.cli.app import app
from semel.observe.formatting import redact
from semel.server.settings import Limits, ServeSettings
from tests.cli.shell import Ended, semel


def shown(place: Path, *args: str, **env: str) -> dict[str, tuple[object, str]]:
    answer = semel("config", "show", "--json", *args, cwd=place, env=env)
    assert answer.code == 0, answer.err
    return {name: (each["value"], each["origin"]) for name, each in answer.json().items()}


SERVE = {
    "host": "127.0.0.1",
    "port": 8787,
    "auth": "tokens",
    "audit": "operators",
    "proxy": "",
    "tls_cert": "",
    "tls_key": "",
    "handler": "",
    "errors": "keep",
    "sink": "",
    "persist": "",
    "events_consumer": "events",
    "events_key": "",
    "events_lease": "30s",
    "events_table": "events",
    "events_columns": "",
    "body_max": 4194304,
    "value_max": 327680,
    "answer_max": 8388608,
    "batch_max": 1000,
    "lease_max": "15m",
    "window_max": "forever",
    "rate": 1000.0,
    "items_rate": 100000.0,
    "bytes_rate": 67108864.0,
    "store_share": 2.0,
    "scan_share": 0.5,
    "consumers_max": 1000,
    "steps_max": 1000,
    "renewals_max": 60,
    "claims_max": 10000,
    "connections_max": 2000,
    "head_wait": "15s",
    "body_wait": "30s",
    "write_wait": "30s",
    "drain": "30s",
    "unready": "0s",
    "dead_letters": "",
    "dashboard": True,
}


def test_defaults(tmp_path: Path) -> None:
    assert shown(tmp_path) == {
        "store": ("sqlite:///semel.db", "default"),
        "consumer": (None, "default"),
        "tenant": (None, "default"),
        "window": ("24h", "default"),
        "lease": ("30s", "default"),
        "mode": ("lease", "default"),
        "source": (None, "default"),
        "log_level": ("warning", "default"),
        "log_format": ("text", "default"),
        "hooks": ("", "default"),
        "rollups": (True, "default"),
        **{f"serve.{name}": (value, "default") for name, value in SERVE.items()},
    }


def test_what_is_for_serve_alone_has_a_table_and_variables_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text(
        '[serve]\nhost = "::1"\nport = 1\ndrain = "5s"\nsink = "redis://:hunter2@h/0"\n', encoding="utf-8"
    )
    (tmp_path / "secret").write_text("postgresql://me:hunter2@h/app\n", encoding="utf-8")
    settings = shown(tmp_path, SEMEL_SERVE_PORT="2", SEMEL_SERVE_PERSIST_FILE="secret")
    assert settings["serve.host"] == ("::1", "semel.toml: serve.host")
    assert settings["serve.port"] == (2, "SEMEL_SERVE_PORT")
    assert settings["serve.drain"] == ("5s", "semel.toml: serve.drain")
    assert settings["serve.persist"][1] == "SEMEL_SERVE_PERSIST_FILE (secret)"
    assert "hunter2" not in str(settings)


def test_each_limit_of_the_service_has_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for two that guard the protocol itself."""
    made: list[ServeSettings] = []
    monkeypatch.setattr("semel.cli.serve._run", made.append)
    options = {
        "body-max": "5000", "value-max": "5001", "answer-max": "5002", "batch-max": "11", "lease-max": "2m",
        "rate": "12", "items-rate": "13", "bytes-rate": "14", "store-share": "0.15", "scan-share": "0.16",
        "consumers-max": "17", "steps-max": "18", "renewals-max": "29", "claims-max": "19", "connections-max": "20",
        "head-wait": "21s", "body-wait": "22s", "write-wait": "23s",
    }  # fmt: skip
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    for arguments in (["serve", *given], ["serve"]):
        app(arguments, standalone_mode=False)
    changed, plain = (settings.limits for settings in made)
    assert plain == Limits()
    fields = set(Limits.__struct_fields__) - {"lease_min_us", "window_max_us"}
    assert {name for name in fields if getattr(changed, name) == getattr(plain, name)} == set()


@pytest.mark.parametrize(
    ("content", "env", "said"),
    [
        (
            "[serve]\nprot = 1\n",
            {},
            "semel.toml: 'serve.prot' is not a setting of semel; did you mean serve.port?",
        ),
        ("serve = 1\n", {}, "serve is a table"),
        ("[serve]\nport = 'x'\n", {}, "semel.toml: serve.port: it should be a valid integer"),
        ("[serve]\nlease_max = 'soon'\n", {}, "semel.toml: serve.lease_max: "),
        ("", {"SEMEL_SERVE_RATE": "fast"}, "SEMEL_SERVE_RATE: "),
    ],
)
def test_what_is_wrong_with_it_is_told_with_its_origin(
    tmp_path: Path, content: str, env: dict[str, str], said: str
) -> None:
    (tmp_path / "semel.toml").write_text(content, encoding="utf-8")
    answer = semel("config", "show", cwd=tmp_path, env=env)
    assert answer.code == 78
    assert said in answer.err


def test_the_first_source_that_has_a_value_wins(tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text(
        'window = "1h"\nlease = "1m"\nconsumer = "file"\nstore = "memory:"\nmode = "mark"\n', encoding="utf-8"
    )
    (tmp_path / "secret").write_text("sqlite:///secret.db\n", encoding="utf-8")
    settings = shown(
        tmp_path,
        "--window", "3h",
        SEMEL_WINDOW="2h",
        SEMEL_LEASE="2m",
        SEMEL_CONSUMER="",
        SEMEL_STORE_FILE="secret",
        SEMEL_LEASE_FILE="secret",
    )  # fmt: skip
    assert settings["window"] == ("3h", "--window")
    assert settings["lease"] == ("2m", "SEMEL_LEASE")
    assert settings["store"] == ("sqlite:///secret.db", "SEMEL_STORE_FILE (secret)")
    assert settings["consumer"] == ("file", "semel.toml: consumer")
    assert settings["mode"] == ("mark", "semel.toml: mode")
    assert settings["tenant"] == (None, "default")


def test_another_file_by_flag_or_variable(tmp_path: Path) -> None:
    (tmp_path / "semel.toml").write_text("broken", encoding="utf-8")
    (tmp_path / "other.toml").write_text("lease = 45\n", encoding="utf-8")
    assert shown(tmp_path, SEMEL_CONFIG="other.toml")["lease"] == (45, "other.toml: lease")
    answer = semel("--config", "other.toml", "config", "show", cwd=tmp_path)
    assert "lease\t45.0\tother.toml: lease\n" in answer.out.replace("\t45\t", "\t45.0\t")


def test_passwords_are_hidden(tmp_path: Path) -> None:
    url = "pigeon://me:hunter2@coop/1?token=hunter2"
    for answer in (
        semel("config", "show", "--store", url, cwd=tmp_path),
        semel("config", "show", "--json", cwd=tmp_path, env={"SEMEL_STORE": url}),
        semel("list", "--store", url, cwd=tmp_path),
    ):
        assert "hunter2" not in answer.out + answer.err
    assert "pigeon://me:***@coop/1?token=***" in semel("config", "show", "--store", url, cwd=tmp_path).out


def wrong(place: Path, toml: str = "", **env: str) -> Ended:
    (place / "semel.toml").write_text(toml, encoding="utf-8")
    return semel("config", "show", cwd=place, env=env)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('windw = "1h"', "semel.toml: 'windw' is not a setting of semel; did you mean window?"),
        ('colour = "red"', "'colour' is not a setting of semel; there are store, consumer"),
        ("window = true", "semel.toml: window: it is a duration"),
        ('window = "soon"', "semel.toml: window: 'soon' is not a duration"),
        ('lease = "1us"', "semel.toml: lease: a lease of '1us' is out of bounds"),
        ('mode = "leese"', "semel.toml: mode: it should be 'inbox'"),
        ("store = 5", "semel.toml: store: it should be a valid string"),
        ('store = ""', "semel.toml: store: it is empty"),
        ('consumer = ""', "semel.toml: consumer: consumer '' has 0 bytes"),
        ("store = ", "semel.toml cannot be read"),
    ],
)
def test_a_wrong_file_is_bad_configuration(tmp_path: Path, toml: str, said: str) -> None:
    answer = wrong(tmp_path, toml)
    assert answer.code == 78
    assert said in answer.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SEMEL_STROE", "memory:", "SEMEL_STROE is not a setting of semel; did you mean SEMEL_STORE?"),
        ("SEMEL_STROE_FILE", "x", "did you mean SEMEL_STORE?"),
        ("SEMEL_WINDOW", "soon", "SEMEL_WINDOW: 'soon' is not a duration"),
        ("SEMEL_LOG_LEVEL", "loud", "SEMEL_LOG_LEVEL: it should be 'debug'"),
        ("SEMEL_STORE_FILE", "none", "SEMEL_STORE_FILE names none, which cannot be read"),
    ],
)
def test_a_wrong_variable_is_bad_configuration(tmp_path: Path, variable: str, value: str, said: str) -> None:
    answer = wrong(tmp_path, **{variable: value})
    assert answer.code == 78
    assert said in answer.err


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    shown(tmp_path, SEMEL_SERVICE_HOST="10.0.0.1", SEMEL_PORT="tcp://10.0.0.1:80", SEMEL_PORT_80_TCP="x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://me:p@ss@host/0", "redis://me:***@host/0"),
        ("redis://me:p/a@ss@host/0", "redis://me:***@host/0"),
        ("postgresql://me:a/b@host:5432/app?x=1", "postgresql://me:***@host:5432/app?x=1"),
        ("https://h/?apikey=abc&x=1", "https://h/?apikey=***&x=1"),
        ("https://h/?api_key=abc", "https://h/?api_key=***"),
        ("https://h/?access_key=abc&AccountKey=d", "https://h/?access_key=***&AccountKey=***"),
        ("https://h/?a=1&sig=abc#f", "https://h/?a=1&sig=***#f"),
        ("https://h/?X-Amz-Signature=abc", "https://h/?X-Amz-Signature=***"),
        ("tiers://?cache=redis://:a@c/0&truth=redis://:b/c@d/1", "tiers://?cache=redis://:***@c/0&truth=redis://:***@d/1"),
        ("redis://localhost:6379/0?mail=a@b", "redis://localhost:6379/0?mail=a@b"),
        ("http://127.0.0.1:8787 (endpoints: http://127.0.0.1:8787/docs)",
         "http://127.0.0.1:8787 (endpoints: http://127.0.0.1:8787/docs)"),
    ],
)  # fmt: skip
def test_secrets_in_urls_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown
