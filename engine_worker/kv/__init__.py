"""The layout of KV as plain values, without tensors and devices."""
