"""Many peft adapters of one frozen base model as one array."""
