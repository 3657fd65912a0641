# A node: sshd, a Docker engine, three users, and nothing else that a launcher could lean on.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
# Whatever the suite has now: the archive keeps no older versions
# hadolint ignore=DL3008
RUN apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
      docker.io openssh-server iproute2 iptables procps \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /etc/ssh/ssh_host_* \
    # A node has no Python: whatever we run on it must do without.
    && rm -f /usr/bin/python3* /usr/local/bin/python3*
# uids that no image knows; "*" is an unusable password, while the default "!" locks the account for keys too
RUN useradd -m -s /bin/bash -u 1001 -p '*' trainer && useradd -m -s /bin/bash -u 1002 -p '*' nodocker \
    && usermod -aG docker trainer && usermod -p '*' root
RUN printf 'PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nUseDNS no\n' \
      > /etc/ssh/sshd_config.d/bed.conf
COPY node-start.sh bed-dockerd.sh /usr/local/sbin/
VOLUME /var/lib/docker
CMD ["/usr/local/sbin/node-start.sh"]
