"""What the gateway and the engine worker must agree on: messages, Redis names and scripts, settings, logs. A leaf."""
