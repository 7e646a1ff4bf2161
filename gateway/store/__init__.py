"""The gateway's only Redis code: requests in, ordered events out, and what is read of the fleet and the queues."""
