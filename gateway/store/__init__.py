"""The gateway's only Redis code: submits requests, delivers their events in order, and reads fleet and queue state."""
