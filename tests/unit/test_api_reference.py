"""The table of endpoints, and the documents that come from it."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from app.api_reference import ENDPOINTS, markdown
from tests.http_server import MakeServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


async def test_every_route_is_in_the_table_and_the_reverse(make_server: MakeServer) -> None:
    routes = make_server().app.routes
    found = {
        (route.path.replace(":path}", "}"), method)
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert found == {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS}


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), (
        "run `python -m app.api_reference > docs/api.md`"
    )


async def test_the_openapi_document_is_closed(make_server: MakeServer) -> None:
    answer = await make_server().client.get("/openapi.json")
    document = answer.json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    references = set()

    def collect(node: object) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.add(node["$ref"])
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(document)
    assert references == {f"#/components/schemas/{name}" for name in schemas}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in ("/health", "/ready")
            assert bool(operation["security"]) is not is_open, path
    completion = schemas["CompletionRequest"]["properties"]
    kinds = [kind["type"] for kind in completion["prompt"]["anyOf"]]
    assert kinds == ["string", "array", "array", "array"]
