"""The Docker engine, local or over ssh: containers, images, ulimits."""

DIAL_STDIO = "docker system dial-stdio"
