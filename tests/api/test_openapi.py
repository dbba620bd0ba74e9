"""/openapi.json describes exactly what is served."""

from __future__ import annotations

import re
from typing import Any

from daemon.api.openapi import document
from tests.api.conftest import Daemon


def plain(path: str) -> str:
    """A path without the spellings that do not matter: /v1, last slash, pattern of a parameter."""
    return re.sub(r"{(\w+)[^}]*}", r"{\1}", path).removeprefix("/v1").rstrip("/")


async def test_every_route_is_described_and_every_description_is_served(daemon: Daemon) -> None:
    described = (await daemon.get("/openapi.json")).json()["paths"]
    documented = {(method.upper(), plain(path)) for path, item in described.items() for method in item}
    routes = daemon.app.router.routes()
    served = {(route.method, plain(route.resource.canonical)) for route in routes if route.resource is not None}
    assert {(method, path) for method, path in served if method != "HEAD"} == documented


async def test_document_is_whole(daemon: Daemon) -> None:
    reply = await daemon.get("/v1/openapi.json")
    found: Any = reply.json()
    assert found == document("0.0-test")
    assert found["openapi"] == "3.1.0"
    operations = [(path, item) for path, methods in found["paths"].items() for item in methods.values()]
    identities = [item["operationId"] for _, item in operations]
    assert len(set(identities)) == len(identities)
    for path, item in operations:
        assert item["summary"]
        assert all(response["description"] for response in item["responses"].values())
        named = {parameter["name"] for parameter in item.get("parameters", [])}
        assert named == set(re.findall(r"{(\w+)}", path))


def test_every_reference_resolves() -> None:
    found = document("1")
    references: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.append(node["$ref"])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(found)
    assert references
    for reference in references:
        node = found
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert isinstance(node, dict)


def test_every_number_of_every_body_is_bounded() -> None:
    """Rule 16 of the HTTP contract, read from the document; ids of tokens are checked against the vocabulary."""
    unbounded = []
    for name, schema in document("1")["components"]["schemas"].items():
        for field, item in schema.get("properties", {}).items():
            for part in item.get("anyOf", [item]):
                if part.get("type") in ("integer", "number"):
                    lower = "minimum" in part or "exclusiveMinimum" in part
                    if not (lower and "maximum" in part):
                        unbounded.append(f"{name}.{field}")
    assert unbounded == []
