"""Every error that a client can get, and its OpenAI form: {"error": {message, type, param, code}}, all four keys.

    GatewayError                        status  code
    ├── InvalidRequest                  400     invalid_value | previous_response_not_found
    │   ├── InvalidJson                 400     invalid_json
    │   ├── MissingParameter            400     missing_required_parameter
    │   ├── UnsupportedParameter        400     unsupported_parameter
    │   └── ContextLengthExceeded       400     context_length_exceeded
    ├── Unauthenticated                 401     invalid_api_key
    ├── Forbidden                       403     cross_site_request | host_not_allowed
    ├── ModelNotFound                   404     model_not_found
    ├── RequestNotFound                 404     request_not_found
    ├── FileNotFound                    404     file_not_found
    ├── BatchNotFound                   404     batch_not_found
    ├── UnknownUrl                      404     unknown_url
    ├── MethodNotAllowed                405     method_not_allowed
    ├── RequestTimeout                  408     request_timeout
    ├── IdempotencyKeyReused            409     idempotency_key_reused
    ├── BatchEnded                      409     batch_ended
    ├── BatchNotEnded                   409     batch_not_ended
    ├── BodyTooLarge                    413     body_too_large
    ├── FilesFull                       413     files_full | too_many_batches
    ├── UnsupportedMediaType            415     unsupported_media_type
    ├── RateLimited                     429     requests_per_minute_exceeded | tokens_per_minute_exceeded
    │                                           | store_share_exceeded | queue_wait_exceeded
    │   └── KeyShareExceeded            429     key_share_exceeded
    ├── GenerationFailed                500     request_failed | request_cancelled, or the worker's code
    ├── InternalError                   500     internal
    ├── NotServed                       501     not_served
    ├── Unavailable                     503     starting | no_worker | draining | queue_full | queue_timeout
    │                                           | gateway_full | store_unavailable | store_not_replicated
    │                                           | store_recovering | store_full | name_contended | needs_newer_worker
    ├── DeadlineExceeded                504     deadline_exceeded
    └── DiskFull                        507     disk_full

Pure. Messages name the field and the allowed values. They never contain paths, addresses, or values that the client
did not send.
"""

import math
from typing import Any, ClassVar

# OpenAI's error type by status. Default: invalid_request_error below 500, else server_error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}

KEY_SHARE_RETRY_SECONDS = 2  # as for a full gateway or queue


class GatewayError(Exception):
    """Base of all errors. Subclasses set `status` and `code` as class keywords, or inherit them."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal"
    # OpenAI's clients retry 408, 409, 429, and 5xx twice; False stops them where a retry cannot help.
    should_retry: ClassVar[bool | None] = None

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, should_retry: bool | None = None
    ) -> None:
        super().__init_subclass__()
        cls.status = cls.status if status is None else status
        cls.error_type = _TYPES.get(cls.status, "invalid_request_error" if cls.status < 500 else "server_error")
        cls.default_code = cls.default_code if code is None else code
        cls.should_retry = cls.should_retry if should_retry is None else should_retry

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent, (type(self), self.args, self.__dict__)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.should_retry is None else {"x-should-retry": str(self.should_retry).lower()}


def _sent(kind: type[GatewayError], args: tuple[Any, ...], state: dict[str, Any]) -> GatewayError:
    """Unpickle an error of another process without calling its constructor."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(GatewayError, status=400, code="invalid_value"):
    pass


class InvalidJson(InvalidRequest, code="invalid_json"):
    pass


class MissingParameter(InvalidRequest, code="missing_required_parameter"):
    pass


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    pass


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt, or the prompt with `max_tokens`, exceeds the context.

    Attributes:
        prompt_tokens: Tokens of the prompt; a lower bound if `is_lower_bound`.
        max_tokens: Requested tokens of the answer; 0 if the prompt alone is too long.
        limit: Context length in tokens.
        is_lower_bound: Whether the prompt was refused before it was encoded.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str,
        prompt_tokens: int,
        limit: int,
        max_tokens: int = 0,
        is_lower_bound: bool = False,
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        self.is_lower_bound = is_lower_bound


class Unauthenticated(GatewayError, status=401, code="invalid_api_key"):
    def headers(self) -> dict[str, str]:
        # A browser that opens the page asks for the Basic password, which is the API key.
        return {"WWW-Authenticate": 'Bearer, Basic realm="pagestream"'}


class Forbidden(GatewayError, status=403, code="cross_site_request"):
    """A cross-site request, or one for a host that is not allowed."""


class ModelNotFound(GatewayError, status=404, code="model_not_found"):
    pass


class RequestNotFound(GatewayError, status=404, code="request_not_found"):
    pass


class FileNotFound(GatewayError, status=404, code="file_not_found"):
    """No such file, or it belongs to another key."""


class BatchNotFound(GatewayError, status=404, code="batch_not_found"):
    """No such batch, or it belongs to another key."""


class UnknownUrl(GatewayError, status=404, code="unknown_url"):
    pass


class MethodNotAllowed(GatewayError, status=405, code="method_not_allowed"):
    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"Allow": self.allowed}


class RequestTimeout(GatewayError, status=408, code="request_timeout", should_retry=False):
    pass


class IdempotencyKeyReused(GatewayError, status=409, code="idempotency_key_reused", should_retry=False):
    pass


class BatchEnded(GatewayError, status=409, code="batch_ended", should_retry=False):
    """The batch has ended, so it cannot be cancelled."""


class BatchNotEnded(GatewayError, status=409, code="batch_not_ended", should_retry=False):
    """The batch has not ended, so it cannot be deleted."""


class BodyTooLarge(GatewayError, status=413, code="body_too_large"):
    pass


class FilesFull(GatewayError, status=413, code="files_full", should_retry=False):
    """A quota of files and batches is used up, that of this key or that of all keys."""


class UnsupportedMediaType(GatewayError, status=415, code="unsupported_media_type"):
    pass


class RateLimited(GatewayError, status=429, should_retry=True):
    """A limit of the request's key; nothing was stored."""

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Retry-After": str(self.retry_after_seconds)}


class KeyShareExceeded(RateLimited, code="key_share_exceeded"):
    """A key would hold more than its share of a resource that keys divide (`shared/shares.py`)."""

    def __init__(self, resource: str, share: str, setting: str) -> None:
        """Create the error.

        Args:
            resource: Name of the resource, in the plural.
            share: What the key may hold now, with its unit.
            setting: The flag that sets the total for all keys.
        """
        super().__init__(
            f"This API key uses its full share of the {resource}: at most {share} now ({setting}). Retry when some of "
            "its other requests have ended.",
            code=self.default_code,
            retry_after_seconds=KEY_SHARE_RETRY_SECONDS,
        )


class GenerationFailed(GatewayError, code="request_failed", should_retry=False):
    """The engine ended the request with an error; a retry would most likely fail again."""


class InternalError(GatewayError):
    def __init__(self) -> None:
        super().__init__("The server had an error while handling the request.")


class NotServed(GatewayError, status=501, code="not_served", should_retry=False):
    """A part of the API that this server does not implement."""


class Unavailable(GatewayError, status=503, code="no_worker", should_retry=True):
    """Refused before acceptance: nothing was stored, so the client may retry the same request."""

    def __init__(self, message: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Retry-After": str(self.retry_after_seconds)}


class DeadlineExceeded(GatewayError, status=504, code="deadline_exceeded", should_retry=False):
    """The request's deadline passed before completion."""


class DiskFull(GatewayError, status=507, code="disk_full", should_retry=False):
    """The server's disk is full, although no quota is used up; the operator must free space."""
