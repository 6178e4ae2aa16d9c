"""The OpenAPI description, which is generated from the types that parse request bodies."""

import json
from collections.abc import Iterator

import pytest

from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.json_body import fields_of
from eqx_decoders.serving.http.openapi import OPERATIONS
from tests.serving.servers import serving


@pytest.fixture(scope="module")
def described():
    with serving(frontend=TextFrontend(tokenizer=ByteTokenizer(), stop_ids=(257,)), api_keys=("key",)) as server:
        return server.json("/openapi.json")  # without a key


def references(value) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = [*value.values(), *value.get("discriminator", {}).get("mapping", {}).values()]
    if isinstance(value, list):
        for each in value:
            yield from references(each)


def test_description_is_complete(described):
    assert described["openapi"] == "3.1.0" and set(described["info"]) == {"title", "version"}
    schemas = described["components"]["schemas"]
    assert set(described) == {"openapi", "info", "paths", "components"}
    mentioned = set(references(described))
    # no reference is missing, and no definition is unused
    assert mentioned == {f"#/components/schemas/{name}" for name in schemas}
    paths = {(method, path) for path, item in described["paths"].items() for method in item}
    assert paths == {(each.method.lower(), each.path.replace(":path", "")) for each in OPERATIONS}
    for each in (operation for item in described["paths"].values() for operation in item.values()):
        assert each["summary"] and {"200", "default"} == set(each["responses"]) and each["operationId"]
    assert all(schema["description"] and schema["type"] == "object" for schema in schemas.values())


@pytest.mark.parametrize("path", [each.path for each in OPERATIONS if each.request is not None])
def test_description_lists_exactly_the_accepted_fields(described, path):
    (operation,) = (each for each in OPERATIONS if each.path == path)
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert set(schema["properties"]) == set(fields_of(operation.request)) and schema["additionalProperties"] is False
    assert "model" in schema["properties"] and len(schema["properties"]) > 2
    for name, field in schema["properties"].items():  # every field has a description or a reference
        assert "description" in json.dumps(field) or "$ref" in json.dumps(field), name


def test_description_requires_a_key_if_the_server_does(described):
    assert described["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for each in OPERATIONS:
        (operation,) = described["paths"][each.path.replace(":path", "")].values()
        assert ("security" in operation) is not each.public
