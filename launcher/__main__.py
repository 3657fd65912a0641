"""`python -m launcher`, and what the command `launcher` calls: a Ctrl-C has its exit code while modules load, too."""

import sys

STOPPED = 5  # errors.StoppedByUser, whose module is not loaded yet


def main() -> None:
    try:
        from launcher.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
