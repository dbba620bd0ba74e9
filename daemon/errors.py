"""Errors that reach a client or an operator: each knows its HTTP status, its code and its exit code."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG; systemd is told not to restart on it


class HotsetError(Exception):
    """Base of every error this project raises on purpose.

    `message` is written for the person who made the request: it never quotes prompts, paths or keys.
    """

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class BadRequest(HotsetError):
    """The request can never succeed as it is (400)."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class Unsupported(BadRequest):
    """A field or content kind that this daemon does not offer (400), refused instead of ignored."""

    code = "unsupported"


class ContextLengthExceeded(BadRequest):
    """The prompt does not fit the context (400); both numbers are in the message."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"The prompt has {n_prompt} tokens and the context holds {n_ctx}, one of which must stay free "
            "for the answer; shorten the prompt or raise model.context.",
            param="messages",
        )


class AnswerTooLarge(BadRequest):
    """A whole answer would take more memory than http.max_answer_mib (400); a stream would not."""

    code = "answer_too_large"


class TemplateFailed(BadRequest):
    """The chat template refused the messages, or ran past its time or size limit (400)."""

    code = "template_error"


class Unauthorized(HotsetError):
    """No key, or a wrong one (401)."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(HotsetError):
    """A Host or Origin header that is not on the allow-list (403)."""

    status = 403
    code = "forbidden"
    type = "permission_error"


class NotFound(HotsetError):
    """No such path or object (404)."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    """The named model is not the one being served (404)."""

    code = "model_not_found"


class PayloadTooLarge(HotsetError):
    """The body is larger than http.max_body_mib (413)."""

    status = 413
    code = "payload_too_large"
    type = "invalid_request_error"


class QueueFull(HotsetError):
    """The bounded queue has no room (429); `retry_after` is in whole seconds."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"


class ClientQueueFull(QueueFull):
    """As many requests of one client wait as may, although the queue has room for others (429)."""

    code = "client_queue_full"


class NotImplementedHere(HotsetError):
    """An endpoint that the loaded model or this daemon cannot serve (501)."""

    status = 501
    code = "not_implemented"
    type = "invalid_request_error"


class ModelLoading(HotsetError):
    """The engine is loading or restarting (503); `retry_after` is in whole seconds."""

    status = 503
    code = "model_loading"


class EngineFailed(HotsetError):
    """The engine ended or refused while the request was running (500, or an error event mid-stream)."""

    code = "engine_failed"


class ModelUnusable(HotsetError):
    """A model file that cannot be served: missing, broken, hostile, unknown (shown to the operator)."""

    code = "model_unusable"


class ConfigError(Exception):
    """A configuration that cannot be used; `problems` lists every fault as (key path, what is wrong)."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{path}: {what}" if path else what for path, what in problems))
