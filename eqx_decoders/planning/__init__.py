"""What a training step will need of a machine, before there is one: memory, traffic, operations, and estimated time."""
