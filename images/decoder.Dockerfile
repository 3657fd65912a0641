# The first stage of a trainer's image: its decoder is compiled in the base, and only the result is copied.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.09-py3
FROM ${BASE_IMAGE} AS decoder
# Only for this stage
# hadolint ignore=DL3002
USER 0
COPY decoder.sh roi.c /opt/launcher/
RUN sh /opt/launcher/decoder.sh /opt/launcher/roi.c /opt/launcher/decoder
