"""Operations of the API, and their description in OpenAPI 3.1, which is derived from the declared types."""

import dataclasses
from typing import Any, Literal

import msgspec

from eqx_decoders.serving.http.chat_protocol import (
    ChatCompletionRequest,
    ClassifyRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from eqx_decoders.serving.http.protocol import (
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from eqx_decoders.serving.http.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Classification,
    Completion,
    DetokenizedText,
    ErrorBody,
    Health,
    Model,
    ModelList,
    TokenizedText,
    TokenizerInfo,
)


JSON = "application/json"
REFERENCE = "#/components/schemas/{name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """Operation of the API.

    - `handler`: method of `Api`.
    - `request`: type of the body of a POST request.
    - `response`: type of the JSON response, or the content type of another response.
    - `event`: type of the events of a streamed response.
    - `public`: no API key is required.
    """

    path: str
    handler: str
    response: type | str
    request: type | None = None
    event: type | None = None
    public: bool = False

    @property
    def method(self) -> Literal["GET", "POST"]:
        """HTTP method."""
        return "GET" if self.request is None else "POST"

    @property
    def types(self) -> list[type]:
        """Declared types of the request, the response and its events."""
        return [declared for declared in (self.request, self.response, self.event) if isinstance(declared, type)]


OPERATIONS = (
    Operation(path="/", handler="show_page", response="text/html", public=True),
    Operation(path="/health", handler="health", response=Health, public=True),
    Operation(path="/metrics", handler="show_metrics", response="text/plain", public=True),
    Operation(path="/openapi.json", handler="show_description", response=JSON, public=True),
    Operation(path="/v1/models", handler="models", response=ModelList),
    Operation(path="/v1/models/{name:path}", handler="model", response=Model),
    Operation(
        path="/v1/completions",
        handler="completions",
        request=CompletionRequest,
        response=Completion,
        event=Completion,
    ),
    Operation(
        path="/v1/chat/completions",
        handler="chat",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        event=ChatCompletionChunk,
    ),
    Operation(path="/v1/load_lora_adapter", handler="load_adapter", request=LoadAdapterRequest, response="text/plain"),
    Operation(
        path="/v1/unload_lora_adapter", handler="unload_adapter", request=UnloadAdapterRequest, response="text/plain"
    ),
    Operation(path="/classify", handler="classify", request=ClassifyRequest, response=Classification),
    Operation(path="/tokenize", handler="tokenize", request=TokenizeRequest, response=TokenizedText),
    Operation(path="/detokenize", handler="detokenize", request=DetokenizeRequest, response=DetokenizedText),
    Operation(path="/tokenizer_info", handler="tokenizer_info", response=TokenizerInfo),
)


def describe_api(owner: type, version: str, needs_key: bool) -> dict[str, Any]:
    """Return the description of the API. `owner`: class of the handlers, whose docstrings are the summaries."""
    types = {declared.__name__: declared for operation in OPERATIONS for declared in operation.types}
    listed = [*types.values(), Message, Tool, ErrorBody]
    schemas, components = msgspec.json.schema_components(listed, ref_template=REFERENCE)
    references: dict[type, Any] = dict(zip(listed, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        paths[path] = {operation.method.lower(): _describe(operation, owner, references, needs_key)}
    security = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    info = {"title": "eqx_decoders", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components, **security}}


def _describe(operation: Operation, owner: type, references: dict[type, Any], needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.response, type):
        content[JSON] = {"schema": references[operation.response]}
    else:
        content[operation.response] = {}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": references[operation.event]}
    failure = {"description": "The error.", "content": {JSON: {"schema": references[ErrorBody]}}}
    described: dict[str, Any] = {
        "operationId": operation.handler,
        "summary": (getattr(owner, operation.handler).__doc__ or "").strip(),
        "responses": {"200": {"description": "The response.", "content": content}, "default": failure},
    }
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": references[operation.request]}}}
    if "{name" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if needs_key and not operation.public:
        described["security"] = [{"key": []}]
    return described
