# Regauge 0.1.0, variant cuda. Written by `regauge image render`; do not edit.
FROM nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04@sha256:24c8e3581ea6330038b0d374920721983312627f8adbfcf390bdb4b399d280ed AS build

# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

# The base image fixes the release of the distribution; its updates have other version numbers.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/regauge
ENV PATH=/opt/regauge/bin:$PATH
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "regauge[s3,cuda]==0.1.0"

# The software bill of materials: the Python packages with their versions and licenses.
RUN python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible \
    --output-file /opt/regauge/sbom.cdx.json /opt/regauge/bin/python

FROM nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04@sha256:24c8e3581ea6330038b0d374920721983312627f8adbfcf390bdb4b399d280ed

LABEL org.opencontainers.image.title="regauge-cuda" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04@sha256:24c8e3581ea6330038b0d374920721983312627f8adbfcf390bdb4b399d280ed" \
      regauge.run-file="travel.toml" \
      regauge.run-file.sha256="…"

USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl g++ python3 python3-dev \
 && rm -rf /var/lib/apt/lists/*

# EFA: libfabric and the plugin of the collectives library; the driver is on the machine.
WORKDIR /tmp/efa
RUN curl -fsSLO https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz \
 && echo "cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309  aws-efa-installer-1.49.0.tar.gz" | sha256sum -c - \
 && tar -xf aws-efa-installer-1.49.0.tar.gz --strip-components=1 \
 && apt-get update \
 && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
 && rm -rf /tmp/efa/* /var/lib/apt/lists/*
ENV PATH=/opt/amazon/efa/bin:$PATH
ENV LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH

COPY --from=build /opt/regauge /opt/regauge
ENV PATH=/opt/regauge/bin:$PATH

RUN useradd --create-home --uid 10001 regauge \
 && install --directory --owner regauge --group regauge /workspace
WORKDIR /workspace
COPY --chown=10001:10001 travel.toml ./
USER 10001
ENTRYPOINT []
CMD ["regauge", "--help"]
