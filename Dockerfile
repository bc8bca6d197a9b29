# poem-tta on a CPU. Not built here: see docs/releasing.md.
#
#   docker build -t poem-tta .
#   docker run --rm poem-tta                                               # the demo
#   docker run --rm -v "$PWD/out:/home/poem/poem-demo" --user "$(id -u)" poem-tta   # keep its page
#   docker run --rm poem-tta poem list
FROM python:3.12-slim

# The build of torch for CPUs comes first, so that the next step does not bring the libraries of a GPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.6"

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY benchmarks/suites benchmarks/suites
ARG EXTRAS=demo
RUN pip install --no-cache-dir ".[$EXTRAS]" && rm -rf /src

# Whoever runs it may write here; the caches of matplotlib and torch go to /tmp.
RUN useradd --create-home poem && chmod 0777 /home/poem && mkdir -m 0777 /home/poem/state
ENV HOME=/home/poem MPLCONFIGDIR=/tmp/matplotlib TORCH_HOME=/tmp/torch
USER poem
WORKDIR /home/poem

CMD ["poem", "demo"]
