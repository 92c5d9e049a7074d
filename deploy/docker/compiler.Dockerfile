# The compiler service: transformers, the C++ toolchain that AOTInductor calls, TensorRT-RTX. Needs no GPU.
# Build from the repository's root: docker build -f deploy/docker/compiler.Dockerfile -t quire-compiler .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md ./
COPY shared shared
COPY compiler_service compiler_service
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir torch==2.14.1 \
    && /opt/quire/bin/pip install --no-cache-dir '.[compiler,redis,s3,signing,otel,tensorrt-rtx]'

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
# Any uid may run this image: every writable path is named here and mounted by the manifests.
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    GOMP_SPINCOUNT=1000 \
    HOME=/tmp \
    QUIRE_DATA=/data \
    QUIRE_CACHE=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor
USER 65532:65532
WORKDIR /tmp
EXPOSE 50061 50071 9461
ENTRYPOINT ["python", "-m", "compiler_service"]
