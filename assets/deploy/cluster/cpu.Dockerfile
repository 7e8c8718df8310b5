# The image of the code server, the webserver, the daemon and of steps that need no GPU. From the root of the repository:
#
#     docker build -f assets/deploy/cluster/cpu.Dockerfile -t assay:cpu .
#
# The lock serves as constraints, so that what only the tests need stays out of the image.
FROM python:3.11-slim

# The compiler builds the native decoder when it is first used.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY requirements.lock requirements-data.txt ./
COPY assets/deploy/cluster/requirements.txt cluster.txt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN grep '^torch==' requirements.lock >torch.txt && pip install --no-cache-dir --index-url "$TORCH_INDEX" -r torch.txt
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
ENV ASSAY_HOME=/assay DAGSTER_HOME=/opt/dagster/dagster_home HF_HOME=/assay/huggingface
EXPOSE 4000
CMD ["dagster", "api", "grpc", "--module-name", "assay.definitions", "--location-name", "assay", "--host", "0.0.0.0", "--port", "4000"]
