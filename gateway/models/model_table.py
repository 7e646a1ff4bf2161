"""The served models of this gateway, by their names and aliases: the `model` of a request chooses one."""

from collections.abc import Iterator, Sequence

from gateway.auth.rate_limits import Account
from gateway.errors import MissingParameter, ModelNotFound
from gateway.models.model_service import ModelService


class ModelTable:
    def __init__(self, services: Sequence[ModelService]) -> None:
        self._services = tuple(services)

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def of(self, account: Account) -> list[ModelService]:
        """Those that the account may use."""
        return [service for service in self._services if account.may_use(service.options.names)]

    def find(self, name: str | None, account: Account) -> ModelService:
        """Raises ModelNotFound, and MissingParameter where there are several to choose from."""
        services = self.of(account)
        names = ", ".join(repr(known) for service in services for known in service.options.names) or "none for this key"
        if name is None:
            if len(services) == 1:
                return services[0]
            raise MissingParameter(f"Missing required parameter: model. This server has {names}.", param="model")
        for service in services:
            if name in service.options.names:
                return service
        shown = name[:100]
        raise ModelNotFound(f"The model {shown!r} does not exist; this server has {names}.", param="model")
