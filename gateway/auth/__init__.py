"""Who may use the gateway, from where, and how much of it."""
