"""Plans of training and decoding steps for TPUs and GPUs that need not be attached: memory, traffic, FLOPs and time."""
