"""What runs when: shards, plans, policies, timelines; numbers only."""
