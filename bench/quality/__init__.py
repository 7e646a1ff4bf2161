"""The quality of quantized formats, measured with lm-eval."""
