"""Labels of images. Every container of an image shows them too, so none is a label of launcher.model.labels."""

from __future__ import annotations

MADE = "launcher.image.recipe"  # digest of the recipe: marks images that we made
JOB = "launcher.image.job"
TORCH = "launcher.image.torch"
TORCHVISION = "launcher.image.torchvision"
STEP = "launcher.image.step"
WHY = "launcher.image.why"
BASE_ID = "launcher.image.base-id"
OCI_BASE_NAME = "org.opencontainers.image.base.name"
OCI_BASE_DIGEST = "org.opencontainers.image.base.digest"
OCI_TITLE = "org.opencontainers.image.title"
