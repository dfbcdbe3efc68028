"""The OpenAPI document is what the service does: fixed examples of it, with no 5xx and no answer it does not know."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.openapi.utils import get_openapi
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from semel.server.app import create_app
from semel.server.routes import base, health
from semel.server.settings import Limits, ServeSettings
from semel.stores.memory.store import MemoryStore
from tests.server.tools import serving

EXAMPLES = 25
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = f"sqlite:///{tmp_path_factory.mktemp('openapi')}/semel.db?synchronous=normal"
    with serving(ServeSettings(auth="none", store=store, port=0, limits=Limits(rate_per_s=0))) as running:
        yield schemathesis.openapi.from_url(f"{running.address}/openapi.json")


OPERATIONS = [
    (path, method, "requestBody" in each)
    for path, methods in create_app(ServeSettings(auth="none"), store=MemoryStore())
    .openapi()["paths"]
    .items()
    for method, each in methods.items()
]


CASES = [(path, method, GenerationMode.POSITIVE) for path, method, _ in OPERATIONS] + [
    (path, method, GenerationMode.NEGATIVE) for path, method, takes in OPERATIONS if takes
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_the_document_holds(document: Any, path: str, method: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    holds()


def test_every_endpoint_says_what_it_is_for() -> None:
    document = create_app(ServeSettings(auth="none"), store=MemoryStore()).openapi()
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) >= 16
    for each in operations:
        assert each["summary"]
        assert set(each["responses"]) >= {"200", "401", "429", "503"}
    bodies = [each["requestBody"]["content"] for each in operations if "requestBody" in each]
    assert all(any("example" in kind for kind in body.values()) for body in bodies)


def test_the_document_and_its_page_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def count(**options: Any) -> Any:
        built.append(1)
        return get_openapi(**options)

    monkeypatch.setattr(base, "get_openapi", count)
    monkeypatch.setattr(health, "json", parts := Dumped())
    with serving(ServeSettings(auth="none", port=0), store=MemoryStore()) as running:
        for path in ("/openapi.json", "/docs") * 3:
            assert running.client.get(path, timeout=60).status_code == 200
    assert len(built) == 1
    assert parts.whole == 1


class Dumped:
    """`json`, which counts how often the whole document was encoded."""

    whole = 0

    def dumps(self, value: Any, **options: Any) -> str:
        self.whole += isinstance(value, dict) and "openapi" in value
        return json.dumps(value, **options)


def test_generators_can_read_it() -> None:
    document = create_app(ServeSettings(auth="none"), store=MemoryStore()).openapi()
    ids = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert sorted(ids) == sorted(base.OPERATION_IDS.values())
    text = json.dumps(document)
    assert '"items": false' not in text
    assert '"items": true' not in text
    parameters = [
        parameter["schema"]
        for methods in document["paths"].values()
        for each in methods.values()
        for parameter in each.get("parameters", ())
    ]
    assert parameters
    assert all("anyOf" not in each for each in parameters), "a parameter is never null"
    named = document["components"]["schemas"]["Claim"]["properties"]["id"]
    assert (named["minItems"], named["maxItems"], named["items"]) == (3, 3, {"type": "string"})
    outcome = document["components"]["schemas"]["ClaimOutcome"]["properties"]["outcome"]
    assert outcome["type"] == "string", "else a generator takes it for anything"
