"""Read `--speculative-config`: a JSON object with vLLM's keys."""

import msgspec

from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.proposers import PROPOSERS
from shared.settings import SettingsError


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Return the configuration in a JSON object.

    Raises:
        SettingsError: If it is not one; the message names the key and the allowed values.
    """
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
        if config.method not in PROPOSERS:
            raise ValueError(f"method: expected one of {', '.join(PROPOSERS)}; got {config.method!r}")
    except ValueError as error:  # msgspec.ValidationError and DecodeError are subclasses
        example = '{"method": "ngram", "num_speculative_tokens": 3}'
        raise SettingsError(f"--speculative-config: expected a JSON object such as {example}: {error}") from error
    return config
