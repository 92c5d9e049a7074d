# The runtime service: loads what manifests describe. No transformers, no torch_tensorrt.
# Build from the repository's root: docker build -f deploy/docker/runtime.Dockerfile -t quire-runtime .
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY pyproject.toml README.md ./
COPY shared shared
COPY runtime_service runtime_service
# tensorrt-rtx is the engine library alone; ninja builds the CPU kernels below.
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir torch==2.14.1 ninja tensorrt-rtx==1.6.1.120 \
    && /opt/quire/bin/pip install --no-cache-dir '.[s3,signing,otel]'

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    GOMP_SPINCOUNT=1000 \
    OMP_WAIT_POLICY=active \
    HOME=/tmp \
    QUIRE_DATA=/data \
    QUIRE_CACHE=/cache \
    TRITON_CACHE_DIR=/cache/triton
USER 65532:65532
WORKDIR /tmp
EXPOSE 50062 50072 9462
ENTRYPOINT ["python", "-m", "runtime_service"]
