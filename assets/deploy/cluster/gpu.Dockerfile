# The image of steps that need a GPU: PyTorch with CUDA, and the compiler that Triton calls. From the root of the repository:
#
#     docker build -f assets/deploy/cluster/gpu.Dockerfile -t assay:gpu .
#
# The CUDA libraries come with PyTorch's packages; the driver comes from the node, through NVIDIA's container runtime.
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements.lock requirements-data.txt ./
COPY assets/deploy/cluster/requirements.txt cluster.txt
RUN grep '^torch==' requirements.lock >torch.txt && pip install --no-cache-dir -r torch.txt
RUN pip install --no-cache-dir --no-deps -r requirements-data.txt

COPY pyproject.toml setup.py definitions.py README.md LICENSE ./
COPY schemas schemas
COPY ops ops
COPY kernels kernels
COPY warehouse warehouse
COPY assets assets
RUN pip install --no-cache-dir -c requirements.lock . -r cluster.txt && rm -rf /src/*

RUN useradd --create-home --uid 1000 assay && install -d -o assay /assay /opt/dagster/dagster_home
USER assay
WORKDIR /home/assay
ENV ASSAY_HOME=/assay DAGSTER_HOME=/opt/dagster/dagster_home HF_HOME=/assay/huggingface \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 4000
CMD ["dagster", "api", "grpc", "--module-name", "assay.definitions", "--location-name", "assay", "--host", "0.0.0.0", "--port", "4000"]
