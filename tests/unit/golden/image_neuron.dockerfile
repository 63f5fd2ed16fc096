# Regauge 0.1.0, variant neuron. Written by `regauge image render`; do not edit.
FROM public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.27.1-ubuntu24.04 AS build

# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1

# The base image fixes the release of the distribution; its updates have other version numbers.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv --system-site-packages /opt/regauge
ENV PATH=/opt/regauge/bin:$PATH
COPY constraints.txt /tmp/
# Packages of the base image keep their versions, such as torch.
RUN pip list --format=freeze | cat - /tmp/constraints.txt \
  | awk -F== '{name = tolower($1); gsub(/[-_.]+/, "-", name)} !seen[name]++' > /tmp/pins.txt \
 && mv /tmp/pins.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "regauge[s3]==0.1.0"

# The software bill of materials: the Python packages with their versions and licenses.
RUN python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible \
    --output-file /opt/regauge/sbom.cdx.json /opt/regauge/bin/python

FROM public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.27.1-ubuntu24.04

LABEL org.opencontainers.image.title="regauge-neuron" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.base.name="public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.27.1-ubuntu24.04" \
      regauge.run-file="travel.toml" \
      regauge.run-file.sha256="…"

USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev \
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
