"""Commands: parse arguments, call the API, render results. No other package imports this one."""
