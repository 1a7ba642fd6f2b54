"""What a run leaves behind each round, and the tools that look after it."""
