"""The parts of a layer as frozen values: their tensors, and each rank's share. No torch."""
