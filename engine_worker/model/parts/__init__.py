"""The parts of a layer with their weights; load.py makes them from their specs."""
