"""Every error the gateway tells a client, and its OpenAI form: {"error": {message, type, param, code}}, all four keys.

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
    │                                           | max_concurrent_exceeded | max_waiting_exceeded
    │                                           | store_share_exceeded
    ├── GenerationFailed                500     request_failed | request_cancelled, or what the worker said
    ├── InternalError                   500     internal
    ├── NotServed                       501     not_served
    ├── Unavailable                     503     starting | no_worker | draining | queue_full | queue_timeout
    │                                           | gateway_full | store_unavailable | store_full | name_contended
    ├── DeadlineExceeded                504     deadline_exceeded
    └── DiskFull                        507     disk_full

Pure: knows nothing of aiohttp. Messages name the field and what was allowed; they never carry paths, addresses or
anything a client has not sent itself.

Every walk through the gateway may end with one of them. It knows no request.
"""

import math
from typing import Any, ClassVar


class GatewayError(Exception):
    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal"
    # OpenAI's clients repeat 408, 409, 429 and 5xx twice; False tells them that it cannot help.
    should_retry: ClassVar[bool | None] = None

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
    """One of another process; how it was made there is of no matter."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(GatewayError):
    status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class InvalidJson(InvalidRequest):
    default_code = "invalid_json"


class MissingParameter(InvalidRequest):
    default_code = "missing_required_parameter"


class UnsupportedParameter(InvalidRequest):
    default_code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class Unauthenticated(GatewayError):
    status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        # A browser that opens the page asks its user for the password of Basic: the key.
        return {"WWW-Authenticate": 'Bearer, Basic realm="pagestream"'}


class Forbidden(GatewayError):
    """Whoever it is, not from there."""

    status = 403
    error_type = "permission_error"
    default_code = "cross_site_request"


class ModelNotFound(GatewayError):
    status = 404
    error_type = "not_found_error"
    default_code = "model_not_found"


class RequestNotFound(GatewayError):
    status = 404
    error_type = "not_found_error"
    default_code = "request_not_found"


class FileNotFound(GatewayError):
    """Or of another key."""

    status = 404
    error_type = "not_found_error"
    default_code = "file_not_found"


class BatchNotFound(GatewayError):
    """Or of another key."""

    status = 404
    error_type = "not_found_error"
    default_code = "batch_not_found"


class UnknownUrl(GatewayError):
    status = 404
    error_type = "not_found_error"
    default_code = "unknown_url"


class MethodNotAllowed(GatewayError):
    status = 405
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"Allow": self.allowed}


class RequestTimeout(GatewayError):
    status = 408
    error_type = "invalid_request_error"
    default_code = "request_timeout"
    should_retry = False


class IdempotencyKeyReused(GatewayError):
    status = 409
    error_type = "invalid_request_error"
    default_code = "idempotency_key_reused"
    should_retry = False


class BatchEnded(GatewayError):
    """It cannot be cancelled any more."""

    status = 409
    error_type = "invalid_request_error"
    default_code = "batch_ended"
    should_retry = False


class BatchNotEnded(GatewayError):
    """It cannot be deleted yet."""

    status = 409
    error_type = "invalid_request_error"
    default_code = "batch_not_ended"
    should_retry = False


class BodyTooLarge(GatewayError):
    status = 413
    error_type = "invalid_request_error"
    default_code = "body_too_large"


class FilesFull(GatewayError):
    """Files and batches of this key, or of all, have the most bytes that they may."""

    status = 413
    error_type = "invalid_request_error"
    default_code = "files_full"
    should_retry = False


class UnsupportedMediaType(GatewayError):
    status = 415
    error_type = "invalid_request_error"
    default_code = "unsupported_media_type"


class RateLimited(GatewayError):
    """A limit of the request's own key; nothing was stored."""

    status = 429
    error_type = "rate_limit_error"
    should_retry = True

    def __init__(self, message: str, *, code: str, retry_after_seconds: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Retry-After": str(self.retry_after_seconds)}


class GenerationFailed(GatewayError):
    """The engine ended the request with an error; repeating it would most likely break it again."""

    default_code = "request_failed"
    should_retry = False


class InternalError(GatewayError):
    def __init__(self) -> None:
        super().__init__("The server had an error while handling the request.")


class NotServed(GatewayError):
    """A part of the API that this server does not have, and never has by itself."""

    status = 501
    error_type = "invalid_request_error"
    default_code = "not_served"
    should_retry = False


class Unavailable(GatewayError):
    """Refused before acceptance: nothing was stored, so the client may repeat it as it is."""

    status = 503
    error_type = "overloaded_error"
    default_code = "no_worker"
    should_retry = True

    def __init__(self, message: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Retry-After": str(self.retry_after_seconds)}


class DeadlineExceeded(GatewayError):
    """The request's own time was over; what it would have cost another time nobody knows."""

    status = 504
    default_code = "deadline_exceeded"
    should_retry = False


class DiskFull(GatewayError):
    """The disk of the server is full, whatever its limits say; its operator has to make room."""

    status = 507
    default_code = "disk_full"
    should_retry = False
