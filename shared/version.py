"""The version of the distribution; pyproject.toml reads it here. It knows nothing, and is in no walk."""

VERSION = "0.1.0"
