"""The engine: the only place that executes a plan."""
