"""The agreements of the gateway and the engine worker: messages, Redis names and scripts, settings, logs. A leaf."""
