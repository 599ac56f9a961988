"""Arrays on several processes and machines: ranks of torch.distributed, and the nodes of a Ray cluster."""
