"""The OpenAPI document: complete, and what the server does."""

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from support.http_server import ARROW, batch, client, running, stream

from ragged_server.http.problems import STATUSES

BODIES = st.one_of(
    st.sampled_from([stream(batch("a")), stream(batch("b", "c"))]), st.binary(max_size=100)
)
schemathesis.openapi.media_type(ARROW, BODIES)
schemathesis.openapi.media_type("application/x-ndjson", st.binary(max_size=100))


@schemathesis.deserializer(ARROW)
def deserialize(_, response):
    return response.content.decode("latin-1")


def document(tmp_path):
    with client(tmp_path) as c:
        return c.get("/openapi.json").json()


def test_bodies_are_declared_as_binary(tmp_path):
    paths = document(tmp_path)["paths"]
    content = paths["/v1/samples"]["post"]["requestBody"]["content"]
    assert content[ARROW]["schema"] == {"type": "string", "format": "binary"}
    answer = paths["/v1/samples"]["get"]["responses"]["200"]["content"]
    assert answer[ARROW]["schema"] == {"type": "string", "format": "binary"}


def test_every_route_is_declared(tmp_path):
    assert set(document(tmp_path)["paths"]) >= {
        "/v1/samples", "/v1/status", "/metrics", "/healthz", "/readyz", "/version",
        "/problems/{code}",
    }  # fmt: skip


def test_every_refusal_is_declared_as_a_problem(tmp_path):
    declared = document(tmp_path)["paths"]
    for path, operations in declared.items():
        for operation in operations.values():
            refusals = {code for code in operation["responses"] if code[0] in "45"}
            assert refusals <= {str(status) for status in STATUSES}, path
            for code in refusals:
                assert list(operation["responses"][code]["content"]) == ["application/problem+json"]
    statuses = set(declared["/v1/samples"]["post"]["responses"])
    assert statuses >= {"201", "200", "400", "401", "403", "408", "409", "413", "415", "422", "429",
                        "501", "503", "507"}  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """The document of a server, and where it listens."""
    with running(tmp_path_factory.mktemp("live"), max_wait_s="10ms") as server:
        headers = {"content-type": ARROW}
        body = stream(batch("first"))
        assert httpx2.post(f"{server.url}/v1/samples", content=body, headers=headers).is_success
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json"), server.url


# Answers must be declared, with their media type, schema and header; and never a fault.
WANTED = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "response_headers_conformance",
]  # fmt: skip
ROUTES = [
    "POST /v1/samples", "GET /v1/samples", "GET /v1/status", "GET /metrics", "GET /healthz",
    "GET /readyz", "GET /version", "GET /problems/{code}",
]  # fmt: skip
CASES = [(route, GenerationMode.POSITIVE) for route in ROUTES]
CASES += [(route, GenerationMode.NEGATIVE) for route in ROUTES[:2]]  # others take nothing


@pytest.mark.parametrize(("route", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
@given(data=st.data())
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
def test_answers_are_those_that_are_declared(api, route, mode, data):
    schema, url = api
    method, path = route.split(" ")
    operation = schema[path][method]
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call(base_url=url)
    case.validate_response(response, checks=CHECKS.get_by_names(WANTED))
