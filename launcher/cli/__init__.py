"""Commands: parse, call, render. Nothing imports this package."""
