"""The table of endpoints: one entry each; the router and /openapi.json are both made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from pydantic import BaseModel

from daemon.api import admin, chat, completions, info, native, schema
from daemon.messages import Residency

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. `path` is what documents show; it is served with and without /v1 and with a last slash.

    `body` is what it takes; `answer` is what it gives, where a model of ours says so.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[schema.Body] | None = None
    answer: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)
    streams: bool = False
    text: bool = False

    def variants(self) -> list[str]:
        """Every spelling under which it is served."""
        bare = self.path.removeprefix("/v1")
        return [prefix + bare + slash for prefix in ("", "/v1") for slash in ("", "/")]


_NOT_OFFERED = (501,)
TABLE: tuple[Endpoint, ...] = (
    Endpoint("POST", "/v1/chat/completions", chat.chat_completions, "Answer a chat.", schema.ChatRequest, streams=True),
    Endpoint(
        "POST", "/v1/completions", completions.completions, "Continue a text.", schema.CompletionRequest, streams=True
    ),
    Endpoint(
        "POST",
        "/completion",
        native.completion,
        "Continue a text, llama-server's shape.",
        schema.NativeRequest,
        streams=True,
    ),
    Endpoint("POST", "/tokenize", native.tokenize, "Text to token ids.", schema.TokenizeRequest),
    Endpoint("POST", "/detokenize", native.detokenize, "Token ids to text.", schema.DetokenizeRequest),
    Endpoint("POST", "/apply-template", native.apply_template, "The prompt of a chat.", schema.ChatFields),
    Endpoint("GET", "/v1/models", info.models, "The served model."),
    Endpoint("GET", "/v1/models/{id}", info.model, "The served model by its id."),
    Endpoint("GET", "/health", info.health, "Whether requests are answered.", statuses=(200, 503)),
    Endpoint("GET", "/metrics", info.metrics, "Prometheus metrics.", text=True),
    Endpoint("GET", "/props", info.props, "Properties and default samplers, llama-server's shape."),
    Endpoint("GET", "/slots", info.slots, "What each sequence does, llama-server's shape."),
    Endpoint("GET", "/v1/residency", info.residency, "Which experts are in VRAM, and why.", answer=Residency),
    Endpoint("POST", "/v1/requests/{id}/cancel", admin.cancel_request, "Give a running request up."),
    Endpoint("POST", "/v1/embeddings", info.embeddings, "Not offered.", statuses=_NOT_OFFERED),
    Endpoint("POST", "/v1/responses", info.not_offered, "Not offered.", statuses=_NOT_OFFERED),
    Endpoint("POST", "/v1/messages", info.not_offered, "Not offered yet.", statuses=_NOT_OFFERED),
    Endpoint("POST", "/v1/messages/count_tokens", info.not_offered, "Not offered yet.", statuses=_NOT_OFFERED),
    Endpoint("POST", "/infill", info.not_offered, "Not offered.", statuses=_NOT_OFFERED),
    Endpoint("POST", "/v1/rerank", info.not_offered, "Not offered.", statuses=_NOT_OFFERED),
)
