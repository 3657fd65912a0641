"""The public interface: `launcher.load`, `plan`, `up`, `find`, `Run`, `Outcome`. The command line uses it too."""
