"""HTTP in, Server-Sent Events out. Owns text; knows nothing of torch or of the device."""
