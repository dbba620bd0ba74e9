"""/openapi.json: built once from the table of endpoints and the pydantic models of their bodies and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from daemon.api import standing
from daemon.api.routes import TABLE, Endpoint
from daemon.fair_queue import CLASSES

_REF = "#/components/schemas/{model}"
OPENAPI_PATH = "/openapi.json"


def document(version: str, title: str = "hotset") -> dict[str, Any]:
    """The OpenAPI 3.1 description of every endpoint, under the path that the table shows."""
    _, definitions = models_json_schema([*_models()], ref_template=_REF)
    paths: dict[str, Any] = {OPENAPI_PATH: {"get": _own()}}
    for endpoint in TABLE:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version,
            "description": "Every path is served with and without /v1 and with a trailing slash.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}) | {"Error": _error_schema()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _models() -> Iterator[tuple[type[BaseModel], Literal["validation", "serialization"]]]:
    """Of what is sent here a field with a default may be missing, of what is sent from here none."""
    for endpoint in TABLE:
        if endpoint.body is not None:
            yield endpoint.body, "validation"
        if endpoint.answer is not None:
            yield endpoint.answer, "serialization"


@cache
def rendered(version: str) -> str:
    """The document as JSON text; it takes longer to make than the rest of an application."""
    return json.dumps(document(version), ensure_ascii=False)


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "responses": {str(status): _response(endpoint, status) for status in endpoint.statuses},
    }
    operation["responses"]["default"] = _json("An error.", {"$ref": _REF.format(model="Error")})
    parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)}", endpoint.path)]
    if endpoint.streams:
        parameters.append(_class_header())
        operation["responses"]["429"] = _too_many()
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(endpoint.body)}}}
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _class_header() -> dict[str, Any]:
    return {
        "name": standing.HEADER,
        "in": "header",
        "required": False,
        "description": "The class of the request, where service_tier does not say it.",
        "schema": {"type": "string", "enum": list(CLASSES)},
    }


def _too_many() -> dict[str, Any]:
    response = _json("No room in the queue, for anybody or for this client.", {"$ref": _REF.format(model="Error")})
    seconds = {"description": "Seconds until there is likely to be room.", "schema": {"type": "integer", "minimum": 1}}
    return response | {"headers": {"Retry-After": seconds}}


def _response(endpoint: Endpoint, status: int) -> dict[str, Any]:
    if status >= 500:
        return _json("Not available.", {"$ref": _REF.format(model="Error")})
    if endpoint.text:
        return {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    answer = {"type": ["object", "array"]} if endpoint.answer is None else _ref(endpoint.answer)
    response = _json("The answer.", answer)
    if endpoint.streams:
        response["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return response


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _own() -> dict[str, Any]:
    return {
        "operationId": "get_openapi",
        "summary": "This document.",
        "responses": {"200": _json("The document.", {"type": "object"})},
    }


def _operation_id(endpoint: Endpoint) -> str:
    words = re.sub(r"\W+", "_", endpoint.path.removeprefix("/v1")).strip("_")
    return f"{endpoint.method.lower()}_{words}"


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text},
            }
        },
    }
