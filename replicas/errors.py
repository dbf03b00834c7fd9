"""Every error that a caller of the service can receive.

ServingError                    500
|- RequestError                 400  the caller's fault; never retried
|  |- InvalidRequest            400  a parameter is wrong; `param` names it
|  |- ContextLengthExceeded     400  prompt (and max_tokens) do not fit
|  |- AuthenticationError       401  no key, or a wrong one
|  |- ModelNotFound             404  this deployment does not serve that model
|  |- PayloadTooLarge           413  body over the limit, refused before parsing
|- Overloaded                   429  admission refused; carries `retry_after_s`
|- DeadlineExceeded             504  the time budget was spent, queued or running
|- EngineError                  500  our fault
   |- EngineNotReady            503  still warming up, or draining
   |- EngineDead                500  the replica died; Serve replaces it, the client migrates

Across a Ray hop a ServingError is the *return value* of the call and is raised by the caller: an
expected refusal then leaves no stack trace in a replica's log. A client that leaves is an
`asyncio.CancelledError`, not one of these; running out of pages is a scheduling outcome.

Every class takes one positional message and keyword-only extras with defaults, so that pickle
(which rebuilds from `args`) round-trips them.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of all errors of the service.

    Attributes:
        status: HTTP status that the ingress answers with.
        type: OpenAI's error type.
        code: OpenAI's string code, or None.
        param: the request parameter at fault, or None.
        retry_after_s: seconds after which a retry may succeed, or None.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str = "internal error",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def message(self) -> str:
        """What was wrong, the value, the limit, and what to do."""
        return str(self.args[0])


class RequestError(ServingError):
    """The caller's fault; the same request will fail again."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A parameter is missing, malformed or out of range."""

    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    """Prompt and requested output do not fit the context or the KV cache."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No API key was given, or it is not one of ours."""

    status = 401
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    """The named model is not served here."""

    status = 404
    code = "model_not_found"


class PayloadTooLarge(RequestError):
    """The body exceeds the configured limit."""

    status = 413
    code = "payload_too_large"


class Overloaded(ServingError):
    """Admission refused; try again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class DeadlineExceeded(ServingError):
    """The request's time budget was spent before it finished."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineError(ServingError):
    """The engine failed; not the caller's fault.

    Attributes:
        replica_id: the replica that failed, or None.
    """

    code = "engine_error"

    def __init__(
        self,
        message: str = "the engine failed",
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        replica_id: str | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.replica_id = replica_id


class EngineNotReady(EngineError):
    """The engine is still warming up, or is draining."""

    status = 503
    code = "engine_not_ready"


class EngineDead(EngineError):
    """The device thread or the whole replica died; Serve replaces it, the client migrates."""

    code = "engine_dead"
