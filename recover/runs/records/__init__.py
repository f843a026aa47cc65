"""What a run writes down, line by line: the kinds of records, the one who writes them, and those who read along."""
