"""Errors, headers, and models of Anthropic's API."""

from gateway.apis.anthropic.format import anthropic_error, anthropic_id
from gateway.apis.anthropic.models import list_models, show_model
from gateway.http.dialect import Dialect

DIALECT = Dialect(
    paths=("/v1/messages",),
    shared_paths=("/v1/models", "/models"),
    selector="anthropic-version",  # every request of Anthropic's clients has it
    error=anthropic_error,
    headers=lambda request_id: {"request-id": anthropic_id(request_id)},
    show_model=show_model,
    list_models=list_models,
)
