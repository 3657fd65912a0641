"""The public interface: `launcher.load`, `plan`, `up`, `find`, `Run`, `Outcome`. The commands are its first user."""
