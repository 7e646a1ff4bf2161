"""The batch driver's settings: those of a gateway, because it submits lines as one, and the address of its metrics."""

from dataclasses import dataclass

from gateway.settings import GatewaySettings
from shared.settings import SettingsError, setting


@dataclass(frozen=True, kw_only=True)
class DriverSettings:
    gateway: GatewaySettings

    metrics_host: str = setting("127.0.0.1", help="address of /metrics, /livez, and /readyz")
    metrics_port: int = setting(8002, help="port of /metrics; 0: a free port, which is logged")

    def __post_init__(self) -> None:
        if self.gateway.files_dir is None:
            raise SettingsError("--files-dir: a value is required, the directory that the gateways have too")
        if not 0 <= self.metrics_port <= 65535:
            raise SettingsError(f"--metrics-port: expected 0 to 65535, got {self.metrics_port}")
