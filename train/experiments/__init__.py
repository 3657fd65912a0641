"""What only the published experiments need; imported when an option asks for it."""
