"""Layers with a recurrent state: a causal convolution, the gated delta rule and Mamba-2, over states in a pool."""
