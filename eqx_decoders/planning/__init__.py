"""Plans of training steps for machines that are not here: memory, traffic, operations, and estimated time."""
