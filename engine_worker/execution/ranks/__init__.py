"""Run one model over several processes: groups, channels, health."""
