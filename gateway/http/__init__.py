"""The bytes on a client's connection: bodies read within limits, events written to those who read them."""
