"""The network and its forward pass. Inputs and the KV pool are arguments; there is no global state."""
