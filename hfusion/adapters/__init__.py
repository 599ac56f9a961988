"""Many adapters of one frozen base as one array, by peft."""
