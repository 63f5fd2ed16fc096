# Regauge 0.1.0, variant cpu. Written by `regauge image render`; do not edit.
FROM python:3.12-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e AS build

# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

# The base image fixes the release of the distribution; its updates have other version numbers.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/regauge
ENV PATH=/opt/regauge/bin:$PATH
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "regauge[s3]==0.1.0"

# The software bill of materials: the Python packages with their versions and licenses.
RUN python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible \
    --output-file /opt/regauge/sbom.cdx.json /opt/regauge/bin/python

FROM python:3.12-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e

LABEL org.opencontainers.image.title="regauge-cpu" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="python:3.12-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e" \
      regauge.run-file="travel.toml" \
      regauge.run-file.sha256="…"

USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ \
 && rm -rf /var/lib/apt/lists/*

COPY --from=build /opt/regauge /opt/regauge
ENV PATH=/opt/regauge/bin:$PATH

RUN useradd --create-home --uid 10001 regauge \
 && install --directory --owner regauge --group regauge /workspace
WORKDIR /workspace
COPY --chown=10001:10001 travel.toml ./
USER 10001
ENTRYPOINT []
CMD ["regauge", "--help"]
