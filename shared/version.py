"""The version of the distribution, which pyproject.toml reads."""

VERSION = "0.1.0"
