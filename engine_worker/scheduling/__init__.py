"""Who runs in the next step and where their KV lives. Pure: no torch, no I/O, no clock."""
