"""While a run goes on: what is read of its nodes, what it means, and what is done about it."""
