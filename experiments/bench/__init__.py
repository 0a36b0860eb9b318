"""What the suite's speed is held against: the same runs as anyone would write them, and single steps timed."""
