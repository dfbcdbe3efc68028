"""The OpenAPI document is what the service does: fixed examples of it, with no 5xx and no answer it does not know."""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from semel.server.app import create_app
from semel.server.settings import Limits, ServeSettings
from semel.stores.memory import MemoryStore

EXAMPLES = 25
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document() -> Any:
    app = create_app(ServeSettings(limits=Limits(rate_per_s=0)), store=MemoryStore())
    app.state.service.needs_token = False
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_document_holds(case: Any) -> None:
    case.call_and_validate(checks=CHECKS, headers={"host": "localhost"})


def test_every_endpoint_says_what_it_is_for(tmp_path: Path) -> None:
    document = create_app(ServeSettings(), store=MemoryStore()).openapi()
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) >= 16
    for each in operations:
        assert each["summary"]
        assert set(each["responses"]) >= {"200", "401", "429", "503"}
    bodies = [each["requestBody"]["content"] for each in operations if "requestBody" in each]
    assert all(any("example" in kind for kind in body.values()) for body in bodies)
