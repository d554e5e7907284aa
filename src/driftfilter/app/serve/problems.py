"""What a client is told if a request came to nothing: application/problem+json (RFC 9457)."""

import math
from typing import Any

JSON_TYPE = "application/problem+json"
_TITLES = {
    400: "The request cannot be read",
    401: "A token is needed",
    404: "There is nothing here",
    405: "The method is not allowed here",
    408: "The body did not come",
    409: "The sequence number does not fit",
    413: "The body is too large",
    415: "The media type is not known",
    422: "The inputs do not fit the model",
    429: "Too many requests",
    500: "The service failed",
    501: "This cannot be done here",
    503: "The service cannot answer now",
}


class ProblemError(Exception):
    """A request that is refused; nothing has changed."""

    def __init__(
        self,
        status: int,
        field: str,
        value: Any,
        allowed: str,
        detail: str = "",
        retry_after: float | None = None,
        **others: Any,
    ) -> None:
        self.status, self.field, self.allowed = status, _clean(field), _clean(allowed)
        plain = isinstance(value, (int, type(None))) or _is_finite(value)
        self.value = value if plain else _clean(str(value)[:200])
        self.detail = _clean(detail) or f"{self.field} must be {self.allowed}, got {self.value!r}"
        self.retry_after, self.others = retry_after, others
        super().__init__(self.detail)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a worker in another process."""
        args = (self.status, self.field, self.value, self.allowed, self.detail, self.retry_after)
        return _rebuild, (args, self.others)

    def to_dict(self) -> dict[str, Any]:
        """The document that the client gets."""
        return {
            "type": "about:blank",
            "title": _TITLES.get(self.status, "The request was refused"),
            "status": self.status,
            "detail": self.detail,
            "field": self.field,
            "value": self.value,
            "allowed": self.allowed,
            **self.others,
        }


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _clean(text: str) -> str:
    """A client's words without halves of characters, which are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _rebuild(args: tuple[Any, ...], others: dict[str, Any]) -> ProblemError:
    return ProblemError(*args, **others)
