"""The Docker engine, here or over ssh: containers, images, what it grants."""

DIAL_STDIO = "docker system dial-stdio"
