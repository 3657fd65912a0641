# What training containers of the bed run in: Python and nothing more; torch comes from the mounted environment.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
# Whatever the suite has now: the archive keeps no older versions
# hadolint ignore=DL3008
RUN command -v python3 || (apt-get update -q && apt-get install -qy --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*)
LABEL launcher-bed.purpose="training containers of the test bed"
