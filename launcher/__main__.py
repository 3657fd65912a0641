"""`python -m launcher` is `launcher`."""

from launcher.cli.main import main

main()
