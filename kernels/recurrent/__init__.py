"""Layers with a recurrent state: a causal convolution and the gated delta rule, over states in a pool."""
