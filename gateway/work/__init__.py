"""Work that may block the event loop, and the tasks and processes that do it."""
