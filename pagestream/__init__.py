"""The command line and the supervisor of the embedded default. Holds no serving logic."""
