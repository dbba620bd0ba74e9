"""/openapi.json describes exactly what is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from daemon.api.openapi import document
from daemon.messages import Residency
from tests.api.conftest import Daemon
from tests.fakes import MOVING


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
        named = {parameter["name"] for parameter in item.get("parameters", []) if parameter["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))


def test_what_generates_takes_a_class_and_may_find_no_room() -> None:
    paths = document("x")["paths"]
    for path, methods in paths.items():
        for item in methods.values():
            headers = [one for one in item.get("parameters", []) if one["in"] == "header"]
            generates = path in ("/v1/chat/completions", "/v1/completions", "/completion")
            assert ("429" in item["responses"]) == bool(headers) == generates
    item = paths["/v1/completions"]["post"]
    assert [one["schema"]["enum"] for one in item["parameters"]] == [["interactive", "normal", "background"]]
    assert "Retry-After" in item["responses"]["429"]["headers"]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


def reached(node: Any, document: Any) -> set[str]:
    """Names of the schemas that a part of the document refers to, directly or not."""
    names: set[str] = set()
    waiting = [node]
    while waiting:
        new = {reference.rpartition("/")[2] for reference in references(waiting.pop())} - names
        names |= new
        waiting += [document["components"]["schemas"][name] for name in new]
    return names


def test_every_reference_resolves() -> None:
    found = document("1")
    all_references = list(references(found))
    assert all_references
    for reference in all_references:
        node = found
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert isinstance(node, dict)


def test_every_number_of_every_body_is_bounded() -> None:
    """Rule 16 of the HTTP contract, read from the document; ids of tokens are checked against the vocabulary."""
    unbounded = []
    found = document("1")
    bodies = [item["requestBody"] for methods in found["paths"].values() for item in methods.values()
              if "requestBody" in item]  # fmt: skip
    for name in reached(bodies, found):
        schema = found["components"]["schemas"][name]
        for field, item in schema.get("properties", {}).items():
            for part in item.get("anyOf", [item]):
                if part.get("type") in ("integer", "number"):
                    lower = "minimum" in part or "exclusiveMinimum" in part
                    if not (lower and "maximum" in part):
                        unbounded.append(f"{name}.{field}")
    assert unbounded == []


async def residency(daemon: Daemon, told: Residency) -> tuple[Any, Any, Any]:
    """A real answer, the schema that the document has for it, and the document."""
    daemon.fakes.supervisor.residency = told
    found = (await daemon.get("/openapi.json")).json()
    response = found["paths"]["/v1/residency"]["get"]["responses"]["200"]
    return (await daemon.get("/v1/residency")).json(), response["content"]["application/json"]["schema"], found


@pytest.mark.parametrize("told", [Residency(), MOVING], ids=["off", "live"])
async def test_a_real_answer_fits_the_schema_of_residency(daemon: Daemon, told: Residency) -> None:
    answer, schema, found = await residency(daemon, told)
    assert schema == {"$ref": "#/components/schemas/Residency"}
    assert list(misfits(answer, schema, found)) == []
    parts = {"ExpertDevice", "ExpertLayer", "HeatSummary", "Allowance", "Gate", "Remembered"}
    assert reached(schema, found) == {"Residency"} | parts


async def test_the_schema_of_residency_is_strict(daemon: Daemon) -> None:
    answer, schema, found = await residency(daemon, MOVING)
    for change, where in (
        ({"gate": {**answer["gate"], "state": "ajar"}}, "$.gate.state"),
        ({"moves": 1.5}, "$.moves"),
        ({"moves": True}, "$.moves"),
        ({"devices": [{**answer["devices"][0], "shared_memory": 1}]}, "$.devices[0].shared_memory"),
        ({"hit_rate": "high"}, "$.hit_rate"),
        ({"surprise": 1}, "$"),
        ({"layers": [{**answer["layers"][1], "heat": {"for_half": 1}}]}, "$.layers[0].heat"),
    ):
        assert list(misfits(answer | change, schema, found)) == [where]
    del answer["moves"]
    assert list(misfits(answer, schema, found)) == ["$"], "what is sent has every field"


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "null": type(None)}
TYPES |= {"boolean": bool}
SAYS_NOTHING = {"title", "description", "default"}


def misfits(value: Any, schema: Any, found: Any, where: str = "$") -> Iterator[str]:
    """Where `value` is not what the schema says, by those words of JSON Schema that the document uses."""
    said = {word: what for word, what in schema.items() if word not in SAYS_NOTHING}
    if "$ref" in said:
        yield from misfits(value, found["components"]["schemas"][said.pop("$ref").rpartition("/")[2]], found, where)
    if "anyOf" in said and all([*misfits(value, one, found, where)] for one in said.pop("anyOf")):
        yield where
    said.pop("anyOf", None)
    kind = said.pop("type", None)
    if kind and (not isinstance(value, TYPES[kind]) or isinstance(value, bool) is not (kind == "boolean")):
        yield where
        return
    if "enum" in said and value not in said.pop("enum"):
        yield where
    properties = said.pop("properties", {})
    if properties:
        assert said.pop("additionalProperties") is False
        if set(said.pop("required")) - set(value) or set(value) - set(properties):
            yield where
        for name, one in properties.items():
            if name in value:
                yield from misfits(value[name], one, found, f"{where}.{name}")
    if "items" in said:
        items = said.pop("items")
        for number, one in enumerate(value):
            yield from misfits(one, items, found, f"{where}[{number}]")
    assert not said, f"words that this test does not know: {said}"
